"""AdamW: decoupled weight decay and bias correction.

Loshchilov and Hutter 2019, arXiv:1711.05101.
"""

from collections.abc import Mapping

from jaxtyping import Bool, Float
from torch import Tensor

from mcore_parallel.kernels.adam import adamw_update
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.optimizers.update_rule import MomentDtype


class AdamW:
    """Update rule of AdamW; ``num_steps`` is a Python integer, so no step synchronises."""

    def __init__(self, config: AdamConfig, is_applied: Bool[Tensor, ""] | None = None) -> None:
        self.config, self._is_applied = config, is_applied

    @property
    def moments(self) -> Mapping[str, MomentDtype]:
        """Means of the gradients and of their squares."""
        return {
            "exp_avg": self.config.exp_avg_dtype,
            "exp_avg_sq": self.config.exp_avg_sq_dtype,
        }

    def masked(self, is_applied: Bool[Tensor, ""]) -> "AdamW":
        """Return this rule with a mask; see ``MaskableRule``."""
        return AdamW(self.config, is_applied)

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
        adamw_update(
            main,
            grad,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            parameter,
            num_steps=num_steps,
            lr=lr,
            weight_decay=weight_decay,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            epsilon=self.config.adam_eps,
            grad_scale=grad_scale,
            is_applied=self._is_applied,
        )
