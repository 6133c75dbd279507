"""Learned positions: a vector for each position of a sequence, added to the embedding."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mcore_parallel.collectives import own_slice
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.sharding import ParamLayout, whole_layout
from mcore_parallel.tensor_parallel.embedding import check_range


class PositionEmbedding(nn.Module):
    """A learned vector for every position, replicated over tensor ranks."""

    def __init__(
        self,
        num_positions: int,
        hidden_size: int,
        *,
        offset: int = 0,
        axis: Axis = SINGLE,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the table; it is zero until the model fills it.

        Args:
            num_positions: rows.
            hidden_size: D.
            offset: row of the first position.
            axis: tensor ranks, which hold the same table.
            sequence_parallel: whether tokens are split over ``axis``.
            device: of the table.
            dtype: of the table.
        """
        super().__init__()
        self.axis, self.offset = axis, offset
        self.sequence_parallel = sequence_parallel and axis.size > 1
        self.weight = nn.Parameter(
            torch.zeros(num_positions, hidden_size, device=device, dtype=dtype)
        )

    def forward(self, positions: Int[Tensor, "*B S"]) -> Float[Tensor, "s *b D"]:
        """Return vectors of positions: ``[S]`` to ``[S, 1, D]``, ``[B, S]`` to ``[S, B, D]``.

        Under sequence parallelism only this rank's S/tp positions are looked up.

        Raises:
            ValueError: if a position is not in the table and positions are on the CPU.
        """
        check_range(positions, self.weight.shape[0] - self.offset, "positions")
        positions = positions.unsqueeze(1) if positions.dim() == 1 else positions.t()
        if self.sequence_parallel:
            positions = own_slice(positions, self.axis)
        return nn.functional.embedding(positions + self.offset, self.weight)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the table."""
        partial = self.axis if self.sequence_parallel else SINGLE
        return {"weight": whole_layout("", tuple(self.weight.shape), self.axis, partial)}
