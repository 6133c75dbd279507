"""AdamW: decoupled weight decay and bias correction, one Triton kernel or plain torch.

Loshchilov and Hutter 2019, arXiv:1711.05101.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.adamw import adamw

from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.optimizers.update_rule import MomentDtype
from mcore_parallel.optional_kernels import OptionalKernel, wave, works


class AdamW:
    """The update rule; ``num_steps`` is a plain integer, so a step makes no host sync."""

    def __init__(self, config: AdamConfig) -> None:
        """Take the constants and the dtypes of the moments."""
        self.config = config

    @property
    def moments(self) -> Mapping[str, MomentDtype]:
        """Means of the gradients and of their squares."""
        return {
            "exp_avg": self.config.exp_avg_dtype,
            "exp_avg_sq": self.config.exp_avg_sq_dtype,
        }

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
        update_range = _kernel if _has_kernel(main) else adamw_plain
        update_range(
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
        )


def _has_kernel(main: Tensor) -> bool:
    return main.is_cuda and main.dtype == torch.float32 and works(ADAM_KERNEL, main.device)


def _kernel(*tensors: Tensor, **constants: Any) -> None:
    from mcore_parallel.kernels.adam import fused_adamw

    fused_adamw(*tensors, **constants)


def _try_kernel(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    constants: dict[str, Any] = {"num_steps": 2, "lr": 0.1, "weight_decay": 0.1}
    constants |= {"betas": (0.9, 0.95), "epsilon": 1e-8}
    results = []
    for update in (_kernel, adamw_plain):
        main, grad, mean = (wave(64, device=device, dtype=torch.float32) for _ in range(3))
        tensors = [main, grad, mean, mean.square(), main.bfloat16()]
        update(*tensors, **constants)
        results.append(tensors)
    return list(zip(*results, strict=True))


ADAM_KERNEL = OptionalKernel("AdamW in Triton", ("triton",), _try_kernel)


def adamw_plain(
    main: Float[Tensor, " n"],
    grad: Float[Tensor, " n"],
    exp_avg: Float[Tensor, " n"],
    exp_avg_sq: Float[Tensor, " n"],
    parameter: Float[Tensor, " n"],
    *,
    num_steps: int,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    epsilon: float,
    grad_scale: Float[Tensor, ""] | float = 1.0,
) -> None:
    """Reference of ``kernels.adam.fused_adamw`` by torch's own; float64 stays float64."""
    wide = main.dtype
    grad, mean, square = grad.to(wide), exp_avg.to(wide), exp_avg_sq.to(wide)
    if isinstance(grad_scale, Tensor):
        grad = grad * grad_scale.to(wide)
    elif grad_scale != 1.0:
        grad = grad * grad_scale
    adamw(
        [main],
        [grad],
        [mean],
        [square],
        [],
        [torch.full((), num_steps - 1.0, device=main.device)],  # torch's kernel advances it
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=epsilon,
        maximize=False,
    )
    if mean is not exp_avg:
        exp_avg.copy_(mean)
    if square is not exp_avg_sq:
        exp_avg_sq.copy_(square)
    if parameter.data_ptr() != main.data_ptr():
        parameter.copy_(main)
