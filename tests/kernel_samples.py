"""All optional kernels of the repository, and the comparison of each with its reference."""

from importlib import import_module

import torch
from house.sources import all_sources

from mcore_parallel.optional_kernels import KernelFunction, compared


def all_kernels():
    """Return the decorated functions of all packages by "module:name"."""
    kernels = {}
    for source in all_sources():
        if "\n@optional_kernel(" in source.text:
            module = import_module(source.name.removesuffix(".py").replace("/", "."))
            for name, value in vars(module).items():
                if isinstance(value, KernelFunction) and value.__module__ == module.__name__:
                    kernels[f"{module.__name__}:{name}"] = value
    return kernels


def check(kernel, samples, *, rtol=1e-5, atol=2e-5, share=0.0):
    """Raise unless a kernel's results and gradients of samples are the reference's.

    Results are compared relative to the largest element of each; of fp8 numbers the share that
    differs is.
    """
    count = 0
    for sample in samples:
        for got, want in compared(kernel, sample):
            assert got.shape == want.shape
            if not want.is_floating_point():
                torch.testing.assert_close(got.long(), want.long(), rtol=0, atol=0)
                continue
            is_fp8 = want.dtype.itemsize == 1
            got, want = got.float(), want.float()  # noqa: PLW2901
            if is_fp8:
                differs = (got != want) & ~(got.isnan() & want.isnan())
                assert not differs.numel() or differs.float().mean() <= share, kernel.name
                continue
            finite = want[want.isfinite()]
            scale = finite.abs().max().clamp(min=1) if finite.numel() else 1.0
            tolerance = {"rtol": rtol, "atol": atol, "equal_nan": True}
            torch.testing.assert_close(got / scale, want / scale, **tolerance)
        count += 1
    assert count, f"{kernel.name} has no samples"
