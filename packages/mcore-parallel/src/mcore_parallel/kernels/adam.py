"""Triton kernel of one AdamW update over flat memory, in one pass.

Gradient scaling, moments, decay, update and the copy in the parameter's dtype read and write
each number once, at the memory limit: 30 bytes a weight for bfloat16 parameters with float32
state.
The reference is ``optimizers.adamw.adamw_plain``; this module is imported only where
tensors are on a GPU.
"""

import math
from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

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
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(grad + at, mask=inside).to(tl.float32) * factor
    if HAS_SCALE:
        g *= tl.load(scale).to(tl.float32)
    mean = tl.load(exp_avg + at, mask=inside).to(tl.float32)
    square = tl.load(exp_avg_sq + at, mask=inside).to(tl.float32)
    weight = tl.load(main + at, mask=inside)
    # Fused by name: where the compiler chooses, a piece of a range may get other bits than the
    # same weights in the whole, whose addresses and size let it load otherwise.
    mean = tl.fma(beta1, mean, one_minus_beta1 * g)
    square = tl.fma(beta2, square, one_minus_beta2 * (g * g))
    spread = tl.sqrt_rn(square) / root_correction + epsilon
    weight = tl.fma(-step_size, mean / spread, tl.fma(-decay, weight, weight))
    tl.store(main + at, weight, mask=inside)
    tl.store(exp_avg + at, mean.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, square.to(exp_avg_sq.dtype.element_ty), mask=inside)
    if HAS_PARAMETER:
        tl.store(parameter + at, weight.to(parameter.dtype.element_ty), mask=inside)


def fused_adamw(
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
    """Update weights and moments in place, and write the weights into the parameter.

    Args:
        main: float32 weights, contiguous.
        grad: their gradient, of any dtype; left as it is.
        exp_avg: mean of gradients, of any dtype; computed in float32.
        exp_avg_sq: mean of squared gradients, likewise.
        parameter: gets the new weights in its dtype; may be ``main`` itself.
        num_steps: updates made, this one included: what bias correction goes by.
        lr: learning rate.
        weight_decay: decoupled decay.
        betas: decay of the two means.
        epsilon: added to the root of the mean square.
        grad_scale: multiplies the gradient first; a tensor is read on the device.

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
        _BLOCK,
        num_warps=8,
    )
