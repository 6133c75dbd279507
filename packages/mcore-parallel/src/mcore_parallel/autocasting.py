"""Casts of this library's autograd functions under ``torch.autocast``, as torch's own cast.

A function casts its factors inside its forward and keeps the casts: its backward, which runs
without autocast, then meets one dtype, and autograd casts the gradients back.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


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
