"""Llama 2, 3, 3.1, 3.2 and whatever calls itself ``llama``."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.decoder import (
    ANGLES,
    Fields,
    around,
    attention_rules,
    mlp_rules,
    read_common,
    require,
    setting,
    tied_copies,
    write_common,
)
from mcore_ckpt.rules import Table


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config)
    biased = fields.take("attention_bias", False)
    if fields.take("mlp_bias", False) != biased:
        raise ValueError(
            f"config.json has attention_bias={biased} and mlp_bias={not biased}: mcore has "
            "biases in all linears or in none (--add-bias-linear)."
        )
    ours = read_common(fields) | {"add_bias_linear": biased}
    vocab_size = fields.take("vocab_size")
    fields.finish()
    return {"family": "gpt", "vocab_size": vocab_size, "config": ours, "moe": {}}


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    biased = setting(description, "add_bias_linear")
    require(description, qk_layernorm=False, window_size=(-1, 0))
    if not biased:
        require(description, add_qkv_bias=False)
    theirs = {"model_type": "llama", **write_common(description, "LlamaForCausalLM")}
    return theirs | {"attention_bias": biased, "mlp_bias": biased}


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    biased = setting(description, "add_bias_linear")
    kinds = ("weight", "bias") if biased else ("weight",)
    return Table(
        around(description, [*attention_rules(kinds, biased), *mlp_rules(kinds)]),
        setting(description, "num_layers"),
        droppable=ANGLES,
        copies=tied_copies(description),
    )


def no_experts(description: Mapping[str, Any]) -> None:
    """Refuse a model with experts.

    Raises:
        ValueError: with their number.
    """
    experts = description.get("moe", {}).get("num_experts", 0)
    if experts:
        raise ValueError(f"it cannot say --num-experts {experts}: only 0")
