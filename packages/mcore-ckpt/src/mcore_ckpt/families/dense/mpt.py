"""MPT: ALiBi, LayerNorm without bias, no biases, GELU."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.fields import Fields, setting
from mcore_ckpt.families.dense.bloom import FIXED, alibi_sizes, with_head
from mcore_ckpt.mapping.rules import Rule, Table

_OWN: dict[str, Any] = {
    **FIXED,
    **dict.fromkeys(("openai_gelu", "add_bias_linear", "add_qkv_bias", "norm_bias"), False),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
}
_NAMES = {
    "embedding": "wte",
    "blocks.*.attention_norm": "blocks.*.norm_1",
    "blocks.*.attention.proj": "blocks.*.attn.out_proj",
    "blocks.*.mlp_norm": "blocks.*.norm_2",
    "blocks.*.mlp.fc1": "blocks.*.ffn.up_proj",
    "blocks.*.mlp.fc2": "blocks.*.ffn.down_proj",
    "final_norm": "norm_f",
}
_OF_ATTENTION = {
    "attn_type": ("multihead_attention",),
    "attn_pdrop": (0, 0.0),
    "clip_qkv": (),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
    "alibi": (True,),
    "alibi_bias_max": (8,),
}
"""What of their attention's options is here; null is what it says for none."""


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description."""
    flat = {name: value for name, value in config.items() if name != "attn_config"}
    for name, value in (config.get("attn_config") or {}).items():
        if name != "model_type":
            flat[name] = value
    fields = Fields(flat)
    for name, values in _OF_ATTENTION.items():
        fields.must_be(name, *values)
    fields.must_be("expansion_ratio", 4)
    fields.must_be("no_bias", True)
    fields.must_be("logit_scale")
    for name in ("resid_pdrop", "emb_pdrop"):
        fields.must_be(name, 0, 0.0)
    # How their code computes and begins, and what it does not read.
    for name in ("attn_impl", "init_config", "init_device", "learned_pos_emb"):
        fields.maybe(name)
    for name in ("embedding_fraction", "norm_type", "verbose", "tokenizer_name"):
        fields.maybe(name)
    hidden = fields.take("d_model")
    ours = {
        **_OWN,
        "num_layers": fields.take("n_layers"),
        "hidden_size": hidden,
        "num_attention_heads": fields.take("n_heads"),
        "ffn_hidden_size": 4 * hidden,
        "max_position_embeddings": fields.take("max_seq_len", 2048),
        "norm_epsilon": fields.take("layer_norm_epsilon", 1e-5),
        "softmax_scale": fields.maybe("softmax_scale") or 0.0,
        "init_method_std": fields.take("initializer_range", 0.02),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", True),
    }
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json."""
    sizes = alibi_sizes(description, _OWN, "norm_bias", "softmax_scale")
    scale = setting(description, "softmax_scale")
    return {
        "model_type": "mpt",
        "architectures": ["MptForCausalLM"],
        **dict(zip(("d_model", "n_layers", "n_heads", "vocab_size"), sizes, strict=True)),
        "max_seq_len": setting(description, "max_position_embeddings") or 2048,
        "layer_norm_epsilon": setting(description, "norm_epsilon"),
        "initializer_range": setting(description, "init_method_std"),
        "attn_config": {"softmax_scale": scale} if scale else {},
        "tie_word_embeddings": not setting(description, "untie_embeddings_and_output_weights"),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    qkv = tuple(f"blocks.*.attention.qkv.{part}.weight" for part in "qkv")
    rules = [Rule(qkv, "transformer.blocks.*.attn.Wqkv.weight")]
    rules += [
        Rule(f"{ours}.weight", f"transformer.{theirs}.weight")
        for ours, theirs in _NAMES.items()
    ]
    return with_head(description, rules, "transformer.wte.weight")
