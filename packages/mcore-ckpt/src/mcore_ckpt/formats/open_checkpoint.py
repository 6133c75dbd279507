"""A checkpoint that is open: which model it is, and its tensors as rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_ckpt.families import find_family
from mcore_ckpt.families.common.shape_check import check_counts
from mcore_ckpt.formats.json_files import read_json_object
from mcore_ckpt.mapping.optimizer_state import OptimizerState
from mcore_ckpt.mapping.row_streams import Rows
from mcore_ckpt.mapping.rules import Link

_MOST_LAYERS = 10_000
"""Most layers or experts of a model that is described apart from its tensors."""


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint whose tensors can be read."""

    description: dict[str, Any]
    """The model, in our fields."""
    links: Sequence[Link]
    """How its tensors are ours."""
    theirs: Rows
    """Its tensors under its own names."""
    ours: Rows
    """Its tensors under logical names, resized to ``vocab_size``."""
    hf: dict[str, Any] = field(default_factory=dict)
    """``model_type`` and carried fields of the Hugging Face model that it came from."""
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the tokenizer."""
    generation: Mapping[str, bytes] = field(default_factory=dict)
    """generation_config.json, if there is one."""
    left_behind: int = 0
    """Entries that are no weights (optimizer, random state) and are not converted."""
    not_carried: tuple[str, ...] = ()
    """Files beside its weights that are not converted."""
    state: OptimizerState | None = None
    """The optimizer's, if it was to be read."""
    quantization: str = ""
    """How the folder stores its matrices, which are widened on the way; empty: as they are."""
    took_config: bool = False
    """Whether the model is the one that ``--config`` names: the input did not say."""


def description_in(config: str) -> dict[str, Any]:
    """Read a description out of what ``--config`` names; empty if nothing is named."""
    if not config:
        return {}
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        found = read_json_object(path)
    except FileNotFoundError:
        raise ValueError(f"--config {config}: there is no {path}.") from None
    # Which tensors there are is compared later.
    check_counts(found, [(_MOST_LAYERS, 1, 1)], str(path))
    if "model_type" in found:
        return find_family(found["model_type"]).to_ours(found)
    if "family" in found and "config" in found:
        return found
    raise ValueError(f"--config {config} has neither model_type nor family: it names no model.")
