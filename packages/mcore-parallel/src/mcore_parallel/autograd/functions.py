"""What this library's autograd functions share: the refusal of second derivatives, and casts.

Kernels, collectives and main gradients compute gradients past autograd. Differentiated again,
they would count as constants, and second-order terms be lost without a word.

Under ``torch.autocast`` a function casts its factors inside its forward, as torch's own, and
keeps the casts: its backward, which runs without autocast, then meets one dtype, and autograd
casts the gradients back.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class OnceDifferentiable(torch.autograd.Function):
    """A ``torch.autograd.Function`` whose ``backward`` is no graph.

    Raises:
        RuntimeError: in a backward with ``create_graph=True``, whatever its gradients are.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Check each call of a class's own ``backward``."""
        super().__init_subclass__(**options)
        if "backward" in vars(cls):
            cls.backward = staticmethod(_checked(cls.backward))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast computes GEMMs in on a device; None: it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def cast_factor(x: Tensor) -> Tensor:
    """Return x in autocast's dtype where that is on; float64 stays, as with torch's own."""
    dtype = autocast_dtype(x.device)
    if dtype is None or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Compute inside in the dtypes that tensors have; changes nothing where autocast is off."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def same_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context with the autocast of now, to be entered later, in backward say."""
    dtype = autocast_dtype(device)
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def _checked(backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        # The engine turns gradients on for create_graph alone; a compiler traces with them on.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            name = backward.__qualname__.split(".", maxsplit=1)[0].strip("_")
            raise RuntimeError(
                f"gradients of {name} are computed by kernels or over ranks and cannot be "
                "differentiated again: leave create_graph=True out, or use plain torch layers."
            )
        return backward(ctx, *grads)

    return run
