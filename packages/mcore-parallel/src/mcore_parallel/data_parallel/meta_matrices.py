"""Parameters without memory, from a model's construction until each rank allocates its rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class MatricesOnMeta(TorchFunctionMode):
    """Inside, ``torch.empty`` and ``torch.zeros`` of two or more dimensions take no memory.

    Their tensors are on the meta device, whatever the call names. Vectors are allocated, with
    the constants that they begin as. ``FullyShardedDataParallel`` then gives each rank zeros
    for its own rows, and ``fill_weights`` sets them: no rank holds a whole matrix while a model
    is built. Only to allocate parameters: code that reads or draws numbers must stay outside.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, on the meta device if that gives a matrix."""
        given = dict(kwargs or {})
        if func in (torch.empty, torch.zeros):
            made = func(*args, **(given | {"device": "meta"}))
            if made.dim() > 1:
                return made
        return func(*args, **given)


def give_memory(parameter: nn.Parameter, device: torch.device) -> None:
    """Make a parameter zeros on a device, in place: it stays the object that it was.

    Args:
        parameter: on the meta device; others are left.
        device: of the zeros.
    """
    if parameter.is_meta:
        real = nn.Parameter(zeros_of_meta(parameter.detach(), device), parameter.requires_grad)
        vars(real).update(vars(parameter))
        torch.utils.swap_tensors(parameter, real)


def zeros_of_meta(tensor: Tensor, device: torch.device) -> Tensor:
    """Return zeros like a tensor on the meta device, and any other as it is."""
    if not tensor.is_meta:
        return tensor
    # zeros_like of a tensor on the meta device imports SymPy, which takes seconds.
    shape, dtype = tensor.shape, tensor.dtype
    return torch.empty_strided(shape, tensor.stride(), dtype=dtype, device=device).zero_()
