"""A checkpoint that is open: which model it is, and its tensors as rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt.mapping.optimizer_state import OptimizerState
from mcore_ckpt.mapping.row_streams import Rows
from mcore_ckpt.mapping.rules import Link


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a user says about an input that the input does not say itself."""

    dtype: str = ""
    """Safetensors' name to cast floating-point weights to; empty: as they are."""
    config: str = ""
    """config.json, or folder with one, of the model; or JSON of one of our descriptions."""
    vocab_size: int = 0
    """Rows of vocabulary to keep; beyond the input's, rows of zeros. 0: as in the input."""
    optimizer: bool = False
    """Whether the optimizer's state, and how far the run is, are wanted too."""


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
    """Whether the model is the one that ``ReadOptions.config`` names: the input did not say."""
