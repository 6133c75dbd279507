"""Command-R7B and A: windows in three of four layers, and rotation in those only."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.fields import Fields, setting
from mcore_ckpt.families.common.layer_types import read_skipped, read_windows, write_windows
from mcore_ckpt.families.dense.cohere import ABSENT, read_cohere, table, write_cohere

__all__ = ["table", "to_ours", "to_theirs"]


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    absent = {**ABSENT, "sliding_window": 4096}
    fields = Fields(config, keep=("layer_types",), absent=absent)
    ours = read_cohere(fields, theta=1e4)
    ours |= read_windows(fields, ours["num_layers"], 4)
    if ours["window_size"][0] < 0:
        raise ValueError(
            "config.json has no layer with sliding_window: only Cohere is without."
        )
    skipped = read_skipped({"config": ours}, "window_attn_skip_freq", ones=False)
    ours["rope_skip_freq"] = _flipped(ours["window_attn_skip_freq"], skipped)
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    says = ("rope_skip_freq", "window_attn_skip_freq")
    theirs = write_cohere(description, "Cohere2ForCausalLM", says)
    skipped = read_skipped(description, "window_attn_skip_freq", ones=False)
    if setting(description, "window_size")[0] < 0:
        raise ValueError("it cannot say a model without --window-size")
    if read_skipped(description, "rope_skip_freq") != skipped:
        raise ValueError(
            "it cannot say that layers with a window do not rotate, or others do: "
            f"--rope-skip-freq {setting(description, 'rope_skip_freq')}"
        )
    return {"model_type": "cohere2", **theirs, **write_windows(description)}


def _flipped(text: str, skipped: list[bool]) -> str:
    """Write a pattern of windows, where 1 has one, as one of rotation, where 1 has none."""
    return text if text.isdigit() else str([int(skip) for skip in skipped]).replace(" ", "")
