"""When a recurrence is computed by its kernels rather than by plain torch."""

import torch
from torch import Tensor

from mcore_parallel.optional_kernels import OptionalKernel, works

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes of the kernels: in float32 their exact GEMMs compile for half a minute."""


def may_take(kernel: OptionalKernel, x: Tensor, *widths: int) -> bool:
    """Say whether kernels made for these widths may compute a recurrence over ``x``.

    Tries them at the first call, see ``mcore_parallel.optional_kernels``.

    Args:
        kernel: the kernels, tried by dtype and widths.
        x: what enters the recurrence.
        widths: they are compiled for.
    """
    return (
        x.is_cuda
        and x.dtype in NARROW
        and not torch.compiler.is_compiling()
        and works(kernel, x.device, x.dtype, *widths)
    )
