"""A gated feed-forward layer in fp8 whose activation is computed within the cast.

On a GPU one kernel reads gate and up-projection and writes the fp8 operand of the second GEMM,
and one kernel of backward reads them again with the gradient. The reference computes in 16 bits
and casts the result, with equal bits.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_models.kernels.gated_fp8 import cast_gated, largest_gated
from mcore_models.layers.mlp import MLP
from mcore_moe.experts.network import ExpertNetwork
from mcore_moe.kernels.gate import KINDS, gated
from mcore_parallel.kernels.fp8_cast import Fp8
from mcore_parallel.optional_kernels import works
from mcore_parallel.precision.fp8 import Fp8Gemm, LinearGemms
from mcore_parallel.precision.fp8_cast import DeferredMatrix
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.tensor_parallel.linear_autograd import column_row_pair


class Fp8GatedMLP(MLP):
    """``MLP`` whose two linears and the activation between them are one autograd function.

    Inputs that the fused function does not support (rows that tensor cores cannot multiply,
    linears that were replaced or have hooks, as with adapters, compiled code, autocast) go
    through the modules one by one, with equal bits.
    """

    @classmethod
    def supports(cls, network: ExpertNetwork, gemms: LinearGemms) -> bool:
        """Return whether this class supports the network and the GEMMs."""
        is_fp8 = isinstance(gemms.column, Fp8Gemm) and isinstance(gemms.row, Fp8Gemm)
        is_plain = not (network.bias or network.clamp or network.offset)
        return is_fp8 and is_plain and network.gated and network.activation in KINDS

    def forward(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "s B D"]:
        """Transform every token; communicates as the two linears do."""
        gemms = self._fused_gemms(x)
        if gemms is None:
            return super().forward(x)
        return column_row_pair(
            x,
            (self.fc1.weight, self.fc2.weight),
            gemms,
            partial(GatedCast, activation=self.network.activation),
            self.fc1.axis,
            self.fc1.sequence_parallel,
            recompute_activation=self.network.recompute_activation and self.training,
        )

    def _fused_gemms(self, x: Tensor) -> tuple[Fp8Gemm, Fp8Gemm] | None:
        """Return the GEMMs of the two linears if the fused function supports x, else None."""
        fc1, fc2 = self.fc1, self.fc2
        if not (isinstance(fc1, ColumnParallelLinear) and isinstance(fc2, RowParallelLinear)):
            return None  # replaced, as by adapters
        hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
        if any(getattr(linear, kind) for linear in (fc1, fc2) for kind in hooks):
            return None
        first, second = fc1.gemm, fc2.gemm
        if not (isinstance(first, Fp8Gemm) and isinstance(second, Fp8Gemm)):
            return None  # widths that fp8 does not support
        # Both GEMMs multiply the gathered tokens.
        gathered = x.expand(fc1.axis.size, *x.shape) if fc1.sequence_parallel else x
        if not (first.takes_deferred(gathered) and second.takes_deferred(gathered)):
            return None
        return None if x.is_cuda and not _has_kernels(x) else (first, second)


class GatedCast(DeferredMatrix):
    """``activation(gate) * up``, or the gradient of gate and up; computed by the fp8 cast."""

    def __init__(
        self,
        hidden: Float[Tensor, "*B F2"],
        grad: Float[Tensor, "*B F"] | None,
        activation: str,
    ) -> None:
        """Store references to the factors; compute nothing.

        Args:
            hidden: gate and up-projection.
            grad: of the output, for the gradient; None: the output itself.
            activation: ``silu`` or ``gelu_tanh``.
        """
        self._factors = hidden, grad, activation
        width = hidden.shape[-1] // (2 if grad is None else 1)
        super().__init__(torch.Size((*hidden.shape[:-1], width)))

    def largest(self) -> Float[Tensor, " 1"]:
        """Return the largest magnitude; the GPU kernel does not store the matrix."""
        return largest_gated.launch(*self._flat()) if self._fits() else super().largest()

    def cast(
        self,
        amax: Float[Tensor, " 1"],
        dtype: torch.dtype,
        *,
        has_rows: bool,
        seen: Float[Tensor, " 1"] | None,
    ) -> Fp8:
        """Cast to fp8 with the scale of ``amax``; on a GPU one kernel computes and casts."""
        if not self._fits():
            return super().cast(amax, dtype, has_rows=has_rows, seen=seen)
        return cast_gated.launch(*self._flat(), amax, dtype, has_rows=has_rows, seen=seen)

    def _fits(self) -> bool:
        # The transpose is written in words of 4 bytes.
        return self.shape[:-1].numel() % 4 == 0 and _has_kernels(self._factors[0])

    def _flat(self) -> tuple[Tensor, Tensor | None, str]:
        hidden, grad, activation = self._factors
        grad = None if grad is None else grad.flatten(0, -2).contiguous()
        return hidden.detach().flatten(0, -2).contiguous(), grad, activation

    def make(self) -> Tensor:
        """Compute the matrix in 16 bits, as the layer without fp8 does."""
        hidden, grad, activation = self._factors
        if grad is None:
            return gated(hidden.detach(), activation)
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            return torch.autograd.grad(gated(leaf, activation), leaf, grad)[0]


def _has_kernels(x: Tensor) -> bool:
    return largest_gated.takes(x) and works(cast_gated, x.device, x.dtype)
