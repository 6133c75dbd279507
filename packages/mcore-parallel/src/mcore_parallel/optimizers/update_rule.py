"""What an optimizer does with weights, apart from which rank holds them.

``data_parallel.distributed_optimizer`` decides which flat ranges a rank owns, keeps main
weights and moments there, checkpoints and gathers them. An ``UpdateRule`` is elementwise: it
updates a flat range and never sees where a parameter begins. A ``MatrixRule`` needs whole
logical matrices: it has an elementwise part (``message``), on the ranks that own the elements,
and a part on the matrix (``direction``), on one rank, to which
``data_parallel.matrix_exchange`` brings the messages of all others.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MomentDtype = Literal["fp32", "bf16"]
"""How a moment is kept: in the dtype of the main weights (fp32), or in bf16."""

AVERAGE = "average"
"""State that holds averaged weights, of ``ema_decay`` or of a rule that averages."""

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
            moments: zero before the first step.
            parameter: the weights in the model's dtype, which become ``main`` rounded; the
                same memory as ``main`` where the dtypes are equal.
            num_steps: of this update, counted from 1.
            lr: learning rate.
            weight_decay: 0.0 where the parameters of this range do not decay.
            grad_scale: multiplies the gradients first.
        """


@runtime_checkable
class MaskableRule(UpdateRule, Protocol):
    """An elementwise update whose kernel leaves a step out on the device, without copies."""

    def masked(self, is_applied: Bool[Tensor, ""]) -> UpdateRule:
        """Return this rule with an ``update`` that writes nothing where the mask is false.

        Args:
            is_applied: read on the device by each ``update``.
        """


@runtime_checkable
class MatrixRule(Protocol):
    """An update of whole logical matrices, between two elementwise parts.

    A step makes ``message`` of every range, brings the messages of a matrix together, makes its
    ``direction``, and takes ``lr * factor * direction`` and the decoupled decay from the main
    weights: W <- (1 - lr * weight_decay) W - lr * factor * direction.
    """

    @property
    def moments(self) -> Mapping[str, MomentDtype]:
        """Names of the state of each weight, as in a checkpoint; sharded as weights are."""

    def state_shapes(self, shape: Shape) -> Mapping[str, Shape]:
        """Name what is kept of a whole matrix, with shapes; kept where it is computed."""

    def wire_dtype(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype of messages and directions, by that of the main weights."""

    def cost(self, shape: Shape) -> float:
        """Return the work of ``direction`` for one matrix, in any unit."""

    def message(
        self,
        grad: Float[Tensor, " n"],
        moments: Mapping[str, Float[Tensor, " n"]],
        *,
        grad_scale: Float[Tensor, ""] | float,
    ) -> Float[Tensor, " n"]:
        """Update the moments of one range in place; return what ``direction`` receives of it.

        Args:
            grad: summed gradients; read only.
            moments: zero before the first step.
            grad_scale: multiplies the gradients first.
        """

    def direction(
        self,
        messages: Float[Tensor, "b m n"],
        state: Mapping[str, Float[Tensor, "b ..."]],
        *,
        num_steps: int,
    ) -> Float[Tensor, "b m n"]:
        """Return what weights move against, for whole matrices of one shape.

        Args:
            messages: may be overwritten.
            state: of the matrices, by the names of ``state_shapes``, in float32 or the main
                weights' wider dtype; updated in place. Zero before the first step.
            num_steps: of this update, counted from 1.
        """

    def factor(self, shape: Shape) -> float:
        """Return the factor on a matrix's direction that depends on its shape alone."""


AnyRule = UpdateRule | MatrixRule


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """How a parameter is updated; neighbours of equal groups are updated together."""

    rule: AnyRule
    lr_name: str = ""
    """Which of the named learning rates of a step it takes; empty: the common one."""
    lr_factor: float = 1.0
    """Multiplies the learning rate; the decay of a step is multiplied too."""
    decay_factor: float = 1.0
    """Multiplies weight decay; 0: the parameter does not decay."""
    width: float = 1.0
    """Width over the base width (muP), w: the update uses lr / w, gradient * w and decay * w.
    Adam's step does not depend on the gradient's scale, so its epsilon becomes eps / w, and
    the decay of a step stays lr * decay."""
    joins_parts: bool = False
    """Of a ``MatrixRule``: whether all parts of the parameter are one matrix of their rows."""


@contextmanager
def unless_applied(
    is_applied: Bool[Tensor, ""] | None, tensors: Iterable[Tensor]
) -> Iterator[None]:
    """Give tensors their bits from before the block where ``is_applied`` is false.

    Nothing waits for the device: the tensors are copied before, and selected after. A
    ``MaskableRule`` needs no copies.

    Args:
        is_applied: on the device; None: the block alone, without copies.
        tensors: what the block changes in place; views of equal memory are copied once.
    """
    if is_applied is None:
        yield
        return
    unique = {tensor.data_ptr(): tensor for tensor in tensors}
    before = [(tensor, tensor.clone()) for tensor in unique.values()]
    yield
    for tensor, copy in before:
        torch.where(is_applied, tensor, copy, out=tensor)
