"""Adafactor: a second moment of one number a row and one a column, and bounded updates.

With R and C moving averages of the mean squares of the rows and columns of a gradient G, the
second moment is R C^T / mean(R). The update G / sqrt of it is divided by its root mean square
over the threshold, where that is above 1. So a matrix has almost no state.

The formulas are those of ``torch.optim.Adafactor``, with one difference: the learning rate is
that of the schedule, as for other optimizers. The paper also multiplies it by the root mean
square of the matrix, which the rank that computes a direction does not hold.

Shazeer and Stern 2018, Adafactor, arXiv:1804.04235, algorithm 4.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.optimizers.config import AdafactorConfig
from mcore_parallel.optimizers.update_rule import MomentDtype, Shape


class Adafactor:
    """The rule of matrices; no state is kept by element."""

    moments: Mapping[str, MomentDtype] = MappingProxyType({})

    def __init__(self, config: AdafactorConfig) -> None:
        self.config = config

    def state_shapes(self, shape: Shape) -> Mapping[str, Shape]:
        """Name what is kept of a whole matrix: see the config."""
        return self.config.state_shapes(shape)

    def wire_dtype(self, main: torch.dtype) -> torch.dtype:
        """Keep all bits of the gradient, whose squares are summed."""
        return main

    def cost(self, shape: Shape) -> float:
        """Passes over the matrix."""
        return float(shape[0] * shape[1])

    def message(
        self,
        grad: Float[Tensor, " n"],
        moments: Mapping[str, Float[Tensor, " n"]],  # noqa: ARG002 - Adafactor has no moments
        *,
        grad_scale: Float[Tensor, ""] | float,
    ) -> Float[Tensor, " n"]:
        """Return the scaled gradient."""
        return grad.to(torch.promote_types(grad.dtype, torch.float32)) * grad_scale

    def direction(
        self,
        messages: Float[Tensor, "b m n"],
        state: Mapping[str, Float[Tensor, "b ..."]],
        *,
        num_steps: int,
    ) -> Float[Tensor, "b m n"]:
        """Divide by the root of the factored second moment, and bound the update."""
        config = self.config
        share = num_steps**config.adafactor_beta2_decay  # 1 in the first step
        squares = messages.square()
        rows, columns = state["row"], state["column"]
        rows.lerp_(squares.mean(2), share)
        columns.lerp_(squares.mean(1), share)
        tiny = torch.finfo(messages.dtype).eps
        mean = rows.mean(1, keepdim=True).clamp(min=tiny)
        second = (rows / mean)[:, :, None] * columns[:, None, :]
        update = messages * second.clamp_(min=tiny**2).rsqrt_()
        rms = torch.linalg.matrix_norm(update, keepdim=True) / update[0].numel() ** 0.5
        return update.div_((rms / config.adafactor_clip_threshold).clamp(min=1.0))

    def factor(self, shape: Shape) -> float:  # noqa: ARG002 - the update has no scale
        """Return 1."""
        return 1.0
