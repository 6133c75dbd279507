"""Symmetric products by quack's GEMM, which computes the tiles on one side of the diagonal.

Optional (``pip install quack-kernels``, Hopper). Muon's iteration has three products; two are
symmetric, X X^T and b A + c A A, which are two thirds of its operations for a square matrix.
"""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.optional_kernels import Sample, optional_kernel, package_versions, wave

_PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl")
_FEWEST_ROWS = 2048
"""Fewest rows for the kernel: half the tiles of a smaller product take as long as all."""


@cache
def is_available(device: torch.device) -> bool:
    """Return whether the package is installed and the device is a Hopper GPU."""
    is_hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return is_hopper and bool(package_versions(["quack-kernels"]))


def _plain(
    x: Float[Tensor, "*b m k"],
    added: Float[Tensor, "*b m m"] | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Float[Tensor, "*b m m"]:
    if added is None:
        return x @ x.mT if alpha == 1.0 else alpha * (x @ x.mT)
    addmm = torch.addmm if x.dim() == 2 else torch.baddbmm
    return addmm(added, x, x.mT, alpha=alpha, beta=beta)


def _kind(x: Tensor) -> tuple[()] | None:
    rows, columns = x.shape[-2:]
    is_large = rows >= _FEWEST_ROWS and rows % 8 == 0 and columns % 8 == 0
    return () if x.dtype == torch.bfloat16 and is_large and is_available(x.device) else None


def _samples(device: torch.device) -> Iterator[Sample]:
    x = wave(264, 72, device=device, dtype=torch.bfloat16)
    yield Sample(x)
    yield Sample(x.T.contiguous().T)
    gram = _plain(x)
    yield Sample(gram, gram, alpha=0.5, beta=-2.0)
    pair = torch.stack([gram, x[:, :8] @ x[:, :8].T])
    yield Sample(pair, pair, alpha=0.5, beta=-2.0)


@cache
def _gemm() -> Any:
    with warnings.catch_warnings():  # the CuTe compiler warns of its own code
        warnings.simplefilter("ignore")
        from quack.gemm_interface import gemm_symmetric  # pyrefly: ignore
    return gemm_symmetric


@optional_kernel(
    "symmetric GEMM of quack",
    reference=_plain,
    kind=_kind,
    samples=_samples,
    packages=_PACKAGES,
)
def symmetric_product(
    x: Float[Tensor, "*b m k"],
    added: Float[Tensor, "*b m m"] | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Float[Tensor, "*b m m"]:
    """Return the symmetric matrices ``alpha x x^T + beta added``.

    Args:
        x: matrices; the kernel takes bfloat16.
        added: symmetric matrices; None: zeros.
        alpha: factor of the product.
        beta: factor of ``added``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _gemm()(x, x.mT, C=added, alpha=alpha, beta=beta)
