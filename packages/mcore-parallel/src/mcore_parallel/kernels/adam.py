"""One AdamW update over flat memory: Triton kernel and reference.

One pass scales the gradient and updates moments, weights and the parameter in its own dtype. It
is limited by memory traffic: 30 bytes per weight for bfloat16 parameters with float32 state.
"""

import math
from collections.abc import Iterator
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

_BLOCK = 2048


@triton.jit
@no_type_check
def _adamw(
    main,
    grad,
    exp_avg,
    exp_avg_sq,
    parameter,
    scale,
    is_applied,
    size,
    factor,
    decay,
    step_size,
    root_correction,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    epsilon,
    HAS_PARAMETER: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    g = tl.load(grad + index, mask=inside).to(tl.float32) * factor
    if HAS_SCALE:
        g *= tl.load(scale).to(tl.float32)
    mean = tl.load(exp_avg + index, mask=inside).to(tl.float32)
    square = tl.load(exp_avg_sq + index, mask=inside).to(tl.float32)
    weight = tl.load(main + index, mask=inside)
    # Explicit fma: if the compiler chose where to fuse, a part of a range could get other bits
    # than the same weights in the full range, which the compiler may load in another way.
    mean = tl.fma(beta1, mean, one_minus_beta1 * g)
    square = tl.fma(beta2, square, one_minus_beta2 * (g * g))
    denominator = tl.sqrt_rn(square) / root_correction + epsilon
    weight = tl.fma(-step_size, mean / denominator, tl.fma(-decay, weight, weight))
    if HAS_FLAG:
        # The flag masks only the stores: loads that depend on it would start later by the
        # latency of the flag's load, in every step.
        inside &= tl.load(is_applied) != 0
    tl.store(main + index, weight, mask=inside)
    tl.store(exp_avg + index, mean.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + index, square.to(exp_avg_sq.dtype.element_ty), mask=inside)
    if HAS_PARAMETER:
        tl.store(parameter + index, weight.to(parameter.dtype.element_ty), mask=inside)


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
    is_applied: Bool[Tensor, ""] | None = None,
) -> None:
    """Compute ``adamw_update`` by torch's AdamW, in the dtype of ``main``."""
    wide = main.dtype
    grad, mean, square = grad.to(wide), exp_avg.to(wide), exp_avg_sq.to(wide)
    if isinstance(grad_scale, Tensor):
        grad = grad * grad_scale.to(wide)
    elif grad_scale != 1.0:
        grad = grad * grad_scale
    torch_adamw(
        [main],
        [grad],
        [mean],
        [square],
        [],
        [torch.full((), num_steps - 1.0, device=main.device)],  # torch increments the count
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=epsilon,
        maximize=False,
        found_inf=None if is_applied is None else (~is_applied).float(),
    )
    if mean is not exp_avg:
        exp_avg.copy_(mean)
    if square is not exp_avg_sq:
        exp_avg_sq.copy_(square)
    if parameter.data_ptr() != main.data_ptr():
        new_weights = main if is_applied is None else torch.where(is_applied, main, parameter)
        parameter.copy_(new_weights)


def _samples(device: torch.device) -> Iterator[Sample]:
    constants: dict[str, Any] = {"num_steps": 2, "lr": 0.1, "weight_decay": 0.1}
    constants |= {"betas": (0.9, 0.95), "epsilon": 1e-8}
    main, mean = (wave(64, device=device, dtype=torch.float32) for _ in range(2))
    for flag in (None, torch.tensor(False, device=device)):
        state = main, main.clone(), mean, mean.square(), main.bfloat16()
        yield Sample(*state, is_applied=flag, **constants)


@optional_kernel(
    "AdamW in Triton",
    reference=adamw_plain,
    kind=lambda main: () if main.dtype == torch.float32 else None,
    samples=_samples,
)
def adamw_update(
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
    is_applied: Bool[Tensor, ""] | None = None,
) -> None:
    """Update weights and moments in place, and write the weights to the parameter.

    Args:
        main: weights, contiguous; float32 for the kernel.
        grad: gradient of the weights, any dtype; not changed.
        exp_avg: mean of gradients, any dtype; computed in float32.
        exp_avg_sq: mean of squared gradients, any dtype; computed in float32.
        parameter: receives the new weights in its own dtype; may be ``main``.
        num_steps: number of updates including this one, for bias correction.
        lr: learning rate.
        weight_decay: decoupled decay.
        betas: decay rates of the two means.
        epsilon: added to the root of the mean square.
        grad_scale: factor of the gradient; a tensor is read on the device.
        is_applied: read on the device; where it is false, nothing is written. None: applied.

    Reference:
        Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """
    size = main.numel()
    if size == 0:
        return
    beta1, beta2 = betas
    is_tensor = isinstance(grad_scale, Tensor)
    _adamw[(triton.cdiv(size, _BLOCK),)](
        main,
        grad,
        exp_avg,
        exp_avg_sq,
        parameter,
        grad_scale if is_tensor else main,
        main if is_applied is None else is_applied.view(torch.uint8),
        size,
        1.0 if is_tensor else float(grad_scale),
        lr * weight_decay,
        lr / (1.0 - beta1**num_steps),
        math.sqrt(1.0 - beta2**num_steps),
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        epsilon,
        parameter.data_ptr() != main.data_ptr(),
        is_tensor,
        is_applied is not None,
        _BLOCK,
        num_warps=8,
    )
