"""Command-R7B and A: three of four layers have a window, and only these have rotation."""

from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import Description, FieldRule, Theirs
from mcore_ckpt.families.common.fields import Fields, setting
from mcore_ckpt.families.common.layer_types import ROTATED_WINDOWS, windows
from mcore_ckpt.families.dense import cohere


def _read(_: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    if ours["window_size"][0] < 0:
        raise ValueError("config.json has no layer with sliding_window: use model_type cohere.")
    return {}


def _write(description: Description, _: Theirs) -> Theirs:
    if setting(description, "window_size")[0] < 0:
        raise ValueError("it cannot express a model without --window-size")
    return {}


FAMILY = replace(
    cohere.FAMILY,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    absent={**cohere.FAMILY.absent, "sliding_window": 4096},
    refused={"use_qk_norm": False},
    parts=(
        *cohere.PARTS,
        windows(4),
        FieldRule(read=_read, write=_write),
        ROTATED_WINDOWS,
    ),
    theta=1e4,
)
