"""Weights of the short convolution of recurrent layers, and the starts of documents."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import ParamLayout, Part
from mcore_parallel.tensor_parallel.linear import LinearOutput


class CausalConv(nn.Module):
    """Weights of a convolution along the sequence, separate for each channel.

    Attributes:
        weight: ``[channels, 1, W]``, the newest token's last.
        bias: ``[channels]`` or None.
        sizes: local channels of each output.
    """

    def __init__(
        self,
        outputs: list[LinearOutput],
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
            width: kernel size in tokens, W.
            bias: whether the convolution has a bias.
            axis: ranks that share the channels.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        self.outputs, self.axis = tuple(outputs), axis
        self.sizes = [output.local_size(axis) for output in outputs]
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.zeros(sum(self.sizes), 1, width, **factory_kwargs))
        self.bias = (
            nn.Parameter(torch.zeros(sum(self.sizes), **factory_kwargs)) if bias else None
        )

    def recent(
        self, x: Float[Tensor, "S B F"], before: Float[Tensor, "w B F"] | None
    ) -> Float[Tensor, "w B F"]:
        """Return the last W - 1 inputs, which the convolution of the next tokens reads.

        Args:
            x: the newest inputs.
            before: the W - 1 inputs before ``x``; None: zeros.
        """
        num_inputs = self.weight.shape[-1] - 1
        if before is None:
            before = x.new_zeros(num_inputs, *x.shape[1:])
        return torch.cat([before, x])[x.shape[0] :]

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the local parameters."""
        layouts = {"weight": self._layout("weight", (1, self.weight.shape[-1]))}
        if self.bias is not None:
            layouts["bias"] = self._layout("bias", ())
        return layouts

    def _layout(self, kind: str, rest: tuple[int, ...]) -> ParamLayout:
        # Each output is a slice of the logical tensor: its size-th block in rank order, where
        # neighbouring ranks with the same heads (replicas) have the same slice.
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
                    # Each holder has only its own heads' share of the gradient.
                    partial=output.replicas,
                )
            )
            begin += size
        return ParamLayout(tuple(parts))


def document_starts(
    documents: Documents | None, device: torch.device
) -> Bool[Tensor, "S B"] | None:
    """Return a mask of the documents' first tokens; None if each row is one document."""
    if documents is None or documents.are_whole_rows:
        return None
    borders = documents.flat().cu_seqlens(device)[:-1].long()
    marks = torch.zeros(len(documents.rows) * documents.length, dtype=torch.bool, device=device)
    return marks.index_fill(0, borders, True).unflatten(0, (len(documents.rows), -1)).t()
