"""T5's positions: a learned bias for each distance and head, added to attention scores.

Short distances have a bias each, long ones share biases in ranges that grow with the logarithm.
The tables of encoder and decoder are on the first pipeline stage, which sends biases on;
gradients return the same way.

Raffel et al. 2019, arXiv:1910.10683, section 2.1.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.sharding import ParamLayout, sliced


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
        """Describe the table, see ``mcore_parallel.sharding``."""
        return {"weight": sliced("", self.shape, 1, self.axis)}


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
        both_sides: later keys have buckets of their own, as in an encoder; else they share
            that of distance 0.
        num_buckets: rows of the table.
        max_distance: distance from which on all share a row.
    """
    away = keys[None, :] - queries[:, None]
    base = torch.zeros_like(away)
    if both_sides:
        num_buckets //= 2
        base = torch.where(away > 0, num_buckets, 0)
        away = away.abs()
    else:
        away = (-away).clamp(min=0)
    exact = num_buckets // 2
    growth = (away.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (growth * (num_buckets - exact)).long()
    return base + torch.where(away < exact, away, far.clamp(max=num_buckets - 1))


def position_scores(
    table: Float[Tensor, "b n"], buckets: Int[Tensor, "q Z"]
) -> Float[Tensor, "1 n q Z"]:
    """Look up the biases on the scores of this rank's heads."""
    return table[buckets].permute(2, 0, 1).unsqueeze(0)  # [q, Z, n] -> [1, n, q, Z]
