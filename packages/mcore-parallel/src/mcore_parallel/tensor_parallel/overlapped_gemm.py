"""Products whose operands or results travel piece by piece, under the product itself.

Under sequence parallelism a gather stands before a product and a reduce-scatter behind it,
and nothing else could run meanwhile. Here the tokens go round the ranks in a ring: each
step multiplies the piece at hand while the next one is on its way. The twins are
``all_gather`` and ``reduce_scatter`` around one product; sums are of the same terms.

Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models, ASPLOS.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.collectives import start_shift, wait
from mcore_parallel.mesh import Axis


def gathered_product(
    x: Float[Tensor, "s *B K"],
    matrix: Float[Tensor, "K N"],
    axis: Axis,
    bias: Float[Tensor, " N"] | None = None,
) -> tuple[Float[Tensor, "S *B N"], list[Float[Tensor, "s *B K"]]]:
    """Multiply the rows of all ranks with this rank's matrix; no gradient.

    Args:
        x: this rank's rows, cut along dimension 0.
        matrix: any strides.
        axis: ranks that cut the rows, two or more.
        bias: added to every row of the result.

    Returns:
        The product of the gathered rows, and these rows, one tensor a rank in axis order.
    """
    num_rows = x[..., 0].numel()
    out = x.new_empty(axis.size, num_rows, matrix.shape[1])
    pieces = [x] * axis.size
    held = x
    for step in range(axis.size):
        coming = start_shift(held, axis) if step < axis.size - 1 else held
        source = (axis.rank - step) % axis.size
        pieces[source] = held
        rows = held.reshape(num_rows, -1)
        if bias is None:
            torch.mm(rows, matrix, out=out[source])
        else:
            torch.addmm(bias, rows, matrix, out=out[source])
        held = wait(coming)
    return out.view(axis.size * x.shape[0], *x.shape[1:-1], -1), pieces


def scattered_product(
    x: Float[Tensor, "S *B K"], matrix: Float[Tensor, "K N"], axis: Axis
) -> Float[Tensor, "s *B N"]:
    """Multiply, sum over the ranks and keep this rank's rows of the result; no gradient.

    Args:
        x: all rows; this rank's part of the inner dimension.
        matrix: this rank's part likewise; any strides.
        axis: ranks that share the inner dimension, two or more.

    Raises:
        ValueError: if the rows do not divide over the axis.
    """
    if x.shape[0] % axis.size:
        raise ValueError(
            f"{x.shape[0]} rows do not divide over axis {axis.name} of {axis.size} ranks"
        )
    shape = (x.shape[0] // axis.size, *x.shape[1:-1], matrix.shape[1])
    pieces = x.reshape(axis.size, -1, x.shape[-1])
    # A sum begins at the rank behind the one that keeps it and comes home last.
    total = pieces[(axis.rank - 1) % axis.size] @ matrix
    for step in range(1, axis.size):
        coming = start_shift(total, axis)
        product = pieces[(axis.rank - 1 - step) % axis.size] @ matrix
        total = product.add_(wait(coming))
    return total.view(shape)
