"""``is_dtensor``: recognizes DTensors without importing their module.

``torch.distributed.tensor`` imports sympy, which would add more than a second to every command
and restart. If the module has not been imported, no DTensor can exist.
"""

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor, such as a parameter under ``fully_shard``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
