"""Lion: the sign of an interpolated momentum, with decoupled weight decay.

Chen et al. 2023, Symbolic discovery of optimization algorithms, arXiv:2302.06675, algorithm 2.
Use a learning rate 3 to 10 times smaller than AdamW's, and a weight decay as many times larger.
"""

from collections.abc import Mapping
from types import MappingProxyType

from jaxtyping import Float
from torch import Tensor

from mcore_parallel.optimizers.config import LionConfig
from mcore_parallel.optimizers.update_rule import MomentDtype


class Lion:
    """Update rule of Lion, with one moment."""

    moments: Mapping[str, MomentDtype] = MappingProxyType({"momentum": "fp32"})

    def __init__(self, config: LionConfig) -> None:
        self.config = config

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
        gradient, momentum = grad.to(main.dtype) * grad_scale, moments["momentum"]
        direction = gradient.lerp(momentum, self.config.lion_beta1).sign_()
        momentum.lerp_(gradient, 1 - self.config.lion_beta2)
        main.mul_(1 - lr * weight_decay).sub_(direction, alpha=lr)
        if parameter.dtype != main.dtype:
            parameter.copy_(main)
