"""Triton kernels that plan, copy and sum rows sorted by expert, without sorting anything.

The plan is a counting sort in two passes: each block of choices counts its experts, a scan
turns the counts into first rows, and each block gives its choices the rows that follow. The
order is that of a stable sort. Nothing waits for the device. The references are in
``permutation``.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_CHOICES = 128  # of one program: it compares each with each
_WIDTH = 1024  # channels of one program


@triton.jit
@no_type_check
def _count_block(
    ids, counts, num_choices, num_experts, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    # counts[e, block]; choices without an expert fall into the bins behind the last.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(ids + at, mask=at < num_choices, other=num_experts).to(tl.int32)
    found = tl.histogram(chosen, BINS)
    bins = tl.arange(0, BINS)
    place = counts + bins * tl.num_programs(0) + tl.program_id(0)
    tl.store(place, found, mask=bins < num_experts)


@triton.jit
@no_type_check
def _place_block(
    ids,
    counts,
    ends,
    choices,
    slots,
    offsets,
    num_choices,
    num_experts,
    num_rows,
    capacity,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    # ends is the running sum of counts, over experts and then over blocks.
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_choices
    chosen = tl.load(ids + at, mask=inside, other=num_experts).to(tl.int32)
    kept = inside & (chosen < num_experts)
    cell = chosen * num_blocks + block
    lane = tl.arange(0, BLOCK)
    same = (chosen[:, None] == chosen[None, :]) & (lane[:, None] > lane[None, :])
    row = tl.sum(same.to(tl.int32), 1)  # earlier choices of the same expert in this block
    row += tl.load(ends + cell, mask=kept, other=0) - tl.load(counts + cell, mask=kept, other=0)
    if capacity > 0:
        before = kept & (chosen > 0)
        row -= tl.load(ends + chosen * num_blocks - 1, mask=before, other=0)
        row += chosen * capacity
    tl.store(choices + row, at, mask=kept)
    tl.store(slots + at, tl.where(kept, row, num_rows), mask=inside)
    if block == 0:
        bins = tl.arange(0, BINS)
        real = bins < num_experts
        end = tl.load(ends + (bins + 1) * num_blocks - 1, mask=real, other=0)
        if capacity > 0:
            end = (bins + 1) * capacity
        tl.store(offsets + bins + 1, end, mask=real)
        tl.store(offsets, 0)


def fused_plan(
    ids: Int[Tensor, "T k"], num_experts: int, capacity: int = 0, *, has_all: bool = False
) -> tuple[Int[Tensor, " R"], Int[Tensor, "T k"], Int[Tensor, " E1"]]:
    """Give each choice a row, rows sorted by expert and then by choice.

    Args:
        ids: chosen experts; E or more: the choice gets no row.
        num_experts: E.
        capacity: rows of every expert, at least as many as chose it; 0: as many as chose it.
        has_all: whether every choice has an expert.

    Returns:
        The choice of each row, int32; T*k in rows without one. There are E*capacity rows, or
        T*k, the last of which belong to no expert where choices have none. Then the row of
        each choice, int32; the number of rows for a choice without. Then where each expert's
        rows begin, int32, with the end of the last.
    """
    num_choices = ids.numel()
    num_blocks = max(1, -(-num_choices // _CHOICES))
    bins = triton.next_power_of_2(num_experts + 1)
    new = {"dtype": torch.int32, "device": ids.device}
    counts = torch.empty(num_experts * num_blocks, **new)
    slots, offsets = torch.empty(ids.shape, **new), torch.empty(num_experts + 1, **new)
    num_rows = num_experts * capacity if capacity else num_choices
    choices = (
        torch.empty(num_rows, **new) if has_all else torch.full((num_rows,), num_choices, **new)
    )
    ids = ids.contiguous()
    grid = (num_blocks,)
    _count_block[grid](ids, counts, num_choices, num_experts, _CHOICES, bins)
    ends = counts.cumsum(0, dtype=torch.int32)
    _place_block[grid](
        ids,
        counts,
        ends,
        choices,
        slots,
        offsets,
        num_choices,
        num_experts,
        num_rows,
        capacity,
        _CHOICES,
        bins,
    )
    return choices, slots, offsets


@triton.jit
@no_type_check
def _copy_rows(x, slots, rows, num_rows, width, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    # One program: a part of one token, read once and written to each of its rows.
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    part = tl.load(x + token * width + column, mask=inside)
    for j in tl.static_range(TOPK):
        row = tl.load(slots + token * TOPK + j).to(tl.int64)
        tl.store(rows + row * width + column, part, mask=inside & (row < num_rows))


@triton.jit
@no_type_check
def _sum_rows(rows, slots, out, num_rows, width, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    # One program: a part of one token, the sum of its rows in the order of its choices.
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOPK):
        row = tl.load(slots + token * TOPK + j).to(tl.int64)
        part = tl.load(rows + row * width + column, mask=inside & (row < num_rows), other=0.0)
        total += part.to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def copy_to_rows(
    x: Float[Tensor, "T D"], slots: Int[Tensor, "T k"], num_rows: int, is_complete: bool
) -> Float[Tensor, "R D"]:
    """Copy each token to its rows, reading it once.

    Args:
        x: tokens.
        slots: rows of each; ``num_rows`` or more: none.
        num_rows: R.
        is_complete: whether every row has a token; rows without one are zero.
    """
    new = x.new_empty if is_complete else x.new_zeros
    rows = new(num_rows, x.shape[1])
    copy_into_rows(rows, x, slots)
    return rows


def copy_into_rows(
    rows: Float[Tensor, "R D"], x: Float[Tensor, "T D"], slots: Int[Tensor, "T k"]
) -> None:
    """Copy each token to its rows of ``rows``, contiguous; R or more: none."""
    if slots.numel() and x.shape[1]:
        _copy_rows[_grid(x)](
            x.contiguous(), slots, rows, rows.shape[0], x.shape[1], slots.shape[1], _WIDTH
        )


def sum_rows(rows: Float[Tensor, "R D"], slots: Int[Tensor, "T k"]) -> Float[Tensor, "T D"]:
    """Sum the rows of each token in float32, in the order of its choices.

    Args:
        rows: may be none.
        slots: rows of each token; R or more: none.
    """
    out = rows.new_empty(slots.shape[0], rows.shape[1])
    if slots.numel() and rows.shape[1]:
        _sum_rows[_grid(out)](
            rows.contiguous(),
            slots,
            out,
            rows.shape[0],
            rows.shape[1],
            slots.shape[1],
            _WIDTH,
        )
    return out


def _grid(x: Tensor) -> tuple[int, int]:
    return x.shape[0], -(-x.shape[1] // _WIDTH)
