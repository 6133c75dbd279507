"""GPT-NeoX and Pythia: attention and feed-forward layer side by side, a norm each."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import read_common, write_common
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.mapping.rules import Rule, Table

_FIXED: dict[str, Any] = {"normalization": "LayerNorm", "swiglu": False}
_ABSENT = {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048}
_LAYER = "gpt_neox.layers.*."
_LINEARS = {
    "attention.proj": "attention.dense",
    "mlp.fc1": "mlp.dense_h_to_4h",
    "mlp.fc2": "mlp.dense_4h_to_h",
}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    # Old spellings of the rotary base and of how much of each head rotates.
    stated = {k: v for k, v in config.items() if k not in ("rotary_emb_base", "rotary_pct")}
    rope = config.get("rope_parameters") or {}
    if "partial_rotary_factor" not in rope:
        stated["partial_rotary_factor"] = config.get("rotary_pct") or 0.25
    if "rope_theta" not in rope:
        stated["rope_theta"] = config.get("rotary_emb_base") or 10000.0
    fields = Fields(stated, absent=_ABSENT)
    activation = fields.take("hidden_act", "gelu")
    if activation not in ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh"):
        raise ValueError(
            f"config.json has hidden_act={activation!r}, which mcore cannot represent."
        )
    fields.maybe("classifier_dropout")
    fields.must_be("attention_bias", True)
    fields.must_be("is_decoder", False, True)
    ours = read_common(fields, partial=True, epsilon="layer_norm_eps") | _FIXED
    is_parallel = fields.take("use_parallel_residual", True)
    ours |= {
        "openai_gelu": activation != "gelu",
        "add_bias_linear": True,
        "parallel_residual": "two_norms" if is_parallel else "off",
        "hidden_dropout": fields.take("hidden_dropout", 0.0),
    }
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, **_FIXED, apply_layernorm_1p=False, qk_layernorm=False)
    require(description, add_bias_linear=True, squared_relu=False, window_size=(-1, 0))
    kind = setting(description, "parallel_residual")
    if kind == "one_norm":
        raise ValueError("it cannot say --parallel-residual one_norm")
    dropout = setting(description, "hidden_dropout")
    without = {**description, "config": {**description["config"], "hidden_dropout": 0.0}}
    theirs = write_common(
        without, "GPTNeoXForCausalLM", partial=True, says=("parallel_residual",)
    )
    heads = theirs["num_attention_heads"]
    own = theirs["hidden_size"] // heads
    if theirs.pop("head_dim") != own or theirs.pop("num_key_value_heads") != heads:
        raise ValueError("it cannot say --kv-channels or --num-query-groups")
    theirs["layer_norm_eps"] = theirs.pop("rms_norm_eps")
    rope = theirs["rope_parameters"]
    rope["partial_rotary_factor"] = setting(description, "rotary_percent")
    theirs.pop("partial_rotary_factor", None)
    return theirs | {
        "model_type": "gpt_neox",
        "hidden_act": "gelu_new" if setting(description, "openai_gelu") else "gelu",
        "hidden_dropout": dropout,
        "use_parallel_residual": kind == "two_norms",
        "rotary_pct": rope["partial_rotary_factor"],
        "rotary_emb_base": rope["rope_theta"],
        "attention_bias": True,
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    heads = setting(description, "num_attention_heads")
    rules = [Rule("embedding.weight", "gpt_neox.embed_in.weight")]
    for kind in ("weight", "bias"):
        qkv = tuple(f"blocks.*.attention.qkv.{part}.{kind}" for part in "qkv")
        there = f"{_LAYER}attention.query_key_value.{kind}"
        rules += [
            Rule(f"blocks.*.attention_norm.{kind}", f"{_LAYER}input_layernorm.{kind}"),
            Rule(f"blocks.*.mlp_norm.{kind}", f"{_LAYER}post_attention_layernorm.{kind}"),
            Rule(qkv, there, groups=heads),
            *(
                Rule(f"blocks.*.{ours}.{kind}", f"{_LAYER}{theirs}.{kind}")
                for ours, theirs in _LINEARS.items()
            ),
        ]
    rules += [
        Rule(f"final_norm.{kind}", f"gpt_neox.final_layer_norm.{kind}")
        for kind in ("weight", "bias")
    ]
    is_untied = setting(description, "untie_embeddings_and_output_weights")
    head = [Rule("head.weight", "embed_out.weight")] if is_untied else []
    return Table(
        (*rules, *head),
        setting(description, "num_layers"),
        # Causal masks and angles that old folders carry.
        droppable=tuple(
            f"{_LAYER}attention.{name}"
            for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
        ),
        copies={} if is_untied else {"embed_out.weight": "gpt_neox.embed_in.weight"},
    )
