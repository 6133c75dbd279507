"""BLOOM: ALiBi, a norm of the embeddings, LayerNorm and biases everywhere."""

from collections.abc import Collection, Mapping
from typing import Any

from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import (
    Fields,
    refuse_variants,
    require,
    require_family,
    setting,
)
from mcore_ckpt.mapping.rules import Rule, Table

FIXED: dict[str, Any] = {
    "position_embedding_type": "alibi",
    "normalization": "LayerNorm",
    "swiglu": False,
}
"""What all models with ALiBi here are."""
_OWN = {**FIXED, "openai_gelu": True, "add_bias_linear": True, "embedding_layernorm": True}
_NAMES = {
    "blocks.*.attention_norm": "h.*.input_layernorm",
    "blocks.*.attention.proj": "h.*.self_attention.dense",
    "blocks.*.mlp_norm": "h.*.post_attention_layernorm",
    "blocks.*.mlp.fc1": "h.*.mlp.dense_h_to_4h",
    "blocks.*.mlp.fc2": "h.*.mlp.dense_4h_to_h",
    "embedding_norm": "word_embeddings_layernorm",
    "final_norm": "ln_f",
}
_WITHOUT_EFFECT = (
    *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner"),
    *("offset_alibi", "seq_length", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact"),
)


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description."""
    olds = {"n_embed": "hidden_size", "num_hidden_layers": "n_layer"}
    olds |= {"num_attention_heads": "n_head"}
    fields = Fields({olds.get(name, name): value for name, value in config.items()})
    fields.must_be("apply_residual_connection_post_layernorm", False)
    for name in _WITHOUT_EFFECT:
        fields.maybe(name)
    hidden = fields.take("hidden_size")
    ours = {
        **_OWN,
        "num_layers": fields.take("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": fields.take("n_head"),
        "ffn_hidden_size": 4 * hidden,
        "norm_epsilon": fields.take("layer_norm_epsilon", 1e-5),
        "hidden_dropout": fields.take("hidden_dropout", 0.0),
        "attention_dropout": fields.take("attention_dropout", 0.0),
        "init_method_std": fields.take("initializer_range", 0.02),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", True),
    }
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json."""
    sizes = alibi_sizes(description, _OWN, "embedding_layernorm")
    require(description, max_position_embeddings=0)
    return {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        **dict(zip(("hidden_size", "n_layer", "n_head", "vocab_size"), sizes, strict=True)),
        "layer_norm_epsilon": setting(description, "norm_epsilon"),
        "hidden_dropout": setting(description, "hidden_dropout"),
        "attention_dropout": setting(description, "attention_dropout"),
        "initializer_range": setting(description, "init_method_std"),
        "tie_word_embeddings": not setting(description, "untie_embeddings_and_output_weights"),
    }


def alibi_sizes(
    description: Mapping[str, Any], fixed: Mapping[str, Any], *says: str
) -> tuple[int, int, int, int]:
    """Check what families with ALiBi cannot say; return width, layers, heads and vocabulary.

    Args:
        description: of the model.
        fixed: values that the family's models have.
        says: fields of ``VARIANTS`` that the family has.
    """
    require_family(description, "gpt")
    no_experts(description)
    refuse_variants(description, *says)
    require(description, **fixed, apply_layernorm_1p=False, squared_relu=False)
    require(description, qk_layernorm=False, window_size=(-1, 0), multi_latent_attention=False)
    heads, hidden = (setting(description, n) for n in ("num_attention_heads", "hidden_size"))
    wanted = {
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": 4 * hidden,
    }
    for name, value in wanted.items():
        if setting(description, name) not in (0, value):
            require(description, **{name: value})
    return hidden, setting(description, "num_layers"), heads, description["vocab_size"]


def renames(names: Collection[str]) -> dict[str, str]:
    """Name the tensors of a folder of the bare model, as published ones are."""
    if any(name.startswith("transformer.") for name in names):
        return {}
    return {name: f"transformer.{name}" for name in names if name != "lm_head.weight"}


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    rules = [Rule("embedding.weight", "transformer.word_embeddings.weight")]
    for kind in ("weight", "bias"):
        qkv = tuple(f"blocks.*.attention.qkv.{part}.{kind}" for part in "qkv")
        there = f"transformer.h.*.self_attention.query_key_value.{kind}"
        rules.append(Rule(qkv, there, groups=setting(description, "num_attention_heads")))
        rules += [
            Rule(f"{ours}.{kind}", f"transformer.{theirs}.{kind}")
            for ours, theirs in _NAMES.items()
        ]
    return with_head(description, rules, "transformer.word_embeddings.weight")


def with_head(description: Mapping[str, Any], rules: list[Rule], embedding: str) -> Table:
    """Add the head, or name it as a copy of the embedding."""
    is_untied = setting(description, "untie_embeddings_and_output_weights")
    head = [Rule("head.weight", "lm_head.weight")] if is_untied else []
    return Table(
        (*rules, *head),
        setting(description, "num_layers"),
        copies={} if is_untied else {"lm_head.weight": embedding},
    )
