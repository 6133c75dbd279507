"""Which layers have a window, or no rotation: lists in a config.json, patterns of ours."""

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_ckpt.families.common.fields import Fields, setting
from mcore_parallel.layer_patterns import read_pattern

LOCAL = "sliding_attention"
FULL = "full_attention"


def read_windows(fields: Fields, num_layers: int, every: int) -> dict[str, Any]:
    """Read a window and the layers that have it.

    Args:
        fields: of the config.json; ``layer_types`` must be kept in it.
        num_layers: of the model.
        every: every so many-th layer has none where nothing is said; 0: all have one.

    Raises:
        ValueError: for a kind of layer that we cannot represent.
    """
    size = fields.maybe("sliding_window") or 0
    every = fields.maybe("sliding_window_pattern") or every
    every = fields.maybe("_sliding_window_pattern") or every
    types = fields.maybe("layer_types")
    if types is None:
        has_window = [not every or (layer + 1) % every != 0 for layer in range(num_layers)]
    else:
        has_window = [kind == LOCAL for kind in types]
        if unknown := sorted(set(types) - {LOCAL, FULL}):
            raise ValueError(
                f"config.json has layer_types {', '.join(map(repr, unknown))}, which mcore "
                f"cannot represent here: only {LOCAL} and {FULL}."
            )
    if not size or not any(has_window):
        return {"window_size": [-1, 0]}
    return {
        # Theirs counts the token itself, ours those before.
        "window_size": [size - 1, 0],
        "window_attn_skip_freq": write_pattern([not has for has in has_window], ones=False),
    }


def write_windows(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a window and the layers that have it; null is none."""
    size = setting(description, "window_size")[0] + 1
    skipped = read_skipped(description, "window_attn_skip_freq", ones=False)
    return {
        "sliding_window": size or None,
        "layer_types": [FULL if full or not size else LOCAL for full in skipped],
    }


def read_skipped(description: Mapping[str, Any], name: str, *, ones: bool = True) -> list[bool]:
    """Say for each layer whether it goes without what a pattern of ours is about.

    Args:
        description: of the model.
        name: of the field.
        ones: whether 1 in a list stands for such layers.

    Raises:
        ValueError: if the field is neither a number nor a list.
    """
    num_layers = setting(description, "num_layers")
    pattern = read_pattern(setting(description, name), "--" + name.replace("_", "-"))
    if isinstance(pattern, int):
        return [pattern > 0 and (i + 1) % pattern == 0 for i in range(num_layers)]
    return [(entry == 1) == ones for entry in pattern]


def write_pattern(skipped: Sequence[bool], *, ones: bool = True) -> str:
    """Write a pattern as short as it can be; undoes ``read_skipped``."""
    if not any(skipped):
        return "0"
    every = list(skipped).index(True) + 1
    if list(skipped) == [(i + 1) % every == 0 for i in range(len(skipped))]:
        return str(every)
    return str([int(skip == ones) for skip in skipped]).replace(" ", "")
