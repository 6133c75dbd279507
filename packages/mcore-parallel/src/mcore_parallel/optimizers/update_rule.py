"""``UpdateRule``: what an optimizer does with one flat range, apart from who owns the range.

``data_parallel.distributed_optimizer`` decides which ranges a rank owns, keeps main weights and
the rule's moments there, checkpoints and gathers them. A rule is elementwise: it never sees
where a parameter begins or ends.
"""

from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

MomentDtype = Literal["fp32", "bf16"]
"""How a moment is kept: in the dtype of the main weights (fp32), or in bf16."""


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
