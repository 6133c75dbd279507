"""T5's positions: a learned bias for each distance and head, added to attention scores.

Each short distance has a bias; long distances share biases in ranges that grow exponentially.
The tables of encoder and decoder are on the first pipeline stage, which sends biases on;
gradients return the same way.

Raffel et al. 2019, arXiv:1910.10683, section 2.1.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.sharding import ParamLayout, sliced_layout


class RelativePositionBias(nn.Module):
    """The table of one stack, its heads split over the tensor ranks.

    Attributes:
        weight: ``[buckets, heads / axis.size]``.
    """

    def __init__(
        self,
        num_buckets: int,
        num_heads: int,
        *,
        axis: Axis = SINGLE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's heads; the table is zero until the model fills it."""
        super().__init__()
        self.axis, self.shape = axis, (num_buckets, num_heads)
        local = torch.zeros(num_buckets, num_heads // axis.size, device=device, dtype=dtype)
        self.weight = nn.Parameter(local)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the table."""
        return {"weight": sliced_layout("", self.shape, 1, self.axis)}


def distance_buckets(
    queries: Int[Tensor, " q"],
    keys: Int[Tensor, " Z"],
    *,
    both_sides: bool,
    num_buckets: int,
    max_distance: int,
) -> Int[Tensor, "q Z"]:
    """Return the row of the table for every pair of positions.

    Args:
        queries: positions of the queries in the complete sequence.
        keys: positions of the keys.
        both_sides: keys after the query have separate buckets, as in an encoder; otherwise
            they share the bucket of distance 0.
        num_buckets: rows of the table.
        max_distance: distances from this one on share the last row.
    """
    distance = keys[None, :] - queries[:, None]
    base = torch.zeros_like(distance)
    if both_sides:
        num_buckets //= 2
        base = torch.where(distance > 0, num_buckets, 0)
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    # Half of the buckets hold one distance each. The others divide the range from ``exact`` to
    # ``max_distance`` evenly on a logarithmic scale.
    exact = num_buckets // 2
    growth = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (growth * (num_buckets - exact)).long()
    return base + torch.where(distance < exact, distance, far.clamp(max=num_buckets - 1))


def position_scores(
    table: Float[Tensor, "b n"], buckets: Int[Tensor, "q Z"]
) -> Float[Tensor, "1 n q Z"]:
    """Return the biases on the scores of this rank's heads, from the table and the buckets."""
    return table[buckets].permute(2, 0, 1).unsqueeze(0)  # [q, Z, n] -> [1, n, q, Z]
