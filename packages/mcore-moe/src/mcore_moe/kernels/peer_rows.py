"""Triton kernels that read rows from the memory of other GPUs of the node.

A table holds the address of each rank's buffer in this process's address space. The references
in plain torch are in ``dispatch.symmetric.Gathered``.
"""

from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.optional_kernels import tl, triton

_WIDTH = 1024  # channels of one program
_PROGRAMS = 2048  # programs of kernels that loop: 16 on each multiprocessor of an H200
_LANES = 64  # far apart ranges of rows that are read at the same time


@triton.jit
@no_type_check
def _pull_rows(
    table,
    sources,
    offsets,
    num_experts,
    rows,
    probs,
    probs_offset,
    num_tokens,
    width,
    TOPK: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Rows are sorted by expert, then by source rank: in that order all ranks would read from
    # one rank at a time, at the speed of its links. So the rows are divided into LANES ranges
    # of per_lane rows, and consecutive work items read rows of consecutive ranges.
    num_rows = tl.load(offsets + num_experts)
    per_lane, num_parts = (num_rows + LANES - 1) // LANES, (width + BLOCK - 1) // BLOCK
    for work in range(tl.program_id(0), LANES * per_lane * num_parts, tl.num_programs(0)):
        item, part = work // num_parts, work % num_parts
        row = (item % LANES * per_lane + item // LANES).to(tl.int64)
        column = part * BLOCK + tl.arange(0, BLOCK)
        is_row = row < num_rows
        inside = is_row & (column < width)
        # Choices are numbered over all ranks: token // num_tokens is the rank of the token.
        choice = tl.load(sources + row, mask=is_row, other=0).to(tl.int64)
        token = choice // TOPK
        base = tl.load(table + token // num_tokens)
        source = tl.multiple_of(base, 16).to(rows.dtype) + (token % num_tokens) * width + column
        tl.store(rows + row * width + column, tl.load(source, mask=inside), mask=inside)
        if HAS_PROBS:  # one weight a row, by the program of its first channels
            weight = (base + probs_offset).to(probs.dtype) + choice % (num_tokens * TOPK)
            is_first = is_row & (part == 0)
            tl.store(probs + row, tl.load(weight, mask=is_first), mask=is_first)


@triton.jit
@no_type_check
def _sum_rows(
    table,
    owners,
    places,
    out,
    probs,
    probs_offset,
    num_ranks,
    num_rows,
    width,
    TOPK: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: BLOCK channels of one token, summed over its rows in the order of choices.
    num_parts = (width + BLOCK - 1) // BLOCK
    token, part = (tl.program_id(0) // num_parts).to(tl.int64), tl.program_id(0) % num_parts
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.full((BLOCK,), 0, TOTAL)
    for j in tl.static_range(TOPK):
        owner = tl.load(owners + token * TOPK + j)
        row = tl.load(places + token * TOPK + j).to(tl.int64)
        # A choice without an expert, or a row outside of this part, adds zero.
        has_row = (owner < num_ranks) & (row >= 0) & (row < num_rows)
        base = tl.load(table + owner, mask=has_row, other=0)
        source = tl.multiple_of(base, 16).to(out.dtype) + row * width + column
        total += tl.load(source, mask=inside & has_row, other=0.0).to(TOTAL)
        if HAS_PROBS and part == 0:
            weight = (base + probs_offset).to(probs.dtype) + row
            tl.store(probs + token * TOPK + j, tl.load(weight, mask=has_row, other=0.0))
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _lay_rows(x, out, offsets, num_experts, width, BLOCK: tl.constexpr):
    # Copies the first offsets[-1] rows as one range of numbers.
    size = tl.load(offsets + num_experts).to(tl.int64) * width
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for begin in range(first, size, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK)
        tl.store(out + index, tl.load(x + index, mask=index < size), mask=index < size)


def pull_rows(
    table: Int[Tensor, " ranks"],
    sources: Int[Tensor, " R"],
    offsets: Int[Tensor, " e1"],
    rows: Float[Tensor, "R D"],
    probs: Float[Tensor, " R"] | None,
    probs_offset: int,
    tokens_and_choices: tuple[int, int],
) -> None:
    """Copy tokens of all ranks to this rank's rows, with the weights of their choices.

    Args:
        table: address of each rank's tokens.
        sources: choice of each row, over the tokens of all ranks.
        offsets: first row of each expert, and the end of the last expert's rows.
        rows: output; rows after that end are not written.
        probs: output: weight of each row; None: no weights.
        probs_offset: bytes from a rank's tokens to their weights.
        tokens_and_choices: tokens of a rank, and choices of a token.
    """
    if not rows.numel():
        return
    num_tokens, topk = tokens_and_choices
    width, has_probs = rows.shape[1], probs is not None
    _pull_rows[_loops(rows)](
        table,
        sources,
        offsets,
        offsets.numel() - 1,
        rows,
        probs if has_probs else rows,
        probs_offset,
        num_tokens,
        width,
        topk,
        has_probs,
        _LANES,
        _WIDTH,
    )


def lay_rows(
    out: Float[Tensor, "R D"], x: Float[Tensor, "R D"], offsets: Int[Tensor, " e1"]
) -> None:
    """Copy the rows of experts to ``out``; later rows are not copied.

    Args:
        out: output.
        x: the rows.
        offsets: first row of each expert, and the end of the last expert's rows.
    """
    if x.numel():
        _lay_rows[_loops(x)](x, out, offsets, offsets.numel() - 1, x.shape[1], _WIDTH)


def sum_rows(
    table: Int[Tensor, " ranks"],
    owners: Int[Tensor, "T k"],
    places: Int[Tensor, "T k"],
    out: Float[Tensor, "T D"],
    probs: Float[Tensor, "T k"] | None,
    probs_offset: int,
    num_rows: int,
) -> None:
    """Write each token's sum of rows to ``out``, added in float32 in the order of choices.

    Args:
        table: address of each rank's rows.
        owners: rank of each choice; the number of ranks: the choice has no row.
        places: row on that rank; outside of [0, ``num_rows``): no row.
        out: output.
        probs: output: the weight of each choice's row on its rank; None: no weights.
        probs_offset: bytes from a rank's rows to their weights.
        num_rows: rows of a rank.
    """
    if not out.shape[0]:
        return
    total = tl.float64 if out.dtype == torch.float64 else tl.float32
    has_probs = probs is not None
    _sum_rows[_grid(out)](
        table,
        owners,
        places,
        out,
        probs if has_probs else out,
        probs_offset,
        table.numel(),
        num_rows,
        out.shape[1],
        owners.shape[1],
        has_probs,
        total,
        _WIDTH,
    )


def _grid(x: Tensor) -> tuple[int]:
    return (x.shape[0] * -(-x.shape[1] // _WIDTH),)


def _loops(x: Tensor) -> tuple[int]:
    return (min(_PROGRAMS, *_grid(x)),)
