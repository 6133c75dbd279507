"""Copies of small host tensors to a device that do not block the host."""

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return a tensor of the numbers on a device; the host does not wait for the copy.

    A copy from memory that is not pinned would wait for all queued work of the device.
    """
    tensor = torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
