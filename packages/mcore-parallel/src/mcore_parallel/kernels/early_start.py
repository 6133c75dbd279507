"""Kernels that start while the one before them ends: programmatic dependent launch.

Where text is written, kernels take microseconds, and as long again passes between two. A
kernel that starts early is on the processors by the time the one before it ends: it may read
what nothing writes, such as weights, and then waits. Every kernel that does so waits, so that
one waits for all before it. On GPUs before Hopper, and with gradients, none does. Imported
only where tensors are on a GPU.
"""

from itertools import pairwise
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mcore_parallel.optional_kernels import OptionalKernel, wave, works


@triton.jit
@no_type_check
def wait_for_earlier_kernels(STARTS_EARLY: tl.constexpr):
    """Let the next kernel start, and wait for the results of those before; comes first."""
    if STARTS_EARLY:
        gdc_launch_dependents()
        gdc_wait()


def starts_early(x: Tensor) -> bool:
    """Whether a kernel of this input starts early: pass it on as ``launch_pdl`` too.

    Not to be called inside of an autograd function's ``forward``, where gradients are off.
    """
    if not x.is_cuda or torch.is_grad_enabled():
        return False
    if torch.cuda.get_device_properties(x.device).major < 9:
        return False
    return works(EARLY_START, x.device)


@triton.jit
@no_type_check
def _double(x, out, size, BLOCK: tl.constexpr):
    wait_for_earlier_kernels(True)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < size, other=0.0), mask=at < size)


def _trial(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Double numbers by kernels of which each needs what the one before it wrote."""
    x = wave(5000, device=device, dtype=torch.float32)
    chain = [x, *(torch.empty_like(x) for _ in range(8))]
    for before, after in pairwise(chain):
        _double[(20,)](before, after, x.numel(), 256, launch_pdl=True)  # pyrefly: ignore
    return [(chain[-1], 256 * x)]


EARLY_START = OptionalKernel("early starts of kernels", ("triton",), _trial)
