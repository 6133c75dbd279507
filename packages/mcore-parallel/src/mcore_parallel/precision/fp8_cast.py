"""Casts of matrices to fp8 with scales over ranks, and matrices that the cast computes.

The kernels and their arithmetic are in ``kernels.fp8_cast`` and ``kernels.fp8_fine_cast``.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.kernels.fp8_cast import Fp8, cast_by, largest_magnitude
from mcore_parallel.kernels.fp8_fine_cast import FineFp8, cast_lines_by, largest_of_lines
from mcore_parallel.mesh import SINGLE, Axis


class DeferredMatrix(ABC):
    """A matrix that its fp8 cast computes, so that it is never stored in 16 bits.

    Subclasses implement the reference ``make`` and may override ``largest`` and ``cast`` with a
    kernel that computes and casts in one pass.
    """

    def __init__(self, shape: torch.Size) -> None:
        """Set the shape; computes nothing.

        Args:
            shape: shape of the tensor; its last dimension is the columns of the matrix.
        """
        self.shape = shape
        self._made: Tensor | None = None

    @abstractmethod
    def make(self) -> Float[Tensor, "..."]:
        """Compute the tensor, rounded to the dtype from which it is cast."""

    def largest(self) -> Float[Tensor, " 1"]:
        """Return the largest magnitude, as ``largest_magnitude`` does."""
        return largest_magnitude(self._matrix())

    def cast(
        self,
        amax: Float[Tensor, " 1"],
        dtype: torch.dtype,
        *,
        has_rows: bool,
        seen: Float[Tensor, " 1"] | None,
    ) -> Fp8:
        """Cast by a known magnitude, as the function ``cast`` does."""
        return cast(self._matrix(), dtype, has_rows=has_rows, amax=amax, seen=seen)

    def _matrix(self) -> Float[Tensor, "T D"]:
        if self._made is None:
            self._made = self.make().detach().flatten(0, -2).contiguous()
        return self._made


def cast(
    x: Float[Tensor, "T D"] | DeferredMatrix,
    dtype: torch.dtype,
    axis: Axis = SINGLE,
    *,
    has_rows: bool = True,
    amax: Float[Tensor, " 1"] | None = None,
    seen: Float[Tensor, " 1"] | None = None,
) -> Fp8:
    """Cast a matrix to fp8; without ``amax`` all-reduces its largest magnitude over ``axis``.

    Args:
        x: floating, any memory order; or a matrix that the cast computes.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        axis: ranks that hold the other parts of the logical matrix and share its scale.
        has_rows: whether to return the matrix in its own order too, not only the transpose.
        amax: magnitude that is mapped to the format's largest number; None: the largest
            magnitude over all ranks.
        seen: float32; raised in place to the largest magnitude of x if that is larger.
    """
    if isinstance(x, Tensor):
        x = x.detach().contiguous()
    if amax is None:
        local_amax = largest_magnitude(x) if isinstance(x, Tensor) else x.largest()
        if seen is not None:
            seen.copy_(torch.maximum(seen, local_amax))
            seen = None
        amax = all_reduce(local_amax, axis, "max")
    if not isinstance(x, Tensor):
        return x.cast(amax, dtype, has_rows=has_rows, seen=seen)
    return cast_by(x, amax, dtype, has_rows=has_rows, seen=seen)


def cast_lines(
    x: Float[Tensor, "*E T D"],
    dtype: torch.dtype,
    row_axis: Axis = SINGLE,
    column_axis: Axis = SINGLE,
    *,
    has_rows: bool = True,
) -> FineFp8:
    """Cast a matrix by the largest magnitude of each row, and of each column for the transpose.

    All-reduces the rows' magnitudes over ``row_axis``, the columns' over ``column_axis``.

    Args:
        x: floating, any memory order; one matrix, or a stack of matrices.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        row_axis: ranks that hold other parts of the same rows.
        column_axis: ranks that hold other parts of the same columns.
        has_rows: whether to return the matrix in its own order too, not only the transpose.
    """
    x = x.detach().contiguous()
    row_tops, column_tops = largest_of_lines(x)
    if has_rows:
        row_tops = all_reduce(row_tops, row_axis, "max")
    column_tops = all_reduce(column_tops, column_axis, "max")
    return cast_lines_by(x, row_tops, column_tops, dtype, has_rows=has_rows)
