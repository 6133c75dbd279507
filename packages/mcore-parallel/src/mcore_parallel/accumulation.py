"""Gradients that an operation adds to ``main_grad`` itself, past autograd.

``DataParallel`` gives each parameter a ``main_grad``, a view of its buckets. An operation
that can add to it directly (a GEMM in its epilogue, an embedding row by row) saves a
tensor of the parameter's size, its sum and its cast; it then returns None as the
parameter's gradient. The parameter's hook still runs at the end of backward and counts it.
"""

from typing import Any

import torch
from torch import Tensor


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """Return the main gradient that an operation may add to; None: leave it to autograd.

    Always None in compiled code, where a side effect of backward would be lost.
    """
    if torch.compiler.is_compiling():
        return None
    return getattr(parameter, "main_grad", None)


def tell_ready(parameter: Any) -> None:
    """Say that an operation has added its gradient, to whoever asked to know.

    Calls ``parameter.main_grad_ready()`` where there is such a thing.
    """
    ready = getattr(parameter, "main_grad_ready", None)
    if ready is not None:
        ready()
