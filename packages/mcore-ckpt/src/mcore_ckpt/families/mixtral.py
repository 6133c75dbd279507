"""Mixtral: Mistral with experts in every layer."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.decoder import (
    ANGLES,
    Fields,
    around,
    attention_rules,
    read_common,
    require,
    setting,
    tied_copies,
    write_common,
)
from mcore_ckpt.rules import Rule, Table

_MOE_DEFAULTS: dict[str, Any] = {
    "num_experts": 0,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 0,
    "moe_layer_freq": "1",
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": 0.0,
    "moe_router_num_groups": 0,
    "moe_router_enable_expert_bias": False,
    "moe_aux_loss_coeff": 0.0,
    "moe_input_jitter_eps": 0.0,
    "moe_shared_expert_intermediate_size": 0,
    "moe_expert_capacity_factor": 0.0,
}
"""MoEConfig's defaults; a test holds them equal to mcore-moe's."""


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config)
    ours = read_common(fields) | {"window_size": [fields.take("sliding_window", 0) - 1, 0]}
    moe = {
        "num_experts": fields.take("num_local_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": ours["ffn_hidden_size"],
        "moe_aux_loss_coeff": fields.take("router_aux_loss_coef", 0.0),
        "moe_input_jitter_eps": fields.take("router_jitter_noise", 0.0),
    }
    vocab_size = fields.take("vocab_size")
    fields.finish()
    return {"family": "gpt", "vocab_size": vocab_size, "config": ours, "moe": moe}


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    require_experts(description)
    require(description, qk_layernorm=False, add_bias_linear=False, add_qkv_bias=False)
    if expert_setting(description, "moe_router_pre_softmax"):
        raise ValueError("it cannot say --moe-router-pre-softmax")
    if 0 in expert_layers(description):
        raise ValueError("it cannot say --moe-layer-freq: every layer has experts")
    theirs = {"model_type": "mixtral", **write_common(description, "MixtralForCausalLM")}
    before = setting(description, "window_size")[0]
    width = expert_setting(description, "moe_ffn_hidden_size") or theirs["intermediate_size"]
    return theirs | {
        "intermediate_size": width,
        "sliding_window": before + 1 or None,
        "num_local_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "router_aux_loss_coef": expert_setting(description, "moe_aux_loss_coeff"),
        "router_jitter_noise": expert_setting(description, "moe_input_jitter_eps"),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    mlp = "model.layers.*.block_sparse_moe."
    rules = [
        *attention_rules(),
        Rule("blocks.*.moe.router.weight", f"{mlp}gate.weight"),
        *expert_rules(f"{mlp}experts.*.", ("w1", "w3", "w2")),
    ]
    return Table(
        around(description, rules),
        setting(description, "num_layers"),
        expert_setting(description, "num_experts"),
        droppable=ANGLES,
        copies=tied_copies(description),
    )


def expert_rules(
    theirs: str, names: tuple[str, str, str], layers: tuple[int, ...] | None = None
) -> list[Rule]:
    """Rules of gated experts; ``names`` are gate, up and down of the family."""
    ours = ("fc1.gate", "fc1.up", "fc2")
    return [
        Rule(f"blocks.*.moe.experts.*.{mine}.weight", f"{theirs}{name}.weight", layers=layers)
        for mine, name in zip(ours, names, strict=True)
    ]


def expert_setting(description: Mapping[str, Any], name: str) -> Any:
    """Return a MoEConfig field of a description, its default where it is left out."""
    return description.get("moe", {}).get(name, _MOE_DEFAULTS[name])


def expert_layers(description: Mapping[str, Any]) -> list[int]:
    """Say of each layer whether it has experts (1) or not (0).

    Raises:
        ValueError: if ``moe_layer_freq`` is neither a number nor a list of 0 and 1 as long as
            the model is deep.
    """
    num_layers = setting(description, "num_layers")
    text = str(expert_setting(description, "moe_layer_freq")).replace(" ", "")
    if text.isdecimal() and int(text) > 0:
        return [int(layer % int(text) == 0) for layer in range(num_layers)]
    pattern: list[int] = []
    for term in text.split("+"):
        items, _, times = term.partition("*")
        values = items.strip("[]").split(",")
        if not set(values) <= {"0", "1"} or not (times or "1").isdecimal():
            raise ValueError(f"--moe-layer-freq {text} is no number and no list of 0 and 1")
        pattern += [int(value) for value in values] * int(times or 1)
    if len(pattern) != num_layers:
        raise ValueError(f"--moe-layer-freq {text} lists {len(pattern)} of {num_layers} layers")
    return pattern


def require_experts(description: Mapping[str, Any]) -> None:
    """Refuse a dense model and routing that no family here can say.

    Raises:
        ValueError: with the flag.
    """
    if not expert_setting(description, "num_experts"):
        raise ValueError("it cannot say a model without experts")
    for name in (
        "moe_router_score_function",
        "moe_router_topk_scaling_factor",
        "moe_router_num_groups",
        "moe_router_enable_expert_bias",
        "moe_shared_expert_intermediate_size",
        "moe_expert_capacity_factor",
    ):
        value = expert_setting(description, name)
        if value != _MOE_DEFAULTS[name]:
            raise ValueError(f"it cannot say --{name.replace('_', '-')} {value}")
