"""Fields of experts in a description: the router, and which layers have experts."""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from mcore_ckpt.families.common.fields import (
    default_values,
    require_value,
    setting,
    settings,
)
from mcore_models.logical_tensors import expert_size, moe_layers
from mcore_moe.config import MoEConfig

_DEFAULTS = default_values(MoEConfig)

PLAIN_ROUTING = {
    name: _DEFAULTS[name]
    for name in (
        "moe_router_score_function",
        "moe_router_topk_scaling_factor",
        "moe_router_num_groups",
        "moe_router_enable_expert_bias",
        "moe_router_bias",
        "moe_apply_probs_on_input",
    )
}
"""Softmax over all experts: how most families with experts route."""

WHOLE_TOKENS = {
    name: _DEFAULTS[name] for name in ("moe_latent_size", "moe_expert_capacity_factor")
}
"""Experts see tokens in full width and drop none: in every family."""


def expert_setting(description: Mapping[str, Any], name: str) -> Any:
    """Return a MoEConfig field of a description, its default where it is left out."""
    return description.get("moe", {}).get(name, _DEFAULTS[name])


def described_expert_size(description: Mapping[str, Any]) -> int:
    """Width inside one routed expert."""
    return expert_size(settings(description), expert_settings(description))


def expert_settings(description: Mapping[str, Any]) -> Any:
    """Return the MoEConfig fields of a description as attributes, defaults too."""
    return SimpleNamespace(**{**_DEFAULTS, **description.get("moe", {})})


def expert_layers(description: Mapping[str, Any]) -> list[int]:
    """Say of each layer whether it has experts (1) or not (0).

    Raises:
        ValueError: if ``moe_layer_freq`` is neither a number nor a list of 0 and 1 as long as
            the model is deep.
    """
    num_layers = setting(description, "num_layers")
    return [int(has) for has in moe_layers(expert_settings(description), num_layers)]


def sparse_and_dense(description: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Number the layers with experts, and those without."""
    pattern = expert_layers(description)
    sparse, dense = (
        tuple(layer for layer, has in enumerate(pattern) if has == wanted) for wanted in (1, 0)
    )
    return sparse, dense


def write_layers(has_experts: Iterable[int]) -> str:
    """Write which layers have experts as ``moe_layer_freq``."""
    pattern = [int(has) for has in has_experts]
    return "1" if all(pattern) else str(pattern).replace(" ", "")


def require_experts(description: Mapping[str, Any]) -> None:
    """Refuse a dense model and routing that no family here can say."""
    if not expert_setting(description, "num_experts"):
        raise ValueError("it cannot express a model without experts")
    require_routing(description, {**PLAIN_ROUTING, "moe_shared_expert_intermediate_size": 0})


def require_routing(description: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuse experts whose fields a family cannot express."""
    for name, wanted in values.items():
        require_value(name, expert_setting(description, name), wanted)


def no_experts(description: Mapping[str, Any]) -> None:
    """Refuse a model with experts."""
    experts = description.get("moe", {}).get("num_experts", 0)
    if experts:
        raise ValueError(f"it cannot express --num-experts {experts}: only 0")
