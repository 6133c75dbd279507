"""Interfaces of update rules, which are independent of how ranks share the weights.

``data_parallel.distributed_optimizer`` decides which flat ranges a rank owns, keeps their main
weights and moments, and saves and gathers them. An ``UpdateRule`` is elementwise: it updates a
flat range in which parameters have no borders. A ``MatrixRule`` needs whole logical matrices:
its elementwise part (``message``) runs on the ranks that own the elements, its part on the
matrix (``direction``) on one rank, to which ``data_parallel.matrix_exchange`` sends the
messages of all other ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MomentDtype = Literal["fp32", "bf16"]
"""Format of a moment: the dtype of the main weights (fp32), or bf16."""

AVERAGE = "average"
"""Name of the state with averaged weights, for ``ema_decay`` or a rule that averages."""

Shape = tuple[int, ...]


@runtime_checkable
class UpdateRule(Protocol):
    """An elementwise update with named moments."""

    @property
    def moments(self) -> Mapping[str, MomentDtype]:
        """Names of the state of each weight, as in a checkpoint."""

    def update(
        self,
        main: Float[Tensor, " n"],
        grad: Float[Tensor, " n"],
        moments: Mapping[str, Float[Tensor, " n"]],
        parameter: Float[Tensor, " n"],
        *,
        num_steps: int,
        lr: float,
        weight_decay: float,
        grad_scale: Float[Tensor, ""] | float,
    ) -> None:
        """Update one range in place; no communication and no host sync.

        Args:
            main: main weights, float32 or float64.
            grad: summed gradients; read only.
            moments: state of the range by name, zero before the first step; updated in place.
            parameter: weights in the model's dtype, set to ``main`` rounded; the same memory as
                ``main`` if the dtypes are equal.
            num_steps: number of this update, counted from 1.
            lr: learning rate.
            weight_decay: decoupled decay; 0.0 if the parameters of this range do not decay.
            grad_scale: factor on the gradients.
        """


@runtime_checkable
class MaskableRule(UpdateRule, Protocol):
    """An elementwise update whose kernel can skip a step on the device, without copies."""

    def masked(self, is_applied: Bool[Tensor, ""]) -> UpdateRule:
        """Return this rule with an ``update`` that writes nothing if the mask is false.

        Args:
            is_applied: mask that each ``update`` reads on the device.
        """


@runtime_checkable
class MatrixRule(Protocol):
    """An update of whole logical matrices, between two elementwise parts.

    A step calls ``message`` for every range, sends the messages of a matrix to one rank, which
    calls ``direction``, and updates the main weights on the ranks that own them:
    W <- (1 - lr * weight_decay) W - lr * factor * direction.
    """

    @property
    def moments(self) -> Mapping[str, MomentDtype]:
        """Names of the state of each weight, as in a checkpoint; sharded as weights are."""

    def state_shapes(self, shape: Shape) -> Mapping[str, Shape]:
        """Return the shapes of a matrix's state by name; the rank that computes it keeps it."""

    def wire_dtype(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype in which messages and directions of main weights are sent."""

    def cost(self, shape: Shape) -> float:
        """Return the work of ``direction`` for one matrix, in any unit."""

    def message(
        self,
        grad: Float[Tensor, " n"],
        moments: Mapping[str, Float[Tensor, " n"]],
        *,
        grad_scale: Float[Tensor, ""] | float,
    ) -> Float[Tensor, " n"]:
        """Update the moments of one range in place; return the range's input of ``direction``.

        Args:
            grad: summed gradients; read only.
            moments: state of the range by name, zero before the first step.
            grad_scale: factor on the gradients.
        """

    def direction(
        self,
        messages: Float[Tensor, "b m n"],
        state: Mapping[str, Float[Tensor, "b ..."]],
        *,
        num_steps: int,
    ) -> Float[Tensor, "b m n"]:
        """Return the directions, which the update subtracts, of whole matrices of one shape.

        Args:
            messages: messages of the matrices; may be overwritten.
            state: state of the matrices, by the names of ``state_shapes``, in float32 or the
                main weights' wider dtype; updated in place. Zero before the first step.
            num_steps: number of this update, counted from 1.
        """

    def factor(self, shape: Shape) -> float:
        """Return the factor on a matrix's direction, which depends on the shape only."""


AnyRule = UpdateRule | MatrixRule


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """Rule and factors of a parameter's update; neighbours in equal groups share one call."""

    rule: AnyRule
    lr_name: str = ""
    """Name of the learning rate in ``named_lrs`` of a step; empty: the step's ``lr``."""
    lr_factor: float = 1.0
    """Factor on the learning rate, and so on the decay of a step."""
    decay_factor: float = 1.0
    """Factor on weight decay; 0: the parameter does not decay."""
    width: float = 1.0
    """Width over the base width (muP), w: the update uses lr / w, gradient * w and decay * w.
    Adam's step does not depend on the gradient's scale, so its epsilon becomes eps / w, and
    the decay of a step stays lr * decay."""
    joins_parts: bool = False
    """For a ``MatrixRule``: whether the rows of all parts of the parameter form one matrix."""


@contextmanager
def unless_applied(
    is_applied: Bool[Tensor, ""] | None, tensors: Iterable[Tensor]
) -> Iterator[None]:
    """Undo the block's changes of tensors if ``is_applied`` is false, bit for bit.

    The host does not wait for the device: tensors are copied before the block, and the mask
    selects copy or result after it. A ``MaskableRule`` needs no copies.

    Args:
        is_applied: mask on the device; None: run the block without copies.
        tensors: tensors that the block changes in place; equal addresses are copied once.
    """
    if is_applied is None:
        yield
        return
    unique = {tensor.data_ptr(): tensor for tensor in tensors}
    originals = [(tensor, tensor.clone()) for tensor in unique.values()]
    yield
    for tensor, copy in originals:
        torch.where(is_applied, tensor, copy, out=tensor)
