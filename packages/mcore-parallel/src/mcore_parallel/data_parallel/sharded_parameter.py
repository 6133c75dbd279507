"""This rank's rows of one parameter under ``fully_shard``: a unit of the optimizer."""

from collections.abc import Iterator

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mcore_parallel.data_parallel.gradient_sync import Copy, OwnedRange
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import NamedParameter, Part, flat_pieces


class ShardedParameter:
    """This rank's rows of one parameter: a unit of the optimizer.

    Attributes:
        named: name and layout; its ``parameter`` has the shape before sharding and no memory.
        dtype: of the gathered weight.
        rows: flat; main weights if float32 or wider.
        grads: their gradients, flat.
    """

    is_narrow = False

    def __init__(
        self, named: NamedParameter, parameter: nn.Parameter, shard: Axis, replica: Axis
    ) -> None:
        """Take over the gradient of a parameter that ``fully_shard`` has sharded.

        Args:
            named: of before; the dtype is that of the model.
            parameter: its shard, a DTensor.
            shard: ranks that share the rows.
            replica: ranks that hold the same rows.
        """
        assert isinstance(parameter, DTensor)
        self.named, self.dtype = named, named.parameter.dtype
        self.parameter, self.replica = parameter, replica
        local = parameter.to_local().detach()
        self.rows = local.view(-1)
        self.grads = torch.zeros_like(self.rows)
        self._copy: Tensor | None = None
        rows, row = named.parameter.shape[0], named.parameter[0].numel()
        begin = min(shard.rank * -(-rows // shard.size), rows) * row
        self.range = OwnedRange(named, begin, begin + local.numel(), 0)
        # torch adds the sums of each backward to a gradient that is there, in place.
        parameter.grad = DTensor.from_local(
            self.grads.view(local.shape),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    @property
    def members(self) -> tuple[NamedParameter]:
        """The parameter."""
        return (self.named,)

    def owned_ranges(self) -> list[OwnedRange]:
        """Return its rows here; none where there are fewer rows than ranks."""
        return [self.range] if self.rows.numel() else []

    def own_weights(self) -> Shaped[Tensor, " n"]:
        """Return the rows in the model's dtype: a copy, made at the first call."""
        if self.dtype == self.rows.dtype:
            return self.rows
        if self._copy is None:
            self._copy = self.rows.to(self.dtype)
        return self._copy

    def own_main(self) -> Shaped[Tensor, " n"] | None:
        """Return the rows, unless they are of 16 bits."""
        is_wide = torch.promote_types(self.rows.dtype, torch.float32) == self.rows.dtype
        return self.rows if is_wide else None

    def own_grads(self) -> Shaped[Tensor, " n"]:
        """Return the gradients of the rows."""
        return self.grads

    def refresh_copy(self) -> None:
        """Round the rows into the copy, if there is one."""
        if self._copy is not None:
            self._copy.copy_(self.rows)

    def copies(self) -> Iterator[Copy]:
        """List the rows, which ranks of other instances and tied stages hold too."""
        layout = self.named.layout
        yield Copy(self.named.name, self.replica, self.rows, True)
        yield Copy(self.named.name, layout.tied, self.rows, True)
        for part in layout.parts:
            for view in self._views(part, self.rows):
                yield Copy(self.named.name, part.replicas, view, False)

    def parts_of_sums(self) -> Iterator[tuple[Axis, Tensor]]:
        """List the gradients that are parts of a sum over tensor ranks, with their axes."""
        for part in self.named.layout.parts:
            if part.partial.size > 1:
                for view in self._views(part, self.grads):
                    yield part.partial, view

    def _views(self, part: Part, flat: Tensor) -> list[Tensor]:
        first, stop = self.range.first, self.range.stop
        return [piece.data for piece in flat_pieces(self.named, part, first, stop, flat)]
