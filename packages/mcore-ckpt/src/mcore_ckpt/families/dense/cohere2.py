"""Command-R7B and A: windows in three of four layers, and rotation in those only."""

from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import Description, Part, Theirs
from mcore_ckpt.families.common.fields import Fields, setting
from mcore_ckpt.families.common.layer_types import read_skipped, windows, write_pattern
from mcore_ckpt.families.dense import cohere


def _read(_: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    if ours["window_size"][0] < 0:
        raise ValueError(
            "config.json has no layer with sliding_window: only Cohere is without."
        )
    skipped = read_skipped({"config": ours}, "window_attn_skip_freq", ones=False)
    return {"rope_skip_freq": write_pattern(skipped)}


def _write(description: Description, _: Theirs) -> Theirs:
    skipped = read_skipped(description, "window_attn_skip_freq", ones=False)
    if setting(description, "window_size")[0] < 0:
        raise ValueError("it cannot express a model without --window-size")
    if read_skipped(description, "rope_skip_freq") != skipped:
        raise ValueError(
            "it cannot express that layers with a window do not rotate, or others do: "
            f"--rope-skip-freq {setting(description, 'rope_skip_freq')}"
        )
    return {}


FAMILY = replace(
    cohere.FAMILY,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    absent={**cohere.FAMILY.absent, "sliding_window": 4096},
    only={},
    refused=cohere.FAMILY.only,
    parts=(
        *cohere.FAMILY.parts,
        windows(4),
        Part(says=("rope_skip_freq",), read=_read, write=_write),
    ),
    theta=1e4,
)
