"""The gated activation between two fp8 linears, cast as it is computed; see ``CastBetween``.

On a GPU one kernel reads the first linear's output and writes what the second multiplies, and
one reads it in backward; the reference computes in 16 bits and casts that, to the same bits.
"""

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_moe.activations import FUSED, activation_function, gated
from mcore_parallel.optional_kernels import OptionalKernel, wave, works
from mcore_parallel.precision.fp8_between import CastBetween, cast_between
from mcore_parallel.precision.fp8_cast import Fp8, Uncast, cast_plain
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


def gated_between(
    first: ColumnParallelLinear,
    second: RowParallelLinear,
    x: Float[Tensor, "s *B D"],
    activation: str,
    *,
    forgets: bool = False,
) -> CastBetween | None:
    """Return what computes activation(gate) * up between two linears; None: they do not fit.

    Args:
        first: gives gate and up-projection.
        second: multiplies the result.
        x: input of the first.
        activation: see ``mcore_moe.activations``.
        forgets: compute the result again for the second weight's gradient.
    """
    # A hook would read or replace what is not computed.
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    is_hooked = any(getattr(each, kind) for each in (first, second) for kind in kinds)
    if activation not in FUSED or is_hooked or first.bias is not None:
        return None
    whole = x.expand(first.axis.size, *x.shape) if first.sequence_parallel else x
    output, grad = partial(_output, activation), partial(_grad, activation)
    found = cast_between(first.gemm, second.gemm, whole, output, grad, forgets=forgets)
    # Last: only linears in fp8 may try the kernel.
    return None if found is not None and x.is_cuda and not _has_kernel(x) else found


def _output(activation: str, hidden: Tensor) -> Uncast:
    return GatedCast(hidden, None, activation)


def _grad(activation: str, hidden: Tensor, of_output: Tensor) -> Uncast:
    return GatedCast(hidden, of_output, activation)


class GatedCast(Uncast):
    """activation(gate) * up, or the gradient of gate and up."""

    def __init__(
        self,
        hidden: Float[Tensor, "*B F2"],
        grad: Float[Tensor, "*B F"] | None,
        activation: str,
    ) -> None:
        """Keep the factors; nothing is computed.

        Args:
            hidden: gate and up-projection.
            grad: of the output, for the gradient; None: the output itself.
            activation: ``silu`` or ``gelu_tanh``.
        """
        self._factors = hidden, grad, activation
        width = hidden.shape[-1] // (2 if grad is None else 1)
        super().__init__(torch.Size((*hidden.shape[:-1], width)))

    def largest(self) -> Float[Tensor, " 1"]:
        """Return the largest magnitude; by the kernel on a GPU, which keeps nothing else."""
        if not self._uses_kernel():
            return super().largest()
        from mcore_models.kernels.gated_fp8 import largest

        return largest(*self._flat())

    def cast(
        self,
        amax: Float[Tensor, " 1"],
        dtype: torch.dtype,
        *,
        has_rows: bool,
        seen: Float[Tensor, " 1"] | None,
    ) -> Fp8:
        """Cast by a known magnitude; by the kernel on a GPU."""
        if not self._uses_kernel():
            return super().cast(amax, dtype, has_rows=has_rows, seen=seen)
        from mcore_models.kernels.gated_fp8 import cast_by

        return cast_by(*self._flat(), amax, dtype, has_rows=has_rows, seen=seen)

    def _uses_kernel(self) -> bool:
        hidden = self._factors[0]
        is_in_words = self.shape[:-1].numel() % 4 == 0
        return hidden.is_cuda and is_in_words and _has_kernel(hidden)

    def _flat(self) -> tuple[Tensor, Tensor | None, str]:
        hidden, grad, activation = self._factors
        grad = None if grad is None else grad.flatten(0, -2).contiguous()
        return hidden.detach().flatten(0, -2).contiguous(), grad, activation

    def make(self) -> Tensor:
        """Compute it as the layer without fp8 does."""
        hidden, grad, activation = self._factors
        if grad is None:
            return gated(hidden.detach(), activation)
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            return torch.autograd.grad(gated(leaf, activation), leaf, grad)[0]


def _has_kernel(x: Tensor) -> bool:
    is_narrow = x.dtype in (torch.bfloat16, torch.float16)
    return is_narrow and works(GATED_CAST_KERNEL, x.device, x.dtype)


def _try_kernel(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute and cast by the kernel, and one after the other in torch; a trial.

    A last bit of 16 may be rounded otherwise, and a number then be one of fp8's next to it.
    """
    from mcore_models.kernels.gated_fp8 import cast_by, largest

    x, dy = (3.0 * wave(96, n, device=device, dtype=dtype) for n in (160, 80))
    for activation in FUSED:
        for grad, narrow in ((None, torch.float8_e4m3fn), (dy, torch.float8_e5m2)):
            matrix = _in_float32(x, grad, activation).to(dtype)
            amax = matrix.abs().amax().float().view(1)
            yield largest(x, grad, activation), amax
            got = cast_by(x, grad, activation, amax, narrow)
            want = cast_plain(matrix, amax, narrow)
            yield got.scale_inv, want.scale_inv
            for a, b in zip(got[:2], want[:2], strict=True):
                share_of_equal = (a.float() == b.float()).float().mean().view(1)
                yield share_of_equal, torch.ones_like(share_of_equal)


def _in_float32(x: Tensor, grad: Tensor | None, activation: str) -> Tensor:
    """Compute without any kernel: a trial must not begin another one."""
    leaf = x.detach().float().requires_grad_()
    with torch.enable_grad():
        gate, up = leaf.chunk(2, -1)
        y = activation_function(activation)(gate) * up
        return y.detach() if grad is None else torch.autograd.grad(y, leaf, grad.float())[0]


GATED_CAST_KERNEL = OptionalKernel("gated activations cast to fp8", ("triton",), _try_kernel)
"""What lies between fp8 linears where it works."""
