"""Shared by wrappers of optional kernel packages: installed, usable, and without warnings."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor


@cache
def is_installed(package: str) -> bool:
    """Whether a package is installed; imports nothing."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def refusal(x: Tensor, particular: Iterable[tuple[bool, str]], package: str, extra: str) -> str:
    """Return why kernels for 16-bit tensors on Hopper cannot be used; empty if they can.

    What is installed is checked last, and so never by a call that is being compiled: torch's
    compiler cannot trace the question.

    Args:
        x: one of the tensors that they would read.
        particular: further reasons: whether each applies, and its text.
        package: provides the kernels.
        extra: the message if the package is not installed.
    """
    reasons = (
        (torch.compiler.is_compiling(), "the call is being compiled"),
        (not x.is_cuda, f"tensors are on {x.device.type}, not on a GPU"),
        (
            x.dtype not in (torch.bfloat16, torch.float16),
            f"{x.dtype} is not a format of 16 bits",
        ),
        *particular,
    )
    for is_so, reason in reasons:
        if is_so:
            return reason
    if torch.cuda.get_device_capability(x.device) != (9, 0):
        return "the GPU is no Hopper (compute capability 9.0)"
    return "" if is_installed(package) else extra


@contextmanager
def without_compiler_noise() -> Iterator[None]:
    """Hide warnings of the CuTe compiler and its packages about their own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
        yield
