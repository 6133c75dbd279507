"""GPT-2: learned positions, LayerNorm, biases, and linears stored [in, out]."""

from collections.abc import Collection, Mapping
from typing import Any

from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import (
    Fields,
    refuse_variants,
    require,
    require_family,
    setting,
    settings,
)
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_parallel.logical_tensors import ffn_size

_LAYER = "transformer.h.*."


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description; see ``families``."""
    fields = Fields(config)
    fields.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.must_be("scale_attn_weights", True)
    tied = fields.take("tie_word_embeddings", True)
    # One dropout of ours stands for two of theirs.
    dropout = fields.take("resid_pdrop", 0.1)
    fields.must_be("embd_pdrop", dropout)
    for name in ("summary_type", "summary_use_proj", "summary_activation", "n_ctx"):
        fields.take(name, 0)
    fields.take("summary_proj_to_labels", 0)
    fields.take("summary_first_dropout", 0)
    hidden = fields.take("n_embd")
    ours = {
        "num_layers": fields.take("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": fields.take("n_head"),
        "ffn_hidden_size": fields.take("n_inner", 4 * hidden),
        "max_position_embeddings": fields.take("n_positions"),
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": fields.take("layer_norm_epsilon", 1e-5),
        "swiglu": False,
        "openai_gelu": True,
        "add_bias_linear": True,
        "hidden_dropout": dropout,
        "attention_dropout": fields.take("attn_pdrop", 0.1),
        "init_method_std": fields.take("initializer_range", 0.02),
        "untie_embeddings_and_output_weights": not tied,
    }
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json; see ``families``."""
    require_family(description, "gpt")
    no_experts(description)
    refuse_variants(description)
    require(
        description,
        hybrid_override_pattern="",
        position_embedding_type="learned_absolute",
        normalization="LayerNorm",
        apply_layernorm_1p=False,
        swiglu=False,
        openai_gelu=True,
        add_bias_linear=True,
        qk_layernorm=False,
        window_size=(-1, 0),
        multi_latent_attention=False,
    )
    heads, hidden = (setting(description, n) for n in ("num_attention_heads", "hidden_size"))
    if setting(description, "num_query_groups") not in (0, heads):
        raise ValueError("it cannot express --num-query-groups: only as many as heads")
    if setting(description, "kv_channels") not in (0, hidden // heads):
        raise ValueError("it cannot express --kv-channels: only hidden size / heads")
    dropout = setting(description, "hidden_dropout")
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": description["vocab_size"],
        "n_embd": hidden,
        "n_layer": setting(description, "num_layers"),
        "n_head": heads,
        "n_inner": ffn_size(settings(description)),
        "n_positions": setting(description, "max_position_embeddings"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": setting(description, "norm_epsilon"),
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": setting(description, "attention_dropout"),
        "initializer_range": setting(description, "init_method_std"),
        "tie_word_embeddings": not setting(description, "untie_embeddings_and_output_weights"),
    }


def renames(names: Collection[str]) -> dict[str, str]:
    """Name the tensors of a folder of the bare model, as the published ones are."""
    if any(name.startswith("transformer.") for name in names):
        return {}
    return {name: f"transformer.{name}" for name in names if name != "lm_head.weight"}


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    rules = [
        Rule("embedding.weight", "transformer.wte.weight"),
        Rule("position_embedding.weight", "transformer.wpe.weight"),
    ]
    for kind in ("weight", "bias"):
        linear = kind == "weight"
        qkv = tuple(f"blocks.*.attention.qkv.{part}.{kind}" for part in ("q", "k", "v"))
        rules += [
            Rule(f"blocks.*.attention_norm.{kind}", f"{_LAYER}ln_1.{kind}"),
            Rule(qkv, f"{_LAYER}attn.c_attn.{kind}", linear),
            Rule(f"blocks.*.attention.proj.{kind}", f"{_LAYER}attn.c_proj.{kind}", linear),
            Rule(f"blocks.*.mlp_norm.{kind}", f"{_LAYER}ln_2.{kind}"),
            Rule(f"blocks.*.mlp.fc1.{kind}", f"{_LAYER}mlp.c_fc.{kind}", linear),
            Rule(f"blocks.*.mlp.fc2.{kind}", f"{_LAYER}mlp.c_proj.{kind}", linear),
        ]
    rules += [
        Rule(f"final_norm.{kind}", f"transformer.ln_f.{kind}") for kind in ("weight", "bias")
    ]
    is_untied = setting(description, "untie_embeddings_and_output_weights")
    if is_untied:
        rules.append(Rule("head.weight", "lm_head.weight"))
    return Table(
        tuple(rules),
        setting(description, "num_layers"),
        # Causal masks that old folders carry.
        droppable=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
        copies={} if is_untied else {"lm_head.weight": "transformer.wte.weight"},
    )
