"""Numbers of the host on the device, without waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Copy numbers to a device without waiting for it.

    A copy from memory that is not pinned waits for all that the device has to do.
    """
    tensor = torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
