"""The short convolution before a recurrent state, its weights, and where documents begin."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.mesh import Axis
from mcore_parallel.optional_kernels import OptionalKernel, both_passes, wave, works
from mcore_parallel.sharding import ParamLayout, Part
from mcore_parallel.tensor_parallel.linear import Output


class CausalConv(nn.Module):
    """Weights of a convolution along the sequence, each channel for itself.

    Attributes:
        weight: ``[channels, 1, W]``, the newest token's last.
        bias: ``[channels]`` or None.
        sizes: local channels of each output.
    """

    def __init__(
        self,
        outputs: list[Output],
        width: int,
        *,
        bias: bool,
        axis: Axis,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's channels, zero until the model fills them.

        Args:
            outputs: logical tensors whose channels are stacked.
            width: tokens that a channel sees, W.
            bias: whether there is one.
            axis: ranks that share the channels.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        self.outputs, self.axis = tuple(outputs), axis
        self.sizes = [output.local_size(axis) for output in outputs]
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.zeros(sum(self.sizes), 1, width, **placed))
        self.bias = nn.Parameter(torch.zeros(sum(self.sizes), **placed)) if bias else None

    def recent(
        self, x: Float[Tensor, "S B F"], before: Float[Tensor, "w B F"] | None
    ) -> Float[Tensor, "w B F"]:
        """Return the last W - 1 inputs, which the tokens that come next see.

        Args:
            x: the newest inputs.
            before: the W - 1 inputs before them; None: zeros.
        """
        kept = self.weight.shape[-1] - 1
        if before is None:
            before = x.new_zeros(kept, *x.shape[1:])
        return torch.cat([before, x])[x.shape[0] :]

    def layouts(self) -> dict[str, ParamLayout]:
        """Describe the local parameters, see ``mcore_parallel.sharding``."""
        layouts = {"weight": self._layout("weight", (1, self.weight.shape[-1]))}
        if self.bias is not None:
            layouts["bias"] = self._layout("bias", ())
        return layouts

    def _layout(self, kind: str, rest: tuple[int, ...]) -> ParamLayout:
        parts, begin, zeros = [], 0, (0,) * len(rest)
        for output, size in zip(self.outputs, self.sizes, strict=True):
            parts.append(
                Part(
                    name=f"{output.name}.{kind}",
                    shape=(output.size, *rest),
                    offsets=(self.axis.rank // output.replicas.size * size, *zeros),
                    local_offsets=(begin, *zeros),
                    lengths=(size, *rest),
                    replicas=output.replicas,
                    # Each holder sees its own heads' share of the gradient only.
                    partial=output.replicas,
                )
            )
            begin += size
        return ParamLayout(tuple(parts))


def document_starts(
    documents: Documents | None, device: torch.device
) -> Bool[Tensor, "S B"] | None:
    """Mark the first token of every document; None where each row is one."""
    if documents is None or documents.are_whole_rows:
        return None
    borders = documents.flat().cu_seqlens(device)[:-1].long()
    marks = torch.zeros(len(documents.rows) * documents.length, dtype=torch.bool, device=device)
    return marks.index_fill(0, borders, True).unflatten(0, (len(documents.rows), -1)).t()


def conv_silu(
    x: Float[Tensor, "S B F"],
    weight: Float[Tensor, "F 1 W"],
    bias: Float[Tensor, " F"] | None = None,
    *,
    starts: Bool[Tensor, "S B"] | None = None,
    before: Float[Tensor, "w B F"] | None = None,
) -> Float[Tensor, "S B F"]:
    """Apply SiLU to ``causal_conv``, whose arguments these are; on a GPU in one kernel."""
    if (
        before is None
        and x.is_cuda
        and x.dtype != torch.float64
        and not torch.compiler.is_compiling()
        and works(CONV_KERNELS, x.device, x.dtype)
    ):
        from mcore_models.kernels.conv import fused_conv_silu

        return fused_conv_silu(x, weight, bias, starts=starts)
    return F.silu(causal_conv(x, weight, bias, starts=starts, before=before))


def causal_conv(
    x: Float[Tensor, "S B F"],
    weight: Float[Tensor, "F 1 W"],
    bias: Float[Tensor, " F"] | None = None,
    *,
    starts: Bool[Tensor, "S B"] | None = None,
    before: Float[Tensor, "w B F"] | None = None,
) -> Float[Tensor, "S B F"]:
    """Mix every channel with its last W tokens; no communication.

    Args:
        x: inputs.
        weight: of each channel, the newest token's last.
        bias: of each channel.
        starts: first tokens of documents, which see none before.
        before: the W - 1 inputs before the first; None: zeros.
    """
    width, length = weight.shape[-1], x.shape[0]
    wide = torch.promote_types(x.dtype, torch.float32)
    if before is None:
        before = x.new_zeros(width - 1, *x.shape[1:])
    padded = torch.cat([before.to(x.dtype), x])
    taps = weight[:, 0].to(wide)
    y = x * taps[:, -1]
    sees = None if starts is None else torch.ones_like(starts)
    for lag in range(1, width):
        earlier = padded[width - 1 - lag : width - 1 - lag + length] * taps[:, -1 - lag]
        if sees is not None and starts is not None:
            # A token sees the one ``lag`` before it if no document begins in between.
            newer = F.pad(starts, (0, 0, lag - 1, 0))[:length]
            sees = sees & ~newer
            earlier = earlier * sees[..., None]
        y = y + earlier
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)


def _try_kernels(device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        from mcore_models.kernels.conv import fused_conv_silu

        return fused_conv_silu(x, weight, bias)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.silu(causal_conv(x, weight, bias))

    shapes = (40, 2, 136), (136, 1, 4), (136,)
    inputs = [wave(*shape, device=device, dtype=dtype) for shape in shapes]
    got, want = (both_passes(function, *inputs) for function in (fused, plain))
    return list(zip(got, want, strict=True))


CONV_KERNELS = OptionalKernel("a short convolution in Triton", ("triton",), _try_kernels)
