"""Plans, copies and sums of rows sorted by expert: Triton kernels and references.

The kernels' plan is a counting sort in two passes: each block of choices counts its experts, a
running sum turns the counts into the first row of each (expert, block), and each block assigns
consecutive rows from there to its choices. The order is that of a stable sort. The host does
not wait.
"""

from collections.abc import Iterator
from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

_CHOICES = 128  # choices of one program, which compares all pairs of them
_WIDTH = 1024  # channels of one program


@triton.jit
@no_type_check
def _count_block(
    ids, counts, num_choices, num_experts, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    # counts[e, block]: choices of expert e in this block. Choices without an expert (number E
    # or more) fall into bins that are not stored.
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(ids + choice, mask=choice < num_choices, other=num_experts).to(tl.int32)
    histogram = tl.histogram(chosen, BINS)
    bins = tl.arange(0, BINS)
    address = counts + bins * tl.num_programs(0) + tl.program_id(0)
    tl.store(address, histogram, mask=bins < num_experts)


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
    choice = block * BLOCK + tl.arange(0, BLOCK)
    inside = choice < num_choices
    chosen = tl.load(ids + choice, mask=inside, other=num_experts).to(tl.int32)
    kept = inside & (chosen < num_experts)
    cell = chosen * num_blocks + block
    lane = tl.arange(0, BLOCK)
    same = (chosen[:, None] == chosen[None, :]) & (lane[:, None] > lane[None, :])
    # Row: earlier choices of the same expert in this block, after the begin of (e, block).
    row = tl.sum(same.to(tl.int32), 1)
    row += tl.load(ends + cell, mask=kept, other=0) - tl.load(counts + cell, mask=kept, other=0)
    if capacity > 0:
        # Rows of expert e begin at e * capacity, not after the choices of earlier experts.
        before = kept & (chosen > 0)
        row -= tl.load(ends + chosen * num_blocks - 1, mask=before, other=0)
        row += chosen * capacity
    tl.store(choices + row, choice, mask=kept)
    # The slot of a dropped choice is the number of rows, which means "no row".
    tl.store(slots + choice, tl.where(kept, row, num_rows), mask=inside)
    if block == 0:
        bins = tl.arange(0, BINS)
        real = bins < num_experts
        end = tl.load(ends + (bins + 1) * num_blocks - 1, mask=real, other=0)
        if capacity > 0:
            end = (bins + 1) * capacity
        tl.store(offsets + bins + 1, end, mask=real)
        tl.store(offsets, 0)


def expert_offsets(counts: Int[Tensor, " E"]) -> Int[Tensor, " E1"]:
    """Return the first row of each expert and the end of the last expert's rows, int32."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def count_ids(ids: Int[Tensor, " C"], size: int) -> Int[Tensor, " N"]:
    """Return how often each id below ``size`` occurs."""
    return ids.new_zeros(size).scatter_add_(0, ids, torch.ones_like(ids))


def take_rows(
    x: Float[Tensor, "N *D"], index: Int[Tensor, " C"], is_complete: bool
) -> Float[Tensor, "C *D"]:
    """Gather rows of ``x``; unless ``is_complete``, an index one past the end gives 0."""
    if not is_complete:
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return x.index_select(0, index)


def _plan_plain(
    ids: Int[Tensor, "T k"], num_experts: int, capacity: int = 0, *, has_all: bool = False
) -> tuple[Int[Tensor, " R"], Int[Tensor, "T k"], Int[Tensor, " E1"]]:
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = count_ids(flat, num_experts + 1)[:num_experts]
    if capacity:
        return _filled(order, flat, counts, tuple(ids.shape), capacity)
    if not has_all:
        order = order[: int(counts.sum())]  # the host waits for the number of kept choices
    slots = torch.full_like(flat, order.numel())
    slots[order] = torch.arange(order.numel(), device=ids.device)
    return order, slots.view(ids.shape), expert_offsets(counts)


def _filled(
    order: Tensor, flat: Tensor, counts: Tensor, shape: tuple[int, ...], capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Plan rows with exactly ``capacity`` for each expert; dropped choices get no row."""
    num_choices, num_experts = flat.numel(), counts.numel()
    num_rows = num_experts * capacity
    # ``order`` lists the choices by expert, dropped choices (expert number E) last. The index
    # of a choice among its expert's choices is its position in ``order`` minus the expert's
    # start.
    starts = counts.cumsum(0) - counts
    experts = flat[order]
    kept = experts < num_experts
    padded_starts = torch.nn.functional.pad(starts, (0, 1))
    indices = torch.arange(num_choices, device=flat.device) - padded_starts[experts]
    # Dropped choices all write to an extra row at the end, which is cut off below.
    rows = (experts * capacity + indices).where(kept, num_rows)
    choices = torch.full((num_rows + 1,), num_choices, device=flat.device)
    choices[rows] = order
    slots = torch.empty_like(flat)
    slots[order] = rows
    offsets = expert_offsets(torch.full_like(counts, capacity))
    return choices[:num_rows], slots.view(shape), offsets


def _plan_samples(device: torch.device) -> Iterator[Sample]:
    ids = torch.tensor([[2, 0], [0, 3], [2, 3]], device=device)
    yield Sample(ids, 4, has_all=True)
    yield Sample(ids, 3, 2)  # expert number 3 does not exist


@optional_kernel(
    "plans of rows by expert in Triton",
    reference=_plan_plain,
    kind=lambda: (),
    samples=_plan_samples,
)
def plan_choices(
    ids: Int[Tensor, "T k"], num_experts: int, capacity: int = 0, *, has_all: bool = False
) -> tuple[Int[Tensor, " R"], Int[Tensor, "T k"], Int[Tensor, " E1"]]:
    """Return the plan of rows for choices: one row each, sorted by expert, then by choice.

    Args:
        ids: chosen experts; E: the choice gets no row.
        num_experts: E.
        capacity: rows of every expert, not less than its choices; 0: one row for each choice.
        has_all: whether every choice has an expert.

    Returns:
        The choice of each row, the row of each choice, and the first row of each expert with
        the end of the last expert's rows. With a capacity there are R = E*capacity rows.
        Without, the reference has a row for each choice that has an expert; the kernel has
        R = T*k rows, of which the last belong to no expert if choices have none. A row without
        a choice has choice T*k, a choice without a row has row R.
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
    # A token without a row is not loaded: with a fixed number of rows many are padding.
    first_row = num_rows
    for j in tl.static_range(TOPK):
        first_row = tl.minimum(first_row, tl.load(slots + token * TOPK + j))
    part = tl.load(x + token * width + column, mask=inside & (first_row < num_rows))
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


def _copy_plain(
    x: Float[Tensor, "T D"],
    choices: Int[Tensor, " R"],
    slots: Int[Tensor, "T k"],
    is_complete: bool,
) -> Float[Tensor, "R D"]:
    return take_rows(x, choices // slots.shape[1], is_complete)


def _sum_plain(
    rows: Float[Tensor, "R D"], slots: Int[Tensor, "T k"], is_complete: bool = False
) -> Float[Tensor, "T D"]:
    taken = take_rows(rows, slots.reshape(-1), is_complete)
    return taken.view(*slots.shape, rows.shape[1]).sum(1)  # [T*k, D] -> [T, D]


def _put_plain(
    rows: Float[Tensor, "R D"], x: Float[Tensor, "T D"], places: Int[Tensor, " T"]
) -> None:
    # Rows to leave out are written to an extra row at the end.
    padded = torch.cat([rows, rows.new_empty(1, *rows.shape[1:])])
    padded.index_copy_(0, places.clamp(max=len(rows)).long(), x)
    rows.copy_(padded[:-1])


def _kind(rows: Tensor) -> tuple[()] | None:
    return None if rows.dtype == torch.float64 else ()


def _copy_samples(device: torch.device) -> Iterator[Sample]:
    x = wave(3, 40, device=device, dtype=torch.bfloat16)
    plan = _plan_plain(torch.tensor([[2, 0], [0, 3], [2, 3]], device=device), 3)
    yield Sample(x, *plan[:2], False)


def _sum_samples(device: torch.device) -> Iterator[Sample]:
    rows = wave(4, 40, device=device, dtype=torch.bfloat16)
    yield Sample(rows, torch.tensor([[2, 0], [1, 4], [3, 4]], device=device))


def _put_samples(device: torch.device) -> Iterator[Sample]:
    rows, x = (wave(n, 40, device=device, dtype=torch.bfloat16) for n in (4, 5))
    yield Sample(rows, x, torch.tensor([2, 4, 0, 5, 3], device=device))


@optional_kernel(
    "copies of rows by expert in Triton",
    reference=_copy_plain,
    kind=lambda x: None if x.dtype == torch.float64 else (),
    samples=_copy_samples,
)
def copy_to_rows(
    x: Float[Tensor, "T D"],
    choices: Int[Tensor, " R"],
    slots: Int[Tensor, "T k"],
    is_complete: bool,
) -> Float[Tensor, "R D"]:
    """Return rows, each a copy of its token; the kernel reads a token once.

    Args:
        x: tokens.
        choices: choice of each row; each token has k choices. T*k: no choice.
        slots: rows of each token; R: no row.
        is_complete: whether every row has a token; False: rows without a token are zero.
    """
    new = x.new_empty if is_complete else x.new_zeros
    rows = new(choices.numel(), x.shape[1])
    _copy_into(rows, x, slots)
    return rows


@optional_kernel(
    "sums of rows by token in Triton", reference=_sum_plain, kind=_kind, samples=_sum_samples
)
def sum_rows(
    rows: Float[Tensor, "R D"],
    slots: Int[Tensor, "T k"],
    is_complete: bool = False,  # noqa: ARG001 - spares the reference a copy
) -> Float[Tensor, "T D"]:
    """Return each token's sum of rows, in float32 and in the order of its choices.

    Args:
        rows: R may be 0.
        slots: rows of each token; R: no row.
        is_complete: whether every choice has a row.
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


@optional_kernel(
    "rows written by place in Triton", reference=_put_plain, kind=_kind, samples=_put_samples
)
def put_rows(
    rows: Float[Tensor, "R D"], x: Float[Tensor, "T D"], places: Int[Tensor, " T"]
) -> None:
    """Write row i of ``x`` to row ``places[i]`` of ``rows``, if ``places[i]`` is below R.

    No number below R may occur twice in ``places``. Other rows of ``rows`` keep their values.
    """
    _copy_into(rows, x, places.unsqueeze(1))


def _copy_into(rows: Tensor, x: Tensor, slots: Tensor) -> None:
    """Copy tokens to their rows of contiguous ``rows``; slot R or more: no row."""
    if slots.numel() and x.shape[1]:
        _copy_rows[_grid(x)](
            x.contiguous(), slots, rows, rows.shape[0], x.shape[1], slots.shape[1], _WIDTH
        )


def _grid(x: Tensor) -> tuple[int, int]:
    return x.shape[0], -(-x.shape[1] // _WIDTH)
