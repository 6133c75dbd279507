"""``@optional_kernel``: a kernel with its plain reference, and the choice between the two.

A kernel may be missing, be built for another GPU, or raise in its compiler. A decorated
function is called like its reference and has the reference's results:

    @optional_kernel("AdamW in Triton", reference=adamw_plain, kind=_kind, samples=_samples)
    def adamw(main, grad, ...): ...  # launches the kernel

A call on a GPU launches the kernel if ``kind`` accepts the arguments. The first such call for
a device and a kind is preceded by a trial: the kernel and its reference run on ``samples``,
forward and backward. If the kernel raises or its results differ, one warning names the versions
of its packages, and the reference replaces the kernel for the rest of the process. ``give_up``
replaces a kernel that passes its trial but fails for the sizes of a model. On a CPU, and in
code that ``torch.compile`` traces and fuses itself, the reference runs. Tests compare kernels
and references on the same samples and on more, in Triton's interpreter and on a GPU.

A trial runs in a new thread, so autocast, inference mode, hooks on saved tensors and dispatch
modes of the caller do not affect it. It draws no random numbers.
"""

import contextvars
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import update_wrapper
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis


class _TritonIsMissing:
    """Replaces ``triton`` and ``triton.language`` if they cannot be imported.

    Modules can still declare kernels; the trial of a kernel raises the import's error.
    """

    def __init__(self, error: ImportError) -> None:
        self._error = error

    def jit(self, _function: Any = None, **_options: Any) -> Any:
        return self if _function is not None else self.jit

    def constexpr(self, value: Any) -> Any:
        return value

    def __getitem__(self, _grid: Any) -> Any:
        raise self._error

    def __getattr__(self, name: str) -> Any:
        raise self._error


try:
    import triton
    import triton.language as tl
except ImportError as _error:  # torch for CPUs, and macOS
    triton = tl = _TritonIsMissing(_error)

log = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Largest error of a result relative to its largest element: more than bfloat16's rounding,
less than the effect of a bug. For fp8, whose neighbouring numbers differ by 7 to 14 %, the
share of elements that differ."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False)
class OptionalKernel:
    """A kernel with a fallback in plain torch, and a trial that compares the two."""

    name: str
    """Name in warnings."""
    packages: tuple[str, ...]
    """Distributions that provide the kernel; warnings name their versions."""
    trial: Callable[..., Iterable[tuple[Tensor, Tensor]]]
    """Called with a device and a kind (dtype, head size, ...): runs the kernel and plain torch
    on small tensors, forward and backward, and returns the results in pairs."""


class Sample:
    """Arguments of one call; gradients of those that require one are compared too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


class KernelFunction(OptionalKernel, Generic[P, R]):
    """A kernel and its reference behind one call; see ``optional_kernel``.

    Attributes:
        launch: runs the kernel unconditionally.
        reference: computes the same results in plain torch.
        kind: maps arguments of a call to the key under which the kernel is compiled (dtype,
            head size, ...); None: the kernel does not support these arguments. Its parameter
            names select the arguments.
        samples: maps a device and a kind to small calls; without a kind, to calls that
            Triton's interpreter computes exactly.
    """

    def __init__(
        self,
        name: str,
        packages: tuple[str, ...],
        launch: Callable[P, R],
        reference: Callable[P, R],
        kind: Callable[..., tuple[Hashable, ...] | None],
        samples: Callable[..., Iterable[Sample]],
    ) -> None:
        super().__init__(name, packages, self._trial)
        self.launch, self.reference, self.kind, self.samples = launch, reference, kind, samples
        parameters = signature(launch).parameters
        read = signature(kind).parameters
        if unknown := sorted(read.keys() - parameters.keys()):
            raise TypeError(
                f"{name}: kind reads {', '.join(unknown)}, which is no parameter of the "
                f"kernel. Use the names of its parameters: {', '.join(parameters)}."
            )
        positions = list(parameters)
        self._reads = [(positions.index(n), n, parameters[n].default) for n in read]
        update_wrapper(self, launch)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Launch the kernel if it supports these arguments, else run the reference."""
        if self.takes(*args, **kwargs):
            return self.launch(*args, **kwargs)
        return self.reference(*args, **kwargs)

    def takes(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether a call with these arguments launches the kernel; may run the trial.

        Args:
            *args: positional arguments of the call, at least those that ``kind`` reads; the
                first is a tensor.
            **kwargs: keyword arguments of the call.
        """
        device = args[0].device
        if torch.compiler.is_compiling() or device.type != "cuda":
            return False
        kind = self.kind_of(*args, **kwargs)
        if kind is None:
            return False
        failure = _FAILURES.get((self, device, kind))  # known after the first call
        return works(self, device, *kind) if failure is None else not failure

    def kind_of(self, *args: Any, **kwargs: Any) -> tuple[Hashable, ...] | None:
        """Return the kind of a call, whose arguments may be given by position or by name."""
        # Not Signature.bind: this precedes every launch, and bind takes several microseconds.
        num = len(args)
        values = [
            args[position] if position < num else kwargs.get(name, default)
            for position, name, default in self._reads
        ]
        return self.kind(*values)

    def _trial(self, device: torch.device, *kind: Hashable) -> Iterable[tuple[Tensor, Tensor]]:
        for sample in self.samples(device, *kind):
            yield from compared(self, sample)


def optional_kernel(
    name: str,
    *,
    reference: Callable[P, R],
    kind: Callable[..., tuple[Hashable, ...] | None],
    samples: Callable[..., Iterable[Sample]],
    packages: tuple[str, ...] = ("triton",),
) -> Callable[[Callable[P, R]], KernelFunction[P, R]]:
    """Return a decorator that makes a ``KernelFunction`` of a function that launches a kernel.

    Args:
        name: name in warnings.
        reference: computes the same results in plain torch.
        kind: maps arguments of a call on a GPU to the key under which the kernel is compiled
            (dtype, head size, ...); None: the reference runs. Its parameter names select the
            arguments.
        samples: maps a device and a kind to small calls for the trial. The parameters of the
            kind have defaults, with which the tests run the samples in Triton's interpreter.
        packages: distributions that provide the kernel; warnings name their versions.
    """

    def decorate(launch: Callable[P, R]) -> KernelFunction[P, R]:
        return KernelFunction(name, packages, launch, reference, kind, samples)

    return decorate


def compared(kernel: KernelFunction[..., Any], sample: Sample) -> list[tuple[Tensor, Tensor]]:
    """Run a sample by a kernel and by its reference; return (kernel, reference) results.

    Results are the outputs, the tensor arguments (which may be changed in place), and the
    gradients of arguments that require one.
    """
    results = []
    for function in (kernel.launch, kernel.reference):
        copies: dict[int, Any] = {}  # by identity: two arguments may be one tensor
        args = [_copy(x, copies) for x in sample.args]
        kwargs = {name: _copy(x, copies) for name, x in sample.kwargs.items()}
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        outputs = function(*args, **kwargs)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs or ())
        leaves = [x for x in inputs if x.requires_grad]
        grads = _gradients(outputs, leaves) if leaves else ()
        written = [x for x in inputs if not x.requires_grad]
        results.append([*outputs, *written, *grads])
    return list(zip(*results, strict=True))


def _copy(x: Any, copies: dict[int, Any]) -> Any:
    if not isinstance(x, Tensor):
        return x
    if id(x) not in copies:
        # A leaf is never changed in place, so it shares memory and keeps its strides.
        copies[id(x)] = x.detach().requires_grad_() if x.requires_grad else x.clone()
    return copies[id(x)]


_Key = tuple[OptionalKernel, torch.device, tuple[Hashable, ...]]
# The failure of each tried kernel, device and kind; empty: it works. Tried once per process.
_FAILURES: dict[_Key, str] = {}


def works(kernel: OptionalKernel, device: torch.device, *kind: Hashable) -> bool:
    """Return whether a kernel works on a device; no communication.

    The first call for a device and a kind runs the trial, which may compile for some seconds
    and synchronises.

    Args:
        kernel: the kernel.
        device: device of the tensors; ``cuda`` without an index is the current GPU.
        kind: passed to the trial.
    """
    return not kernel_failure(kernel, device, *kind)


def kernel_failure(kernel: OptionalKernel, device: torch.device, *kind: Hashable) -> str:
    """Return why a kernel does not work; empty: it works. Runs the trial as ``works`` does."""
    key = kernel, _with_index(device), kind
    if key not in _FAILURES:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "it was not tried before a CUDA graph was recorded"
        # A trial that calls the same kernel falls back to the reference, without recursion.
        _FAILURES[key] = "its trial is running"
        _record(key, try_kernel(kernel, key[1], *kind))
    return _FAILURES[key]


def give_up(
    kernel: OptionalKernel, device: torch.device, *kind: Hashable, error: Exception
) -> None:
    """Replace a kernel by its reference for the rest of the process, and log a warning.

    For a kernel that passed its trial but raised with the sizes of the model.

    Args:
        kernel: the kernel.
        device: device of the tensors.
        kind: kind of the failed call.
        error: exception that the kernel raised.
    """
    _record((kernel, _with_index(device), kind), _describe(kernel, error))


def agree_on_kernels(
    wanted: Sequence[tuple[OptionalKernel, tuple[Hashable, ...]]],
    device: torch.device,
    axis: Axis = SINGLE,
) -> None:
    """Run the trials of kernels, and disable on all ranks a kernel that fails on any rank.

    One all-reduce over ``axis``. Without this call each rank decides alone at the first use,
    and ranks that share weights may round differently.

    Args:
        wanted: kernels and kinds, equal on all ranks.
        device: device of this rank.
        axis: ranks that must use the same kernels; all of them must call this function.
    """
    device = _with_index(device)
    failed, trials = [], []
    for kernel, kind in wanted:
        began_s = time.perf_counter()
        failed.append(bool(kernel_failure(kernel, device, *kind)))
        trials.append((time.perf_counter() - began_s, kernel.name))
    if trials:
        total_s = sum(took_s for took_s, _ in trials)
        longest = ", ".join(f"{name} {took_s:.1f} s" for took_s, name in sorted(trials)[:-4:-1])
        log.info("tried %d kernels in %.1f s; longest: %s", len(trials), total_s, longest)
    counts = all_reduce(torch.tensor(failed, dtype=torch.int32, device=device), axis)
    for (kernel, kind), count in zip(wanted, counts.tolist(), strict=True):
        if count and not _FAILURES[kernel, device, kind]:
            failure = f"it failed on {count} of {axis.size} ranks"
            _FAILURES[kernel, device, kind] = failure
            log.warning("%s is not used, plain torch replaces it: %s", kernel.name, failure)


def _record(key: _Key, failure: str) -> None:
    _FAILURES[key] = failure
    if failure:
        log.warning("%s cannot be used here, plain torch replaces it: %s", key[0].name, failure)


def _describe(kernel: OptionalKernel, error: Exception) -> str:
    packages = package_versions((*kernel.packages, "torch"))
    versions = ", ".join(f"{name} {number}" for name, number in packages.items())
    return f"{type(error).__name__}: {error} ({versions})"


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of the distributions that are installed; imports nothing."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def wave(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of distinct numbers in [-1, 1] for a trial, without random numbers."""
    size = torch.Size(shape).numel()
    return torch.arange(size, device=device).mul(0.7).sin().view(shape).to(dtype)


def sine_leaf(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a ``wave`` that requires a gradient, for samples that compare gradients."""
    return wave(*shape, device=device, dtype=dtype).requires_grad_()


def both_passes(
    function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor
) -> list[Tensor]:
    """Return the outputs of a function, then the gradients of its inputs, for a trial."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    return [*outputs, *_gradients(outputs, leaves)]


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of the leaves if the gradients of the outputs are waves.

    The waves are factors of a scalar sum. Given to autograd as gradients, they would make it
    import sympy to compare shapes, which takes 2 s when a run starts.
    """
    roots = [y for y in outputs if y.requires_grad]
    products = [(y * wave(*y.shape, device=y.device, dtype=y.dtype)).sum() for y in roots]
    total = torch.stack([x.to(products[0].dtype) for x in products]).sum()
    return torch.autograd.grad(total, leaves, materialize_grads=True)


def try_kernel(kernel: OptionalKernel, device: torch.device, *kind: Hashable) -> str:
    """Run a kernel's trial in a new thread; return its failure with package versions, or ''.

    Unlike ``works``, logs nothing and caches nothing.
    """

    def run() -> None:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for number, (got, want) in enumerate(kernel.trial(device, *kind)):
                error = largest_error(got, want)
                if not error <= TOLERANCE:
                    raise ArithmeticError(
                        f"result {number} is off by {error:.2g} of its largest element"
                    )
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    with ThreadPoolExecutor(max_workers=1) as thread:
        try:
            thread.submit(contextvars.copy_context().run, run).result()
        except Exception as error:  # noqa: BLE001 - other packages may raise any exception
            return _describe(kernel, error)
    return ""


def largest_error(got: Tensor, want: Tensor) -> float:
    """Return the largest error relative to the largest expected element.

    For integers 1.0 if any element differs; for fp8 the share of elements that differ.
    """
    if got.shape != want.shape:
        return float("nan")
    if not want.numel():
        return 0.0
    got, want = got.detach(), want.detach()
    if not want.is_floating_point():
        return float((got != want).any())
    if want.dtype.itemsize == 1:
        return float((got.float() != want.float()).float().mean())
    got, want = got.double(), want.double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
