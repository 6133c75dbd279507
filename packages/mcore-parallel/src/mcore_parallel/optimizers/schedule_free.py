"""Schedule-Free AdamW: an average of the weights takes the place of a decaying learning rate.

Gradients are computed at y = (1 - beta1) z + beta1 x. The iterate z is updated like AdamW
without momentum. Its average x is the final model: x <- (1 - c) x + c z with
c = (r + 1) / (t + r), so that step t has a weight proportional to t^r (Shamir and Zhang 2013,
arXiv:1212.1824). In training the model's weights are y; x is saved as ``average``.

Defazio et al. 2024, The road less scheduled, arXiv:2405.15682, algorithm 1. The authors'
package also weights steps by the squared learning rate; at a constant rate both are equal.
"""

from collections.abc import Mapping
from types import MappingProxyType

from jaxtyping import Float
from torch import Tensor

from mcore_parallel.optimizers.config import ScheduleFreeConfig
from mcore_parallel.optimizers.update_rule import AVERAGE, MomentDtype


class ScheduleFree:
    """Update rule of Schedule-Free AdamW; main weights are y."""

    moments: Mapping[str, MomentDtype] = MappingProxyType(
        {"iterate": "fp32", AVERAGE: "fp32", "exp_avg_sq": "fp32"}
    )

    def __init__(self, config: ScheduleFreeConfig) -> None:
        self.config = config

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
        """Update one range in place; see ``UpdateRule``."""
        config = self.config
        beta1, beta2 = config.schedule_free_beta1, config.schedule_free_beta2
        gradient, square = grad.to(main.dtype) * grad_scale, moments["exp_avg_sq"]
        iterate, average = moments["iterate"], moments[AVERAGE]
        if num_steps == 1:
            iterate.copy_(main)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**num_steps)).sqrt_().add_(config.schedule_free_eps)
        step = gradient.div_(root).add_(main, alpha=weight_decay)
        iterate.sub_(step, alpha=lr)
        r = config.schedule_free_r
        average.lerp_(iterate, (r + 1) / (num_steps + r))
        main.copy_(iterate.lerp(average, beta1))
        if parameter.dtype != main.dtype:
            parameter.copy_(main)
