"""Rows of weights that are multiplied after their update, wherever a rank's range cuts them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_parallel.data_parallel.gradient_sync import OwnedRange

RowFactors = Mapping[str, Float[Tensor, " F"]]
"""By the name of a parameter one factor for each of this rank's rows."""

NO_FACTORS: RowFactors = MappingProxyType({})


def scale_rows(
    ranges: Sequence[OwnedRange],
    factors: RowFactors,
    main: Shaped[Tensor, " n"],
    weights: Shaped[Tensor, " n"],
) -> None:
    """Multiply the rows of main weights that have factors, in place; the weights follow.

    Args:
        ranges: what ``main`` holds of which parameter.
        factors: by the parameters' names.
        main: flat main weights.
        weights: what becomes ``main`` in its own dtype; of equal dtype: the same memory.
    """
    for owned in ranges:
        rows = factors.get(owned.named.name)
        if rows is None:
            continue
        rows = rows.to(main.device, main.dtype)
        width = owned.named.parameter.numel() // rows.numel()
        part, begin = owned.view(main), owned.first
        while begin < owned.stop:  # the end of a row, whole rows, the beginning of one
            row = begin // width
            count = 1 if begin % width else max(1, (owned.stop - begin) // width)
            stop = min(owned.stop, (row + count) * width)
            piece = part[begin - owned.first : stop - owned.first]
            piece.view(count, -1).mul_(rows[row : row + count, None])
            begin = stop
        if weights.dtype != main.dtype:
            owned.view(weights).copy_(part)
