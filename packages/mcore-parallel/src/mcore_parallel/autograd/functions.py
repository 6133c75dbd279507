"""Base class of this library's autograd functions, and helpers for ``torch.autocast``.

Kernels, collectives and main gradients compute gradients outside autograd. A second
differentiation would treat these gradients as constants and silently drop second-order terms,
so ``OnceDifferentiable`` refuses it.

Under ``torch.autocast`` an autograd function casts its factors inside its forward, as torch's
own functions do, and saves the casts: its backward, which runs without autocast, then has
factors of one dtype, and autograd casts the gradients back.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class OnceDifferentiable(torch.autograd.Function):
    """A ``torch.autograd.Function`` whose ``backward`` cannot be differentiated.

    Raises:
        RuntimeError: in a backward with ``create_graph=True``.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the ``backward`` that a subclass defines with the check."""
        super().__init_subclass__(**options)
        if "backward" in vars(cls):
            cls.backward = staticmethod(_checked(cls.backward))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype for GEMMs on a device; None: autocast is disabled."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def cast_factor(x: Tensor) -> Tensor:
    """Return x in autocast's dtype if autocast is enabled; float64 stays, as in torch."""
    dtype = autocast_dtype(x.device)
    if dtype is None or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that disables autocast on a device."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def same_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that restores the current autocast, to be entered in backward."""
    dtype = autocast_dtype(device)
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def _checked(backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        # Autograd enables gradients in backward only with create_graph=True. Compiled code
        # traces backward with gradients enabled.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            name = backward.__qualname__.split(".", maxsplit=1)[0].strip("_")
            raise RuntimeError(
                f"gradients of {name} are computed by kernels or over ranks and cannot be "
                "differentiated again: leave create_graph=True out, or use plain torch layers."
            )
        return backward(ctx, *grads)

    return run
