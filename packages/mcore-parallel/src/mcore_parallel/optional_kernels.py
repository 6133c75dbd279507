"""Optional kernels are tried before their first use, with plain torch as the fallback.

A kernel may be missing, be built for another GPU, or raise in its compiler. Before its first
use ``works`` compares it with plain torch on small tensors, forward and backward. If it raises
or its results differ, one warning names the versions of its packages, and torch's own
operations replace it for the rest of the process. What is compiled for the sizes of a model
may fail there alone: see ``give_up``.

A trial runs in a new thread, so autocast, inference mode, hooks on saved tensors and dispatch
modes of the caller do not affect it. It draws no random numbers.
"""

import contextvars
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis

log = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Largest error of a result relative to its largest element: above bfloat16's rounding, below
any mistake."""


@dataclass(frozen=True, eq=False)
class OptionalKernel:
    """A kernel that torch can replace, and a trial that shows whether it works here."""

    name: str
    """For the warning."""
    packages: tuple[str, ...]
    """Distributions that provide it; the warning names their versions."""
    trial: Callable[..., Iterable[tuple[Tensor, Tensor]]]
    """Called with a device and a kind (dtype, head size, ...): runs the kernel and plain torch
    on small tensors, forward and backward, and returns the results in pairs."""


_Key = tuple[OptionalKernel, torch.device, tuple[Hashable, ...]]
# Why kernels failed, by kernel, device and kind; empty: they work. Tried once in a process.
_FAILURES: dict[_Key, str] = {}


def works(kernel: OptionalKernel, device: torch.device, *kind: Hashable) -> bool:
    """Say whether a kernel may be chosen; no communication.

    The first call for a device and a kind tries it, which may compile for some seconds and
    waits for the device.

    Args:
        kernel: to try.
        device: of the tensors; a GPU without an index is the current one.
        kind: passed to the trial: what else the kernel is compiled for.
    """
    return not kernel_failure(kernel, device, *kind)


def kernel_failure(kernel: OptionalKernel, device: torch.device, *kind: Hashable) -> str:
    """Say why a kernel must not be chosen; empty: it may. See ``works``."""
    key = kernel, _with_index(device), kind
    if key not in _FAILURES:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "it was not tried before a CUDA graph was recorded"
        _FAILURES[key] = "its trial is running"  # so a trial that needs it ends
        _keep(key, try_kernel(kernel, key[1], *kind))
    return _FAILURES[key]


def give_up(
    kernel: OptionalKernel, device: torch.device, *kind: Hashable, error: Exception
) -> None:
    """Do without a kernel that raised where it was used, for the rest of the process.

    Logs the one warning. For kernels whose sizes no trial has, before a graph is recorded.

    Args:
        kernel: that works on small tensors.
        device: where it was tried.
        kind: that it was tried with.
        error: what it raised.
    """
    _keep((kernel, _with_index(device), kind), _described(kernel, error))


def agree_on_kernels(
    wanted: Sequence[tuple[OptionalKernel, tuple[Hashable, ...]]],
    device: torch.device,
    axis: Axis = SINGLE,
) -> None:
    """Try kernels now, and disable on all ranks those that fail on one of them.

    One all-reduce over ``axis``: ranks that share weights should round alike. Without this
    each rank decides for itself, at the first use.

    Args:
        wanted: kernels and kinds, the same on all ranks.
        device: of this rank.
        axis: ranks that must use the same kernels; all of them call it.
    """
    device = _with_index(device)
    failed = [bool(kernel_failure(kernel, device, *kind)) for kernel, kind in wanted]
    counts = all_reduce(torch.tensor(failed, dtype=torch.int32, device=device), axis)
    for (kernel, kind), count in zip(wanted, counts.tolist(), strict=True):
        if count and not _FAILURES[kernel, device, kind]:
            failure = f"it failed on {count} of {axis.size} ranks"
            _FAILURES[kernel, device, kind] = failure
            log.warning("%s is not used, torch does without: %s", kernel.name, failure)


def _keep(key: _Key, failure: str) -> None:
    _FAILURES[key] = failure
    if failure:
        log.warning("%s cannot be used here, torch does without: %s", key[0].name, failure)


def _described(kernel: OptionalKernel, error: Exception) -> str:
    packages = package_versions((*kernel.packages, "torch"))
    versions = ", ".join(f"{name} {found}" for name, found in packages.items())
    return f"{type(error).__name__}: {error} ({versions})"


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed; imports none."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def wave(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of distinct numbers from -1 to 1 for a trial, without a generator."""
    size = torch.Size(shape).numel()
    return torch.arange(size, device=device).mul(0.7).sin().view(shape).to(dtype)


def both_passes(
    function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor
) -> list[Tensor]:
    """Return the outputs of a function, then the gradients of its inputs, for a trial."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    grads = [wave(*y.shape, device=y.device, dtype=y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]


def try_kernel(kernel: OptionalKernel, device: torch.device, *kind: Hashable) -> str:
    """Run the trial in a new thread; return what went wrong, with versions, or nothing.

    For a kernel that nothing replaces: logs nothing and remembers nothing.
    """

    def run() -> None:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for number, (got, want) in enumerate(kernel.trial(device, *kind)):
                _check(number, got.detach().double(), want.detach().double())
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    with ThreadPoolExecutor(max_workers=1) as thread:
        try:
            thread.submit(contextvars.copy_context().run, run).result()
        except Exception as error:  # noqa: BLE001 - whatever a foreign package raises
            return _described(kernel, error)
    return ""


def _check(number: int, got: Tensor, want: Tensor) -> None:
    error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
    if not error <= TOLERANCE:
        raise ArithmeticError(f"result {number} is off by {error:.2g} of its largest element")
