"""GEMM of decoding steps: multiplies few rows by a kernel that reads the weight once."""

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_models.protocol import LanguageModel
from mcore_parallel.optional_kernels import works
from mcore_parallel.precision.gemm import Operands, PlainGemm
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

MOST_ROWS = 16
"""Most rows of the kernel's input, the smallest tile of tensor cores. With more rows torch's
GEMM is as fast."""


class FewRowsGemm(PlainGemm):
    """Multiplies inputs of few rows by a kernel bound by memory bandwidth, others by torch."""

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Float[Tensor, "F D"], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return the product, and the input for backward."""
        num_rows = x.numel() // x.shape[-1]
        if bias is None and num_rows <= MOST_ROWS and not torch.is_grad_enabled():
            is_narrow = x.dtype in (torch.bfloat16, torch.float16)
            if x.is_cuda and is_narrow and weight.dtype == x.dtype:
                from mcore_infer.engine.kernels.skinny_gemm import (
                    FEW_ROWS_KERNEL,
                    few_rows_linear,
                )

                if works(FEW_ROWS_KERNEL, x.device, x.dtype):
                    return few_rows_linear(x, weight), (x,)
        return super().forward(x, weight, bias)


def use_few_rows_gemm(model: LanguageModel) -> None:
    """Replace every ``PlainGemm`` of a model's linears by a ``FewRowsGemm``, in place."""
    for module in model.modules():
        is_linear = isinstance(module, (ColumnParallelLinear, RowParallelLinear))
        if is_linear and type(module.gemm) is PlainGemm:
            module.gemm = FewRowsGemm()
