"""StarCoder-2: LayerNorm and biases everywhere, GELU without a gate, grouped heads."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import (
    around,
    attention_rules,
    read_common,
    tied_copies,
    write_common,
)
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting
from mcore_ckpt.families.dense.mistral import read_window, write_window
from mcore_ckpt.mapping.rules import Rule, Table

_FIXED: dict[str, Any] = {"normalization": "LayerNorm", "swiglu": False, "openai_gelu": True}
_ABSENT = {"norm_epsilon": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.018042}
_MLP = {"fc1": "c_fc", "fc2": "c_proj"}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, absent=_ABSENT)
    fields.must_be("hidden_act", "gelu_pytorch_tanh")
    dropout = fields.take("residual_dropout", 0.0)
    fields.must_be("embedding_dropout", dropout)
    ours = read_common(fields, epsilon="norm_epsilon") | _FIXED
    ours |= {"hidden_dropout": dropout, "window_size": read_window(fields)}
    ours["add_bias_linear"] = fields.take("use_bias", True)
    fields.maybe("mlp_type")
    fields.maybe("norm_type")
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, **_FIXED, apply_layernorm_1p=False, qk_layernorm=False)
    require(description, add_qkv_bias=False)
    dropout = setting(description, "hidden_dropout")
    without = {**description, "config": {**description["config"], "hidden_dropout": 0.0}}
    theirs = write_common(without, "Starcoder2ForCausalLM")
    theirs["norm_epsilon"] = theirs.pop("rms_norm_eps")
    return theirs | {
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "residual_dropout": dropout,
        "embedding_dropout": dropout,
        "use_bias": setting(description, "add_bias_linear"),
        **write_window(description),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    kinds = ("weight", "bias") if setting(description, "add_bias_linear") else ("weight",)
    rules = [
        *attention_rules(description),
        *(
            Rule(f"blocks.*.mlp.{ours}.{kind}", f"model.layers.*.mlp.{theirs}.{kind}")
            for kind in kinds
            for ours, theirs in _MLP.items()
        ),
    ]
    return Table(
        around(description, rules),
        setting(description, "num_layers"),
        copies=tied_copies(description),
    )
