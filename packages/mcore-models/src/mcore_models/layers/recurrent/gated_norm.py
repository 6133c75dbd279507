"""RMSNorm of an output that was gated first, group by group: the norm of a Mamba-2 layer."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mcore_parallel.collectives import copy_to, reduce_from
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.optional_kernels import OptionalKernel, both_passes, wave, works
from mcore_parallel.sharding import ParamLayout, sliced

WIDEST = 8192
"""Channels of a group that the kernels are made for: a row is one program's registers."""


class GatedNorm(nn.Module):
    """``norm(y * silu(z)) * weight``: RMSNorm of the gated output, group by group.

    Or ``norm(y) * weight * silu(z)``, as ``--mamba-norm`` says.

    Statistics are float32 or wider, the weight is applied in the input's dtype.
    """

    def __init__(
        self,
        size: int,
        num_groups: int,
        *,
        epsilon: float,
        gates_first: bool = True,
        axis: Axis,
        holders: Axis,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's weights, which begin as the identity.

        Args:
            size: channels over all ranks.
            num_groups: equal blocks of them, each normed for itself.
            epsilon: added to the mean square.
            gates_first: whether the output is gated before it is normed, or after.
            axis: ranks that share the channels.
            holders: ranks that share one group; their sums of squares are all-reduced.
            device: of the weight.
            dtype: of the weight.
        """
        super().__init__()
        self.size, self.epsilon, self.axis, self.holders = size, epsilon, axis, holders
        self.group_size, self.gates_first = size // num_groups, gates_first
        self.weight = nn.Parameter(torch.ones(size // axis.size, device=device, dtype=dtype))

    def forward(
        self, y: Float[Tensor, "*B F"], z: Float[Tensor, "*B F"]
    ) -> Float[Tensor, "*B F"]:
        """Gate, then norm; all-reduces over ``holders`` in forward and backward."""
        if self._has_kernel(y):
            from mcore_models.kernels.gated_norm import fused_gated_norm

            constants = {"group_size": self.group_size, "epsilon": self.epsilon}
            return fused_gated_norm(
                y, z, self.weight, **constants, gates_first=self.gates_first
            )
        return self.plain(y, z)

    def plain(
        self, y: Float[Tensor, "*B F"], z: Float[Tensor, "*B F"]
    ) -> Float[Tensor, "*B F"]:
        """Compute the same without kernels."""
        wide = torch.promote_types(y.dtype, torch.float32)
        gate = F.silu(z.to(wide))
        gated = y.to(wide) * gate if self.gates_first else y.to(wide)
        blocks = gated.unflatten(-1, (-1, self.group_size // self.holders.size))
        squares = blocks.square().sum(-1, keepdim=True)
        # Every holder's output depends on every holder's squares: summed in both passes.
        squares = copy_to(reduce_from(squares, self.holders), self.holders)
        normed = blocks * torch.rsqrt(squares / self.group_size + self.epsilon)
        if self.gates_first:
            return self.weight * normed.flatten(-2).to(y.dtype)
        return (self.weight * normed.flatten(-2) * gate).to(y.dtype)

    def _has_kernel(self, y: Tensor) -> bool:
        return self.holders.size == 1 and has_kernel(y, self.group_size)

    def layouts(self) -> dict[str, ParamLayout]:
        """Describe the weight, see ``mcore_parallel.sharding``."""
        return {"weight": sliced("", (self.size,), 0, self.axis)}


def has_kernel(y: Tensor, group_size: int) -> bool:
    """Say whether the kernels are there, and made for these tensors."""
    return (
        y.is_cuda
        and y.dtype != torch.float64
        and group_size <= WIDEST
        and not torch.compiler.is_compiling()
        and works(GATED_NORM_KERNELS, y.device, y.dtype)
    )


def _try_kernels(device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    from mcore_models.kernels.gated_norm import fused_gated_norm

    options: dict[str, Any] = {"axis": SINGLE, "holders": SINGLE, "epsilon": 1e-5}
    shapes = (9, 2, 80), (9, 2, 80), (80,)
    inputs = [wave(*shape, device=device, dtype=dtype) for shape in shapes]
    found: list[tuple[Tensor, Tensor]] = []
    for gates_first in (True, False):
        # Its weight is 1; ``forward`` would try the kernels again.
        norm = GatedNorm(80, 2, gates_first=gates_first, device=device, dtype=dtype, **options)
        constants = {"group_size": 40, "epsilon": 1e-5, "gates_first": gates_first}
        fused = partial(fused_gated_norm, **constants)

        def plain(y: Tensor, z: Tensor, weight: Tensor, norm: GatedNorm = norm) -> Tensor:
            return norm.plain(y, z) * weight

        got, want = (both_passes(function, *inputs) for function in (fused, plain))
        found += zip(got, want, strict=True)
    return found


GATED_NORM_KERNELS = OptionalKernel("a gated norm in Triton", ("triton",), _try_kernels)
