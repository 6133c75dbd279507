"""Triton kernels that plan, copy and sum rows sorted by expert, without sorting anything.

The plan is a counting sort in two passes: each block of choices counts its experts, a running
sum turns the counts into the first rows of each (expert, block), and each block assigns its
choices the rows from there on. The order is that of a stable sort. The host does not wait. The
references are in ``permutation``.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_CHOICES = 128  # choices of one program, which compares all pairs of them
_WIDTH = 1024  # channels of one program


@triton.jit
@no_type_check
def _count_block(
    ids, counts, num_choices, num_experts, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    # counts[e, block]: choices of expert e in this block. Choices without an expert (number E
    # or more) fall into bins that are not stored.
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
    # ends[e, block]: running sum of counts in that order, so the end of the rows of (e, block).
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_choices
    chosen = tl.load(ids + at, mask=inside, other=num_experts).to(tl.int32)
    kept = inside & (chosen < num_experts)
    cell = chosen * num_blocks + block
    lane = tl.arange(0, BLOCK)
    same = (chosen[:, None] == chosen[None, :]) & (lane[:, None] > lane[None, :])
    # Row: earlier choices of the same expert in this block, after the begin of (e, block).
    row = tl.sum(same.to(tl.int32), 1)
    row += tl.load(ends + cell, mask=kept, other=0) - tl.load(counts + cell, mask=kept, other=0)
    if capacity > 0:
        # Rows of expert e begin at e * capacity, not after the choices of the experts before.
        before = kept & (chosen > 0)
        row -= tl.load(ends + chosen * num_blocks - 1, mask=before, other=0)
        row += chosen * capacity
    tl.store(choices + row, at, mask=kept)
    # Dropped choices get the number of rows as slot, which every reader takes for none.
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
        The choice of each row, the row of each choice, and the begin of each expert's rows with
        the end of the last; all int32. There are R = E*capacity rows, or R = T*k, of which the
        last belong to no expert if choices have none. A row without a choice has choice T*k, a
        choice without a row has row R.
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
    # One program: _WIDTH channels of one token, read once and written to each of its rows.
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
    # One program: _WIDTH channels of one token, summed over its rows in the order of choices.
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
        slots: rows of each token; ``num_rows`` or more: no row.
        num_rows: R.
        is_complete: whether every row has a token; else rows without one are zero.
    """
    new = x.new_empty if is_complete else x.new_zeros
    rows = new(num_rows, x.shape[1])
    copy_into_rows(rows, x, slots)
    return rows


def copy_into_rows(
    rows: Float[Tensor, "R D"], x: Float[Tensor, "T D"], slots: Int[Tensor, "T k"]
) -> None:
    """Copy each token to its rows of ``rows``, which is contiguous; slot R or more: no row."""
    if slots.numel() and x.shape[1]:
        _copy_rows[_grid(x)](
            x.contiguous(), slots, rows, rows.shape[0], x.shape[1], slots.shape[1], _WIDTH
        )


def sum_rows(rows: Float[Tensor, "R D"], slots: Int[Tensor, "T k"]) -> Float[Tensor, "T D"]:
    """Sum the rows of each token in float32, in the order of its choices.

    Args:
        rows: R may be 0.
        slots: rows of each token; R or more: no row.
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
