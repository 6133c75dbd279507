"""quack's grouped GEMMs, which gather their rows and add to main gradients.

Optional (``pip install "mcore-moe[quack]"``, Hopper): layers use these GEMMs if a trial
succeeds, and torch's grouped GEMM otherwise. A GEMM that gathers needs no copy of the tokens in
expert order. The tiles were the fastest on an H200: for narrow experts, whose rows are
gathered, for wide experts, whose rows are sorted, and for weight gradients.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_moe.config import WIDEST_GATHERED
from mcore_parallel.optional_kernels import (
    Sample,
    optional_kernel,
    package_versions,
    wave,
    works,
)


@dataclass(frozen=True, slots=True)
class _Tile:
    m: int
    n: int
    pingpong: bool = False
    cluster: tuple[int, int] = (2, 1)


_PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl")
_NARROWEST_SORTED = 2048
_WIDE, _PINGPONG = _Tile(128, 256), _Tile(128, 192, pingpong=True)
_ACROSS = _Tile(128, 256, cluster=(1, 2))


def multiply(
    x: Float[Tensor, "M K"],
    weight: Float[Tensor, "e K N"],
    offsets: Int[Tensor, " e1"],
    sources: Int[Tensor, " R"] | None = None,
) -> Float[Tensor, "R N"]:
    """Return the products of each expert's rows with its weight.

    Args:
        x: rows sorted by expert; with ``sources`` in any order.
        weight: of all experts, with a stride of 1 in one dimension.
        offsets: first row of each expert, and the end of the last expert's rows; int32.
        sources: row of ``x`` for each row of the result; int32.
    """
    by_order = _ACROSS if sorts_faster(weight) else _PINGPONG
    return multiply_by_tile(x, weight, offsets, sources, by_order if sources is None else _WIDE)


def gathers_faster(weight: Tensor) -> bool:
    """Return whether gathering beats a copy and torch's GEMM: up to 2048 rows of fc1 (H200)."""
    return weight.shape[1] <= WIDEST_GATHERED


def sorts_faster(weight: Tensor) -> bool:
    """Return whether GEMMs of sorted rows beat torch's: both widths 2048 or more (H200)."""
    return min(weight.shape[1:]) >= _NARROWEST_SORTED


def usable(x: Tensor, weight: Tensor) -> bool:
    """Return whether these GEMMs support the tensors; the first call compiles a trial."""
    return multiply_by_tile.takes(x, weight) and works(add_weight_gradient, x.device)


@cache
def fits(device: torch.device) -> bool:
    """Return whether the package is installed and the device is a Hopper GPU."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return is_hopper and bool(package_versions(["quack-kernels"]))


@cache
def _run(tile: _Tile) -> Any:
    with _quietly():
        from quack.gemm_config import GemmConfig  # pyrefly: ignore
        from quack.gemm_interface import gemm_tuned  # pyrefly: ignore

    config = GemmConfig(
        tile_m=tile.m,
        tile_n=tile.n,
        pingpong=tile.pingpong,
        cluster_m=tile.cluster[0],
        cluster_n=tile.cluster[1],
        is_dynamic_persistent=False,
        device_capacity=9,
    )

    def run(*tensors: Tensor, **options: Any) -> None:
        with _quietly():
            gemm_tuned.fn(*tensors, config=config, **options)

    return run


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide warnings of the CuTe compiler about its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


def _multiply_plain(
    x: Float[Tensor, "M K"],
    weight: Float[Tensor, "e K N"],
    offsets: Int[Tensor, " e1"],
    sources: Int[Tensor, " R"] | None,
    tile: _Tile,  # noqa: ARG001 - torch has its own
) -> Float[Tensor, "R N"]:
    rows = x if sources is None else x[sources.long()]
    bounds = pairwise(offsets.tolist())
    return torch.cat([rows[a:b] @ w for (a, b), w in zip(bounds, weight, strict=True)])


def _add_plain(
    out: Float[Tensor, "e N K"],
    grad: Float[Tensor, "M N"],
    x: Float[Tensor, "L K"],
    offsets: Int[Tensor, " e1"],
    *,
    grad_sources: Int[Tensor, " R"] | None = None,
    x_sources: Int[Tensor, " R"] | None = None,
    overwrite: bool,
) -> None:
    grad = grad if grad_sources is None else grad[grad_sources.long()]
    x = x if x_sources is None else x[x_sources.long()]
    for total, (a, b) in zip(out, pairwise(offsets.tolist()), strict=True):
        gradient = grad[a:b].float().t() @ x[a:b].float()
        total.copy_(gradient if overwrite else total + gradient)


def _kind(x: Tensor, weight: Tensor) -> tuple[()] | None:
    is_aligned = all(size % 8 == 0 for size in weight.shape[1:])
    return () if x.dtype == torch.bfloat16 and is_aligned and fits(x.device) else None


def _rows(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the offsets of three experts, one without rows, and tokens of their 16 rows."""
    offsets = torch.tensor([0, 5, 5, 16], dtype=torch.int32, device=device)
    return offsets, torch.arange(16, dtype=torch.int32, device=device) * 5 % 7


def _multiply_samples(device: torch.device) -> Iterator[Sample]:
    offsets, sources = _rows(device)
    tokens, rows = (wave(n, 64, device=device, dtype=torch.bfloat16) for n in (7, 16))
    weight = wave(3, 64, 128, device=device, dtype=torch.bfloat16)
    for matrices in (weight, weight.mT.contiguous().mT):
        for tile in (_PINGPONG, _ACROSS):
            yield Sample(rows, matrices, offsets, None, tile)
        yield Sample(tokens, matrices, offsets, sources, _WIDE)


def _gradient_samples(device: torch.device) -> Iterator[Sample]:
    offsets, sources = _rows(device)
    tokens, rows = (wave(n, 64, device=device, dtype=torch.bfloat16) for n in (7, 16))
    grad = wave(16, 128, device=device, dtype=torch.bfloat16)
    for dtype, overwrite in (
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, True),
    ):
        out = wave(3, 128, 64, device=device, dtype=dtype)
        yield Sample(out, grad, tokens, offsets, x_sources=sources, overwrite=overwrite)
        yield Sample(out, grad[:7], rows, offsets, grad_sources=sources, overwrite=overwrite)
        yield Sample(out, grad, rows, offsets, overwrite=overwrite)


@optional_kernel(
    "grouped GEMMs of quack",
    reference=_multiply_plain,
    kind=_kind,
    samples=_multiply_samples,
    packages=_PACKAGES,
)
def multiply_by_tile(
    x: Float[Tensor, "M K"],
    weight: Float[Tensor, "e K N"],
    offsets: Int[Tensor, " e1"],
    sources: Int[Tensor, " R"] | None,
    tile: _Tile,
) -> Float[Tensor, "R N"]:
    """Return the result of ``multiply``, computed with a given tile."""
    num_rows = x.shape[0] if sources is None else sources.shape[0]
    out = x.new_empty(num_rows, weight.shape[2])
    _run(tile)(x, weight, out, cu_seqlens_m=offsets, A_idx=sources)
    return out


@optional_kernel(
    "grouped weight gradients of quack",
    reference=_add_plain,
    kind=lambda out, x: _kind(x, weight=out),
    samples=_gradient_samples,
    packages=_PACKAGES,
)
def add_weight_gradient(
    out: Float[Tensor, "e N K"],
    grad: Float[Tensor, "M N"],
    x: Float[Tensor, "L K"],
    offsets: Int[Tensor, " e1"],
    *,
    grad_sources: Int[Tensor, " R"] | None = None,
    x_sources: Int[Tensor, " R"] | None = None,
    overwrite: bool,
) -> None:
    """Add ``grad^T x`` of each expert's rows to ``out`` in place.

    Args:
        out: of any dtype.
        grad: gradient of the results of the rows.
        x: the rows.
        offsets: first row of each expert, and the end of the last expert's rows; int32.
        grad_sources: index in ``grad`` of each row, if ``grad`` is gathered.
        x_sources: index in ``x`` of each row, if ``x`` is gathered; not with ``grad_sources``.
        overwrite: replace ``out`` instead of adding.
    """
    a, b = grad, x
    if x_sources is not None:  # quack gathers only its first factor: compute the transpose
        a, b, out = x, grad, out.mT
    sources = grad_sources if x_sources is None else x_sources
    run = _run(_PINGPONG if sources is None else _WIDE)
    run(a.t(), b, out, cu_seqlens_k=offsets, A_idx=sources, add_to_output=not overwrite)
