"""Apertus: Llama with norms of queries and keys, and a feed-forward layer without a gate.

The activation has parameters in each layer, see ``mcore_models.layers.xielu``.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ATTENTION_BIAS,
    Decoder,
    Description,
    decoder_table,
    mlp_rules,
)
from mcore_ckpt.mapping.rules import Rule, Table

_NORMS = {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "rope_parameters": config.get("rope_parameters") or _ROPE}


def _table(description: Description) -> Table:
    activation_rules = [
        Rule(f"blocks.*.mlp.xielu.{name}", f"model.layers.*.mlp.act_fn.{name}")
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    ]
    return decoder_table(description, [*mlp_rules(description), *activation_rules], _NORMS)


FAMILY = Decoder(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    fixed={"qk_layernorm": True, "swiglu": False, "xielu": True},
    absent={"rms_norm_eps": 1e-5, "max_position_embeddings": 65536},
    refused={"mlp_bias": False, "qk_norm": True, "post_norm": False, "hidden_dropout": 0.0},
    parts=(ATTENTION_BIAS,),
    activation=("hidden_act", "xielu"),
    theta=12e6,
    normalize=_normalize,
    weights=_table,
)
