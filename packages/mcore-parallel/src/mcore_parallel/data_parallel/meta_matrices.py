"""Parameters without memory, from a model's construction until each rank allocates its rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mcore_parallel.dtensors import is_dtensor


class MatricesOnMeta(TorchFunctionMode):
    """Context in which ``torch.empty`` and ``torch.zeros`` of matrices take no memory.

    Tensors of two or more dimensions are created on the meta device, even if the call names
    another. Vectors are allocated, since modules set them to constants.
    ``FullyShardedDataParallel`` then allocates zeros for the rows of each rank, and
    ``fill_weights`` sets them: no rank holds a whole matrix while a model is built. Use the
    context only to allocate parameters: code that reads or draws numbers must run outside.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, on the meta device if its result is a new matrix."""
        options = dict(kwargs or {})
        if func in (torch.empty, torch.zeros):
            result = func(*args, **(options | {"device": "meta"}))
            if result.dim() > 1:
                return result
        return func(*args, **options)


def give_memory(parameter: nn.Parameter, device: torch.device) -> None:
    """Allocate zeros for a parameter on the meta device, in place; the object stays the same.

    Args:
        parameter: a parameter on the meta device; others do not change.
        device: device of the zeros.
    """
    if parameter.is_meta:
        real = nn.Parameter(zeros_of_meta(parameter.detach(), device), parameter.requires_grad)
        # swap_tensors exchanges attributes too: copy them, so that the parameter keeps them.
        vars(real).update(vars(parameter))
        torch.utils.swap_tensors(parameter, real)


def zeros_of_meta(tensor: Tensor, device: torch.device) -> Tensor:
    """Return zeros like a tensor on the meta device; return any other tensor unchanged."""
    if not tensor.is_meta:
        return tensor
    if is_dtensor(tensor):
        return torch.zeros_like(tensor, device=device)
    # zeros_like of a tensor on the meta device imports SymPy, which takes seconds.
    shape, dtype = tensor.shape, tensor.dtype
    return torch.empty_strided(shape, tensor.stride(), dtype=dtype, device=device).zero_()
