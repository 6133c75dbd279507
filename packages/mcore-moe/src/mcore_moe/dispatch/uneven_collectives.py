"""All-gather and reduce-scatter where ranks have different numbers of rows, also none."""

from jaxtyping import Shaped
from torch import Tensor

from mcore_parallel.collectives import all_to_all, gather_partial_from, reduce_scatter_to
from mcore_parallel.mesh import Axis


def gather_uneven(
    x: Shaped[Tensor, "R ..."], axis: Axis, sizes: list[int]
) -> Shaped[Tensor, "Q ..."]:
    """Concatenate the ranks' rows in axis order; the gradient is summed over the ranks.

    Args:
        x: ``sizes[axis.rank]`` rows.
        axis: ranks that take part.
        sizes: rows of each rank; may hold zeros.
    """
    if axis.size == 1:
        return x
    if len(set(sizes)) == 1:
        return gather_partial_from(x, axis)
    # An all-to-all in which every rank sends its rows to all: backward sums the gradients.
    copies = x.repeat(axis.size, *(1,) * (x.dim() - 1))
    return all_to_all(copies, axis, [x.shape[0]] * axis.size, sizes)


def reduce_scatter_uneven(
    x: Shaped[Tensor, "Q ..."], axis: Axis, sizes: list[int]
) -> Shaped[Tensor, "R ..."]:
    """Sum over the ranks, keeping own rows, in axis order; the gradient is gathered.

    Args:
        x: rows of all ranks.
        axis: ranks that take part.
        sizes: rows that each rank keeps; may hold zeros.
    """
    if axis.size == 1:
        return x
    if len(set(sizes)) == 1:
        return reduce_scatter_to(x, axis)
    own = sizes[axis.rank]
    parts = all_to_all(x, axis, sizes, [own] * axis.size)
    return parts.view(axis.size, own, *x.shape[1:]).sum(0)
