"""Adafactor: a factored second moment (a number for each row and column), bounded updates.

R and C are moving averages of the mean squares of the rows and columns of a gradient G. The
second moment is V = R C^T / mean(R), and the update is U = G / sqrt(V), divided by
max(1, rms(U) / threshold). So the state of a matrix is only its R and C.

The formulas are those of ``torch.optim.Adafactor``, with one difference: the learning rate is
that of the schedule, as for other optimizers. The paper also multiplies the rate by the root
mean square of the matrix, which the rank that computes a direction does not hold.

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
    """Matrix rule of Adafactor, without elementwise state."""

    moments: Mapping[str, MomentDtype] = MappingProxyType({})

    def __init__(self, config: AdafactorConfig) -> None:
        self.config = config

    def state_shapes(self, shape: Shape) -> Mapping[str, Shape]:
        """Return the shapes of a matrix's state, see the config."""
        return self.config.state_shapes(shape)

    def wire_dtype(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype of main weights, since squares of gradients are summed."""
        return main

    def cost(self, shape: Shape) -> float:
        """Return the number of elements: the work is a few passes over the matrix."""
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
        """Return gradients over the root of the second moment, bounded in root mean square."""
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
