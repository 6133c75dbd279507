"""Rows sorted by expert times stacked weights: one expert after the other, or in one kernel.

The sequential form loops over the experts; the grouped GEMM is a single kernel. Both compute
the same function; device and dtype decide which one runs. Where the weight has a main gradient
(``grad_slot``) either adds its gradient to it, on a GPU in the epilogue of a grouped GEMM, at
once or, for pipeline schedules that split backward, later.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mcore_moe.kernels import quack_gemm
from mcore_parallel.autocasting import cast_factor
from mcore_parallel.grad_slot import GradSlot, accumulate_matmul, slot_of
from mcore_parallel.optional_kernels import OptionalKernel, wave, works

Linear = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``grouped_linear`` or ``sequential_linear``."""


def sequential_linear(
    x: Float[Tensor, "R K"], weight: Float[Tensor, "e N K"], offsets: Int[Tensor, " e1"]
) -> Float[Tensor, "R N"]:
    """Multiply each expert's rows with its weight, one expert after the other.

    The host waits for the device to learn ``offsets``.

    Args:
        x: rows sorted by expert.
        weight: of all experts of this rank.
        offsets: where the rows of each begin, and the end of the last; int32. Rows behind it
            give zeros.
    """
    x, weight = cast_factor(x), cast_factor(weight)
    *parts, rest = _by_expert(x, offsets)
    results = [F.linear(rows, w) for rows, w in zip(parts, weight, strict=True)]
    return torch.cat([*results, x.new_zeros(rest.shape[0], weight.shape[1])])


def _by_expert(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of each expert, and those behind the last; the host waits."""
    sizes = offsets.diff().tolist()
    return x.split([*sizes, x.shape[0] - sum(sizes)])


def grouped_linear(
    x: Float[Tensor, "R K"], weight: Float[Tensor, "e N K"], offsets: Int[Tensor, " e1"]
) -> Float[Tensor, "R N"]:
    """Multiply each expert's rows with its weight in one kernel; no wait for the device.

    Same arguments as ``sequential_linear``, which also computes what the kernel cannot:
    see ``has_grouped_kernel``.
    """
    x, weight = cast_factor(x), cast_factor(weight)
    if not has_grouped_kernel(x, weight):
        return sequential_linear(x, weight, offsets)
    if x.shape[0] == 0:
        return F.linear(x, weight[0])  # the kernel refuses tensors without rows
    return _GroupedLinear.apply(x, weight, offsets)


def accumulating_linear(
    x: Float[Tensor, "R K"],
    weight: Float[Tensor, "e N K"],
    offsets: Int[Tensor, " e1"],
    *,
    linear: Linear,
) -> Float[Tensor, "R N"]:
    """Multiply as ``linear``; backward adds the weight's gradient to its main gradient.

    Autograd sees no gradient of the weight then. With a queue in the weight's slot the rows
    and the gradient of the result are kept until the queue makes it.

    Args:
        x: rows sorted by expert.
        weight: of all experts of this rank, with a main gradient in its slot.
        offsets: where the rows of each begin, and the end of the last.
        linear: ``grouped_linear`` or ``sequential_linear``.
    """
    return _AccumulatingLinear.apply(x, weight, offsets, linear)


def has_grouped_kernel(x: Float[Tensor, "R K"], weight: Float[Tensor, "e N K"]) -> bool:
    """Return whether torch's grouped GEMM takes these tensors, eager and compiled alike.

    On torch 2.11: bfloat16 with rows of a multiple of 16 bytes; on CUDA from compute
    capability 8.0.
    """
    aligned = all(n * x.element_size() % 16 == 0 for n in weight.shape[1:])
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    return aligned and x.dtype == torch.bfloat16


class _GroupedLinear(torch.autograd.Function):
    """The grouped GEMM with a backward that takes gradients of any strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return _multiply(x, weight.transpose(1, 2), offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad, grad_weight = grad.contiguous(), None
        grad_x = _multiply(grad, weight, offsets) if needs_x else None
        if needs_weight:
            grad_weight = take_weight_gradient(None, weight, grad, x, offsets)
        return grad_x, grad_weight, None


def _multiply(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply sorted rows with weights ``[e, K, N]`` by the fastest GEMM that is there."""
    if quack_gemm.sorts_faster(weight) and quack_gemm.usable(x, weight):
        return quack_gemm.multiply(x, weight, offsets)
    return F.grouped_mm(x, weight, offs=offsets[1:])


class _AccumulatingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, linear: Linear) -> Tensor:
        # Saved tensors may come back as copies; the slot is the original's.
        ctx.slot, ctx.linear = slot_of(weight), linear
        x, weight = cast_factor(x), cast_factor(weight)
        ctx.save_for_backward(x, weight, offsets)
        return linear(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.linear(grad, weight.transpose(1, 2), offsets)
        if ctx.needs_input_grad[1]:
            take_weight_gradient(ctx.slot, weight, grad, x, offsets)
        return grad_x, None, None, None


def take_weight_gradient(
    slot: GradSlot | None,
    weight: Float[Tensor, "e N K"],
    grad: Float[Tensor, "R N"],
    x: Float[Tensor, "R K"],
    offsets: Int[Tensor, " e1"],
) -> Float[Tensor, "e N K"] | None:
    """Add the gradient of stacked weights to their main gradient, at once or later.

    Args:
        slot: of the weights; None: return the gradient.
        weight: the weights.
        grad: gradient of the rows' results.
        x: rows sorted by expert.
        offsets: where the rows of each begin, and the end of the last.
    """
    if slot is None:
        if x.shape[0] and quack_gemm.usable(x, weight):
            gradient = torch.empty_like(weight)
            quack_gemm.add_weight_gradient(gradient, grad, x, offsets, overwrite=True)
            return gradient
        if x.shape[0] and has_grouped_kernel(x, weight):
            return F.grouped_mm(grad.t(), x, offs=offsets[1:])
        gradient = torch.empty_like(weight)
        add_weight_gradient_plain(gradient, grad, x, offsets, overwrite=True)
        return gradient
    slot.take(partial(_add_weight_gradient, grad=grad, x=x, offsets=offsets))
    return None


def _add_weight_gradient(
    main: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, *, overwrite: bool
) -> None:
    """Add the gradient of stacked weights by the fastest GEMM that is there."""
    if x.shape[0] and grad.shape[0] and quack_gemm.usable(x, main):
        quack_gemm.add_weight_gradient(main, grad, x, offsets, overwrite=overwrite)
    elif _has_accumulating_kernel(main, x):
        from mcore_moe.kernels.weight_grad import fused_weight_gradient

        fused_weight_gradient(main, grad, x, offsets, overwrite=overwrite)
    elif x.shape[0] and has_grouped_kernel(x, main):
        total = F.grouped_mm(grad.t(), x, offs=offsets[1:])
        main.copy_(total) if overwrite else main.add_(total)
    else:
        add_weight_gradient_plain(main, grad, x, offsets, overwrite=overwrite)


def add_weight_gradient_plain(
    main: Float[Tensor, "e N K"],
    grad: Float[Tensor, "R N"],
    x: Float[Tensor, "R K"],
    offsets: Int[Tensor, " e1"],
    *,
    overwrite: bool = False,
) -> None:
    """Reference of ``kernels.weight_grad.fused_weight_gradient``, expert by expert."""
    parts = zip(main, _by_expert(grad, offsets), _by_expert(x, offsets), strict=False)
    for total, rows, inputs in parts:
        accumulate_matmul(total, rows.t(), inputs, overwrite=overwrite)


def _has_accumulating_kernel(main: Tensor, x: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and main.dtype == torch.float32
        and main.is_contiguous()
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and works(WEIGHT_GRAD_KERNEL, x.device, x.dtype)
    )


def _try_kernel(device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    from mcore_moe.kernels.weight_grad import fused_weight_gradient

    offsets = torch.tensor([0, 5, 5, 16], dtype=torch.int32, device=device)
    grad, x = (wave(16, n, device=device, dtype=dtype) for n in (24, 40))
    pairs = []
    for overwrite in (False, True):
        got, want = (wave(3, 24, 40, device=device, dtype=torch.float32) for _ in range(2))
        fused_weight_gradient(got, grad, x, offsets, overwrite=overwrite)
        wide = grad.float(), x.float()
        add_weight_gradient_plain(want, *wide, offsets, overwrite=overwrite)
        pairs.append((got, want))
    return pairs


WEIGHT_GRAD_KERNEL = OptionalKernel(
    "main gradients of experts in Triton", ("triton",), _try_kernel
)
