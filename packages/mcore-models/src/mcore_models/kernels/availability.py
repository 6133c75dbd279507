"""Checks of optional kernel packages: whether they are installed and support the tensors."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor


@cache
def is_installed(package: str) -> bool:
    """Return whether a package is installed; imports nothing."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def refusal(x: Tensor, particular: Iterable[tuple[bool, str]], package: str, extra: str) -> str:
    """Return the reason why kernels for 16-bit tensors on Hopper cannot be used; '' if none.

    Whether the package is installed is checked last, and never in a call that is being
    compiled, as torch's compiler cannot trace this check.

    Args:
        x: one of the kernels' input tensors.
        particular: further reasons, each a pair: whether the reason applies, and its text.
        package: provides the kernels.
        extra: the message if the package is not installed.
    """
    reasons = (
        (torch.compiler.is_compiling(), "the call is being compiled"),
        (not x.is_cuda, f"tensors are on {x.device.type}, not on a GPU"),
        (
            x.dtype not in (torch.bfloat16, torch.float16),
            f"{x.dtype} is not a 16-bit dtype",
        ),
        *particular,
    )
    for applies, reason in reasons:
        if applies:
            return reason
    if torch.cuda.get_device_capability(x.device) != (9, 0):
        return "the GPU is not a Hopper GPU (compute capability 9.0)"
    return "" if is_installed(package) else extra


@contextmanager
def without_compiler_noise() -> Iterator[None]:
    """Hide warnings of the CuTe compiler and its packages about their own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
        yield
