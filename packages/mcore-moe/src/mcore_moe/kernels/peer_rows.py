"""Triton kernels that read rows straight from the memory of other GPUs of the node.

A table holds the address at which this process sees each rank's buffer. The plain references
are in ``dispatch.symmetric``.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_WIDTH = 1024  # channels of one program


@triton.jit
@no_type_check
def _pull_rows(
    table,
    sources,
    rows,
    probs,
    probs_offset,
    num_tokens,
    width,
    TOPK: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: a part of one row, from the buffer of the rank that has the token.
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(sources + row).to(tl.int64)
    found = choice >= 0
    choice = tl.maximum(choice, 0)
    token = choice // TOPK
    base = tl.load(table + token // num_tokens)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = tl.multiple_of(base, 16).to(rows.dtype) + (token % num_tokens) * width + column
    tl.store(rows + row * width + column, tl.load(place, mask=inside & found), mask=inside)
    if HAS_PROBS and tl.program_id(1) == 0:
        weight = (base + probs_offset).to(probs.dtype) + choice % (num_tokens * TOPK)
        tl.store(probs + row, tl.load(weight, mask=found, other=0.0))


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
    # One program: a part of one token, the sum of its rows in the order of its choices.
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.full((BLOCK,), 0, TOTAL)
    for j in tl.static_range(TOPK):
        owner = tl.load(owners + token * TOPK + j)
        row = tl.load(places + token * TOPK + j).to(tl.int64)
        found = (owner < num_ranks) & (row >= 0) & (row < num_rows)
        base = tl.load(table + owner, mask=found, other=0)
        place = tl.multiple_of(base, 16).to(out.dtype) + row * width + column
        total += tl.load(place, mask=inside & found, other=0.0).to(TOTAL)
        if HAS_PROBS and tl.program_id(1) == 0:
            weight = (base + probs_offset).to(probs.dtype) + row
            tl.store(probs + token * TOPK + j, tl.load(weight, mask=found, other=0.0))
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def pull_rows(
    table: Int[Tensor, " ranks"],
    sources: Int[Tensor, " R"],
    rows: Float[Tensor, "R D"],
    probs: Float[Tensor, " R"] | None,
    probs_offset: int,
    tokens_and_choices: tuple[int, int],
) -> None:
    """Copy tokens of all ranks to this rank's rows, with the weights of their choices.

    Args:
        table: address of each rank's tokens.
        sources: choice of each row, over the tokens of all ranks; -1: none, the row is zero.
        rows: written.
        probs: written, or None: rows alone.
        probs_offset: bytes from the tokens to their weights.
        tokens_and_choices: of a rank and of a token.
    """
    num_tokens, topk = tokens_and_choices
    width, has_probs = rows.shape[1], probs is not None
    weights = probs if has_probs else rows
    _pull_rows[_grid(rows)](
        table, sources, rows, weights, probs_offset, num_tokens, width, topk, has_probs, _WIDTH
    )


def sum_rows(
    table: Int[Tensor, " ranks"],
    owners: Int[Tensor, "T k"],
    places: Int[Tensor, "T k"],
    out: Float[Tensor, "T D"],
    probs: Float[Tensor, "T k"] | None,
    probs_offset: int,
    num_rows: int,
) -> None:
    """Sum the rows of each token in float32, in the order of its choices.

    Args:
        table: address of each rank's rows.
        owners: rank of each choice; one behind the last: it has no row.
        places: row on that rank; outside of ``num_rows``: none.
        out: written.
        probs: written: what the ranks have for each choice; None: rows alone.
        probs_offset: bytes from the rows to that.
        num_rows: of a rank.
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


def _grid(x: Tensor) -> tuple[int, int]:
    return x.shape[0], -(-x.shape[1] // _WIDTH)
