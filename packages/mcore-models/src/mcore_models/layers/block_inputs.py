"""What all blocks of a model are given beside the residual stream."""

from dataclasses import dataclass

from torch import Tensor

from mcore_models.layers.rope import RotaryTables
from mcore_models.protocol import ModelState
from mcore_parallel.context_parallel.packed_sequences import Documents


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockInputs:
    """One micro-batch as the layers see it, equal for all of them."""

    rotary: RotaryTables | None = None
    """Tables of ``rope.rotary_tables``; None: positions are not rotated."""
    local_rotary: RotaryTables | None = None
    """Tables of layers with a window, where they are others (``--rotary-base-local``)."""
    temperature: Tensor | None = None
    """Factor on queries of layers without rotation, ``[S, 1, 1, 1]`` or ``[S, B, 1, 1]``."""
    documents: Documents | None = None
    """Packed in the rows; none sees another."""
    state: ModelState | None = None
    """What the layers remember of earlier tokens, extended by these; None: nothing."""
