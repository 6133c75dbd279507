"""The largest magnitude of a tensor, left with it by the kernel that wrote it.

A cast with a scale of the tensor itself reads it twice, first for its largest magnitude, which
the kernel before could have found on its way. It leaves that with the tensor. What is made of
the tensor, such as a view, a gathered or a summed one, has none, nor has one that was written
to since: their casts look themselves.
"""

import torch
from jaxtyping import Float
from torch import Tensor

_NAME = "_mcore_largest"


def note_largest(x: Float[Tensor, "..."], amax: Float[Tensor, " 1"]) -> None:
    """Leave the largest magnitude with a tensor: of all its numbers, NaN if there is one.

    Args:
        x: any tensor; without effect in inference mode, where writes are not counted.
        amax: float32.
    """
    if not (x.is_inference() or torch.compiler.is_compiling()):
        setattr(x, _NAME, (amax, x._version))


def noted_largest(x: Float[Tensor, "..."]) -> Float[Tensor, " 1"] | None:
    """Return what was left with this very tensor; None: nothing, or it was written to since."""
    amax, version = getattr(x, _NAME, (None, 0))
    return amax if amax is not None and version == x._version else None
