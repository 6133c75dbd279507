"""Triton kernel that rounds new keys and values to an fp8 cache and writes them to pages.

In plain torch a layer clamps, casts and scatters keys, then values, and a prompt that starts
reads both back from the pages and decodes them: ten launches. The kernel reads each new number
once, and writes its code to the page and the rounded number, to which the prompt attends.
"""

from collections.abc import Iterator
from typing import no_type_check

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mcore_infer.engine.fp8_cache import from_codes, to_codes
from mcore_infer.engine.plain_attention import write_to_pages
from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave


@triton.jit
@no_type_check
def _round_row(
    new, pages, rounded, row, place, stride, scale, D: tl.constexpr, LANES: tl.constexpr
):
    # All heads of one token: codes to its row of the pages, rounded numbers to ``rounded``.
    lane = tl.arange(0, LANES)
    inside = lane < D
    wide = tl.load(new + row * stride + lane, mask=inside, other=0.0).to(tl.float32)
    wide = tl.div_rn(wide, scale)
    # NaN stays NaN, as in torch: by default minimum and maximum return the other number.
    wide = tl.maximum(wide, -448.0, propagate_nan=tl.PropagateNan.ALL)
    wide = tl.minimum(wide, 448.0, propagate_nan=tl.PropagateNan.ALL)
    code = wide.to(tl.float8e4nv)
    tl.store(pages + place * D + lane, code.to(tl.uint8, bitcast=True), mask=inside)
    number = (code.to(tl.float32) * scale).to(rounded.dtype.element_ty)
    tl.store(rounded + row * D + lane, number, mask=inside)


@triton.jit
@no_type_check
def _round(
    k, v, keys, values, places, rounded_k, rounded_v, k_stride, v_stride, k_scale, v_scale,
    K: tl.constexpr, V: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    # One program: key and value of one token.
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    _round_row(k, keys, rounded_k, row, place, k_stride, k_scale, K, LANES)
    _round_row(v, values, rounded_v, row, place, v_stride, v_scale, V, LANES)


def _round_plain(
    k: Float[Tensor, "T G H"],
    v: Float[Tensor, "T G J"],
    keys: UInt8[Tensor, "P Z G H"],
    values: UInt8[Tensor, "P Z G J"],
    places: Int[Tensor, " T"],
    key_scale: float,
    value_scale: float,
) -> tuple[Float[Tensor, "T G H"], Float[Tensor, "T G J"]]:
    codes = to_codes(k, key_scale), to_codes(v, value_scale)
    write_to_pages((keys, values), codes, places)
    return from_codes(codes[0], key_scale, k.dtype), from_codes(codes[1], value_scale, v.dtype)


def _kind(k: Tensor, v: Tensor) -> tuple[torch.dtype, int, int] | None:
    sizes = k.shape[1:].numel(), v.shape[1:].numel()
    return None if k.dtype == torch.float64 else (k.dtype, *sizes)


def _samples(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    key_size: int = 12,
    value_size: int = 8,
) -> Iterator[Sample]:
    places = torch.tensor([5, 0, 2], device=device)
    # Powers of two, by which torch divides exactly: it multiplies by a rounded reciprocal.
    for scales in ((1.0, 1.0), (0.25, 2.0**-9)):
        news = [wave(3, 1, n, device=device, dtype=dtype) for n in (key_size, value_size)]
        news[1][2, 0, :2] = torch.tensor([1e3, -1e3], device=device)  # beyond 448
        pages = [x.new_zeros(2, 4, *x.shape[1:], dtype=torch.uint8) for x in news]
        yield Sample(*news, *pages, places, *scales)


@optional_kernel(
    "rounding of new keys and values to fp8",
    reference=_round_plain,
    kind=_kind,
    samples=_samples,
)
def round_to_pages(
    k: Float[Tensor, "T G H"],
    v: Float[Tensor, "T G J"],
    keys: UInt8[Tensor, "P Z G H"],
    values: UInt8[Tensor, "P Z G J"],
    places: Int[Tensor, " T"],
    key_scale: float,
    value_scale: float,
) -> tuple[Float[Tensor, "T G H"], Float[Tensor, "T G J"]]:
    """Write new keys and values to pages as bytes of e4m3; return the rounded numbers.

    Args:
        k: new keys.
        v: new values.
        keys: cached keys, contiguous; changed in place.
        values: cached values, contiguous; changed in place.
        places: row of each token in the cache: page * Z + offset.
        key_scale: factor on the codes of keys.
        value_scale: factor on the codes of values.
    """
    rows_k, rows_v = k.flatten(1), v.flatten(1)  # a view if the heads of a token are contiguous
    rounded_k, rounded_v = k.new_empty(k.shape), v.new_empty(v.shape)
    widths = rows_k.shape[1], rows_v.shape[1]
    _round[(len(places),)](
        rows_k,
        rows_v,
        keys,
        values,
        places,
        rounded_k,
        rounded_v,
        rows_k.stride(0),
        rows_v.stride(0),
        key_scale,
        value_scale,
        *widths,
        triton.next_power_of_2(max(widths)),
        num_warps=4,
    )
    return rounded_k, rounded_v
