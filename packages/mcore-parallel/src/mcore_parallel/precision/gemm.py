"""``Gemm``: the three GEMMs of a linear, in one precision.

A linear holds one: ``y = x W^T + b`` in forward, ``dy W`` for the gradient of its input and
``dy^T x`` for that of its weight. Operands that are cast or transposed on their way (fp8) are
made once by ``keep`` and ``prepare`` and passed from one GEMM to the next as plain tensors, so
that autograd may save them, recomputation may make them again and a schedule may defer the
weight's gradient.
"""

from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd.grad_slot import GradSlot, accumulate_matmul

Operands = tuple[Tensor, ...]
"""Tensors that one GEMM passes to a later one, in a form of the object's choice."""


@runtime_checkable
class Gemm(Protocol):
    """Forward, input gradient and weight gradient of ``y = x W^T + b``.

    No communication but of what ranks must agree on to cast a tensor that they share.
    """

    def fitting(self, num_rows: int, num_columns: int) -> "Gemm":
        """Return what multiplies with a weight of F rows and D columns: itself, if it can."""

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Float[Tensor, "F D"], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return y, and the operands that ``keep`` would return for the input."""

    def keep(self, x: Float[Tensor, "S *B D"]) -> Operands:
        """Return what ``weight_grad`` needs of the input."""

    def prepare(self, grad: Float[Tensor, "S *B F"]) -> Operands:
        """Return what ``input_grad`` and ``weight_grad`` need of the output's gradient."""

    def input_grad(
        self, grad: Operands, weight: Float[Tensor, "F D"]
    ) -> Float[Tensor, "S *B D"]:
        """Return the gradient of the input."""

    def weight_grad(
        self, grad: Operands, kept: Operands, slot: GradSlot | None
    ) -> Float[Tensor, "F D"] | None:
        """Return the weight's gradient; None where it was added to the slot's main gradient."""


class PlainGemm:
    """GEMMs by torch in the dtype of their operands."""

    def fitting(self, num_rows: int, num_columns: int) -> Gemm:  # noqa: ARG002
        """Return itself: every size fits."""
        return self

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Float[Tensor, "F D"], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return y and the input itself."""
        return F.linear(x, weight, bias), (x,)

    def keep(self, x: Float[Tensor, "S *B D"]) -> Operands:
        """Return the input itself."""
        return (x,)

    def prepare(self, grad: Float[Tensor, "S *B F"]) -> Operands:
        """Return the gradient itself."""
        return (grad,)

    def input_grad(
        self, grad: Operands, weight: Float[Tensor, "F D"]
    ) -> Float[Tensor, "S *B D"]:
        """Return the gradient of the input."""
        return grad[0] @ weight

    def weight_grad(
        self, grad: Operands, kept: Operands, slot: GradSlot | None
    ) -> Float[Tensor, "F D"] | None:
        """Return the weight's gradient; None where the GEMM added it to the main gradient."""
        rows, x = grad[0].flatten(0, -2).t(), kept[0].flatten(0, -2)
        if slot is None:
            return rows @ x
        assert slot.main is not None
        accumulate_matmul(slot.main, rows, x, overwrite=slot.take_stale())
        slot.ready()
        return None


PLAIN_GEMM = PlainGemm()
"""The GEMM of a linear that names none."""
