"""Stochastic gradient descent with momentum, in plain torch.

The rule of ``torch.optim.SGD`` without dampening: weight decay is added to the gradient.
"""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from mcore_parallel.optimizers.config import SGDConfig
from mcore_parallel.optimizers.update_rule import MomentDtype


class SGD:
    """Update rule of SGD, with momentum unless it is 0."""

    def __init__(self, config: SGDConfig) -> None:
        self.momentum = config.sgd_momentum

    @property
    def moments(self) -> Mapping[str, MomentDtype]:
        """The decayed sum of gradients; no moment if the momentum is 0."""
        return {"momentum": "fp32"} if self.momentum else {}

    def update(
        self,
        main: Float[Tensor, " n"],
        grad: Float[Tensor, " n"],
        moments: Mapping[str, Float[Tensor, " n"]],
        parameter: Float[Tensor, " n"],
        *,
        num_steps: int,  # noqa: ARG002 - the rule is the same in every step
        lr: float,
        weight_decay: float,
        grad_scale: Float[Tensor, ""] | float,
    ) -> None:
        """Update one range in place; see ``UpdateRule``."""
        gradient = (grad.to(main.dtype) * grad_scale).add_(main, alpha=weight_decay)
        if self.momentum:
            gradient = moments["momentum"].mul_(self.momentum).add_(gradient)
        main.sub_(gradient, alpha=lr)
        if parameter.dtype != main.dtype:
            parameter.copy_(main)
