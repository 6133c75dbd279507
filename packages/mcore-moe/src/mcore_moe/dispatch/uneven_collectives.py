"""All-gather and reduce-scatter for ranks with different numbers of rows, also 0."""

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
    # An all-to-all in which every rank sends all its rows to each rank. Its backward returns a
    # gradient of each copy, and that of ``repeat`` sums these.
    copies = x.repeat(axis.size, *(1,) * (x.dim() - 1))
    return all_to_all(copies, axis, [x.shape[0]] * axis.size, sizes)


def reduce_scatter_uneven(
    x: Shaped[Tensor, "Q ..."], axis: Axis, sizes: list[int]
) -> Shaped[Tensor, "R ..."]:
    """Return this rank's rows of the sum over the ranks; the gradient is all-gathered.

    Args:
        x: rows of all ranks, in axis order.
        axis: ranks that take part.
        sizes: rows that each rank keeps; may hold zeros.
    """
    if axis.size == 1:
        return x
    if len(set(sizes)) == 1:
        return reduce_scatter_to(x, axis)
    num_rows = sizes[axis.rank]
    parts = all_to_all(x, axis, sizes, [num_rows] * axis.size)
    return parts.view(axis.size, num_rows, *x.shape[1:]).sum(0)
