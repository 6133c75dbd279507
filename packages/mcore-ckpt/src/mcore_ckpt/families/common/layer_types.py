"""Rules of layers with a window or without rotation: lists in config.json, patterns in ours."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from mcore_ckpt.families.common.decoder import Description, FieldRule, Theirs
from mcore_ckpt.families.common.fields import Fields, setting
from mcore_models.layer_patterns import read_pattern

LOCAL = "sliding_attention"
FULL = "full_attention"


def _read_window(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    # Their window counts the token itself, ours only the tokens before it.
    return {"window_size": [fields.take("sliding_window", 0) - 1, 0]}


def _write_window(description: Description, _: Theirs) -> Theirs:
    return {"sliding_window": setting(description, "window_size")[0] + 1 or None}


WINDOW = FieldRule(covers=("window_size",), read=_read_window, write=_write_window)
"""A sliding window in all layers; null: no window."""


def windows(every: int, *, unused: bool = False) -> FieldRule:
    """Return the rule of a sliding window that some layers have.

    Args:
        every: without ``layer_types``, each ``every``-th layer has no window; 0: all layers
            have a window.
        unused: whether the size is kept if no layer has a window.
    """
    return FieldRule(
        covers=("window_size", "window_attn_skip_freq"),
        read=partial(_read_windows, every=every, unused=unused),
        write=_write_windows,
        keep=("layer_types",),
    )


def _read_windows(
    fields: Fields, ours: dict[str, Any], *, every: int, unused: bool = False
) -> dict[str, Any]:
    size = fields.maybe("sliding_window")
    if unused and size == 0:
        raise ValueError("config.json has sliding_window=0: it must be null, or from 1.")
    size = size or 0
    every = fields.maybe("sliding_window_pattern") or every
    every = fields.maybe("_sliding_window_pattern") or every
    types = fields.maybe("layer_types")
    if types is None:
        if not isinstance(every, int):
            raise ValueError(
                f"config.json has sliding_window_pattern={every!r}: it must be a number, or "
                f"layer_types must name the kind of each layer, {LOCAL} or {FULL}."
            )
        layers = range(ours["num_layers"])
        has_window = [not every or (layer + 1) % every != 0 for layer in layers]
    else:
        has_window = [kind == LOCAL for kind in types]
        if unknown := sorted(set(types) - {LOCAL, FULL}):
            raise ValueError(
                f"config.json has layer_types {', '.join(map(repr, unknown))}, which mcore "
                f"cannot represent here: only {LOCAL} and {FULL}."
            )
    if not size or not (unused or any(has_window)):
        return {"window_size": [-1, 0]}
    return {
        "window_size": [size - 1, 0],
        "window_attn_skip_freq": write_pattern([not has for has in has_window], ones=False),
    }


def _write_windows(description: Description, _: Theirs) -> Theirs:
    size = setting(description, "window_size")[0] + 1
    skipped = read_skipped(description, "window_attn_skip_freq", ones=False)
    return {
        "sliding_window": size or None,
        "layer_types": [FULL if full or not size else LOCAL for full in skipped],
    }


def _read_upper_windows(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    """Return our window fields, by ``layer_types`` or from ``max_window_layers`` on."""
    first = fields.take("max_window_layers", 28)
    if not fields.take("use_sliding_window", False):
        fields.maybe("sliding_window")
        fields.maybe("layer_types")
        return {}
    default = [LOCAL if layer >= first else FULL for layer in range(ours["num_layers"])]
    values = {"layer_types": fields.maybe("layer_types") or default}
    values["sliding_window"] = fields.maybe("sliding_window", 4096)
    return _read_windows(Fields(values, ("layer_types",)), ours, every=0)


def _write_upper_windows(description: Description, theirs: Theirs) -> Theirs:
    windows_fields = _write_windows(description, theirs)
    if windows_fields["sliding_window"] is None:
        return {"use_sliding_window": False}
    types = windows_fields["layer_types"]
    first = types.index(LOCAL) if LOCAL in types else len(types)
    return {**windows_fields, "use_sliding_window": True, "max_window_layers": first}


UPPER_WINDOWS = FieldRule(
    covers=("window_size", "window_attn_skip_freq"),
    read=_read_upper_windows,
    write=_write_upper_windows,
    keep=("layer_types", "max_window_layers"),
)
"""Qwen's windows: a switch, and the first layer with a window."""


def _read_no_window(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    fields.must_be("use_sliding_window", False)
    fields.take("sliding_window", 0)
    return {}


def _write_no_window(_: Description, _theirs: Theirs) -> Theirs:
    return {"use_sliding_window": False}


NO_WINDOW = FieldRule(read=_read_no_window, write=_write_no_window)
"""A window that is switched off: its size is ignored."""


def read_rotated(fields: Fields, num_layers: int) -> list[bool]:
    """Return for each layer whether queries and keys rotate."""
    interval = fields.take("no_rope_layer_interval")
    rotated = fields.maybe("no_rope_layers")  # despite the name, 1 means rotation
    if rotated:
        return [bool(has) for has in rotated]
    return [(layer + 1) % interval != 0 for layer in range(num_layers)]


def _read_rotation(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    rotated = read_rotated(fields, ours["num_layers"])
    return {"rope_skip_freq": write_pattern([not has for has in rotated])}


def _write_rotation(description: Description, _: Theirs) -> Theirs:
    skipped = read_skipped(description, "rope_skip_freq")
    return {"no_rope_layers": [int(not skip) for skip in skipped]}


ROTATED_LAYERS = FieldRule(
    covers=("rope_skip_freq",), read=_read_rotation, write=_write_rotation
)
"""Rotary positions in some layers only."""


def _read_rotation_by_window(_: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    if ours["window_size"][0] < 0:
        return {}
    skipped = read_skipped({"config": ours}, "window_attn_skip_freq", ones=False)
    return {"rope_skip_freq": write_pattern(skipped)}


def _write_rotation_by_window(description: Description, _: Theirs) -> Theirs:
    skipped = read_skipped(description, "window_attn_skip_freq", ones=False)
    has_window = setting(description, "window_size")[0] >= 0
    if read_skipped(description, "rope_skip_freq") != [has_window and one for one in skipped]:
        raise ValueError(
            "it cannot express rotation other than in exactly the layers with a window: "
            f"--rope-skip-freq {setting(description, 'rope_skip_freq')}"
        )
    return {}


ROTATED_WINDOWS = FieldRule(
    covers=("rope_skip_freq",), read=_read_rotation_by_window, write=_write_rotation_by_window
)
"""Rotation in layers with a window only; in all layers of a model without windows."""


def read_skipped(description: Description, name: str, *, ones: bool = True) -> list[bool]:
    """Return for each layer whether a pattern field skips the feature there.

    Args:
        description: description of the model.
        name: name of the pattern field.
        ones: whether 1 in a list means skipped.

    Raises:
        ValueError: if the field is neither a number nor a list.
    """
    num_layers = setting(description, "num_layers")
    pattern = read_pattern(setting(description, name), "--" + name.replace("_", "-"))
    if isinstance(pattern, int):
        return [pattern > 0 and (i + 1) % pattern == 0 for i in range(num_layers)]
    return [(entry == 1) == ones for entry in pattern]


def write_pattern(skipped: Sequence[bool], *, ones: bool = True) -> str:
    """Return the shortest pattern that skips these layers; inverse of ``read_skipped``."""
    if not any(skipped):
        return "0"
    every = list(skipped).index(True) + 1
    if list(skipped) == [(i + 1) % every == 0 for i in range(len(skipped))]:
        return str(every)
    return str([int(skip == ones) for skip in skipped]).replace(" ", "")
