"""``Gemm``: the three GEMMs of a linear, in one precision.

A linear has one ``Gemm``: ``y = x W^T + b`` in forward, ``dy W`` for the gradient of the input
and ``dy^T x`` for the gradient of the weight. ``keep`` and ``prepare`` make operands in the
form that the GEMMs need (in fp8 cast and transposed) as plain tensors, so that autograd can
save them, recomputation can make them again and a schedule can defer the weight's gradient.
"""

from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd.grad_slot import GradSlot, accumulate_matmul

Operands = tuple[Tensor, ...]
"""Tensors that one GEMM passes to a later one; their form is private to the ``Gemm``."""


@runtime_checkable
class Gemm(Protocol):
    """Forward, input gradient and weight gradient of ``y = x W^T + b``.

    Communicates only largest magnitudes, if ranks must share the scale of a cast.
    """

    def fitting(self, num_rows: int, num_columns: int) -> "Gemm":
        """Return this object if it supports a weight of these sizes, else a replacement."""

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Float[Tensor, "F D"], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return y, and the operands that ``keep(x)`` returns."""

    def keep(self, x: Float[Tensor, "S *B D"]) -> Operands:
        """Return the form of the input that ``weight_grad`` needs."""

    def prepare(self, grad: Float[Tensor, "S *B F"]) -> Operands:
        """Return the form of the output's gradient that the two backward GEMMs need."""

    def input_grad(
        self, grad: Operands, weight: Float[Tensor, "F D"]
    ) -> Float[Tensor, "S *B D"]:
        """Return the gradient of the input."""

    def weight_grad(
        self, grad: Operands, kept: Operands, slot: GradSlot | None
    ) -> Float[Tensor, "F D"] | None:
        """Return the weight's gradient, or add it to the slot's main gradient; return None."""


class PlainGemm:
    """GEMMs by torch in the dtype of their operands."""

    def fitting(self, num_rows: int, num_columns: int) -> Gemm:  # noqa: ARG002
        """Return this object, which supports every size."""
        return self

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Float[Tensor, "F D"], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return y and x."""
        return F.linear(x, weight, bias), (x,)

    def keep(self, x: Float[Tensor, "S *B D"]) -> Operands:
        """Return x unchanged."""
        return (x,)

    def prepare(self, grad: Float[Tensor, "S *B F"]) -> Operands:
        """Return the gradient unchanged."""
        return (grad,)

    def input_grad(
        self, grad: Operands, weight: Float[Tensor, "F D"]
    ) -> Float[Tensor, "S *B D"]:
        """Return the gradient of the input."""
        return grad[0] @ weight

    def weight_grad(
        self, grad: Operands, kept: Operands, slot: GradSlot | None
    ) -> Float[Tensor, "F D"] | None:
        """Return the weight's gradient, or accumulate it in the main gradient; return None."""
        rows, x = grad[0].flatten(0, -2).t(), kept[0].flatten(0, -2)
        if slot is None:
            return rows @ x
        assert slot.main is not None
        accumulate_matmul(slot.main, rows, x, overwrite=slot.take_stale())
        slot.ready()
        return None


PLAIN_GEMM = PlainGemm()
"""Default ``Gemm`` of a linear."""
