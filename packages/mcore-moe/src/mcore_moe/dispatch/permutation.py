"""Permutation of tokens into expert order and back: index arithmetic with exact gradients.

A *row* is a copy of a token for one of its experts; rows are sorted by expert, then by token.
The plan holds both directions (the token of each row, the row of each choice), so forward and
backward of ``permute`` and ``unpermute`` are copies and a sum over k in fixed order: no atomic
addition, the same bits in every run. Without dropping, the number of rows is T*k, which the
host computes without waiting. On a GPU the plan is a counting sort, and each copy or sum one
kernel (``kernels.rows``).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mcore_moe.kernels.rows import (
    copy_to_rows,
    count_ids,
    plan_choices,
    sum_rows,
    take_rows,
)
from mcore_parallel.autograd.functions import OnceDifferentiable


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows of chosen experts, and the maps between rows and choices.

    Choice t*k + j is token t's j-th expert.
    """

    choices: Int[Tensor, " R"]
    """Choice of each row; T*k for a padding row."""
    slots: Int[Tensor, "T k"]
    """Row of each choice; R for a choice that was dropped."""
    offsets: Int[Tensor, " E1"]
    """First row of each expert, and the end of the last expert's rows; int32. Rows after the
    end belong to no expert."""
    is_complete: bool
    """Whether every choice has a row and every row a choice: none dropped, none padded."""
    is_dense: bool = False
    """Whether every row has a token; rows after the last offset have an arbitrary token."""
    is_in_order: bool = False
    """Whether row r is token r and tokens have one choice, so ``permute`` copies nothing."""

    @property
    def counts(self) -> Int[Tensor, " E"]:
        """Rows of each expert."""
        return self.offsets.diff()

    @property
    def sources(self) -> Int[Tensor, " R"]:
        """Token of each row; T for a padding row."""
        topk = self.slots.shape[1]
        return self.choices if topk == 1 else self.choices // topk


def plan_rows(
    ids: Int[Tensor, "T k"],
    num_experts: int,
    keep: Bool[Tensor, "T k"] | None = None,
    capacity: int = 0,
) -> RowPlan:
    """Plan the rows of chosen experts, sorted by expert, then by token.

    Args:
        ids: chosen experts; the experts of a token differ.
        num_experts: E.
        keep: choices that get a row; None: all. On a GPU the plan always has T*k rows, so that
            the host does not wait: the last rows are zero and belong to no expert.
        capacity: rows of every expert, padded if fewer tokens chose the expert; 0: one row for
            each choice. ``keep`` must not leave an expert more than these.
    """
    if keep is not None:
        ids = ids.where(keep, num_experts)  # sorted after all experts
    has_all = keep is None and not capacity
    choices, slots, offsets = plan_choices(ids, num_experts, capacity, has_all=has_all)
    # Padding rows exist with a capacity, and in the kernels' plan if ``keep`` drops choices.
    is_dense = has_all or (not capacity and choices.numel() < ids.numel())
    return RowPlan(choices, slots, offsets, has_all, is_dense)


def trimmed(plan: RowPlan, num_rows: int) -> RowPlan:
    """Return the plan of the first ``num_rows`` rows; all others must belong to no expert."""
    if num_rows == plan.choices.numel():
        return plan
    # The slot of a dropped choice is the number of rows, which changes.
    slots = plan.slots.clamp(max=num_rows)
    return RowPlan(plan.choices[:num_rows], slots, plan.offsets, False, True)


def plan_slice(plan: RowPlan, begin: int, size: int) -> RowPlan:
    """Return the plan of ``size`` rows from ``begin`` on.

    The host does not wait. Rows after the last offset have an arbitrary token.
    """
    end, num_rows = begin + size, plan.choices.numel()
    choices = plan.choices[begin:end].clamp(max=max(0, plan.slots.numel() - 1))
    if begin == 0 and size == num_rows:
        return RowPlan(choices, plan.slots, plan.offsets, False, True)
    choices = torch.nn.functional.pad(choices, (0, size - choices.numel()))
    # Choices whose row is outside of the slice get the slot of a dropped choice, ``size``; each
    # expert keeps the overlap of its rows with the slice.
    slots = plan.slots - begin
    slots = slots.where((slots >= 0) & (slots < min(size, num_rows - begin)), size)
    offsets = plan.offsets.clamp(begin, end) - begin
    return RowPlan(choices, slots, offsets, False, True)


def within_capacity(
    ids: Int[Tensor, "T k"],
    probs: Float[Tensor, "T k"],
    num_experts: int,
    capacity: int,
    policy: str = "probs",
) -> Bool[Tensor, "T k"]:
    """Return a mask of the choices that remain if every expert takes ``capacity`` tokens.

    Args:
        ids: chosen experts; ``num_experts``: no expert, for which the result is undefined.
        probs: weights of the choices.
        num_experts: E.
        capacity: largest number of tokens of an expert.
        policy: ``probs`` keeps the largest weights (of equal weights the earlier token),
            ``position`` the earliest tokens.
    """
    flat = ids.reshape(-1)
    if policy == "probs":
        # Two stable sorts give the order by expert, and within an expert by weight.
        by_prob = probs.reshape(-1).argsort(descending=True, stable=True)
        order = by_prob[flat[by_prob].argsort(stable=True)]
    else:
        order = flat.argsort(stable=True)
    counts = count_ids(flat, num_experts + 1)
    starts = counts.cumsum(0) - counts
    # Position of each choice among the choices of its expert.
    positions = torch.arange(flat.numel(), device=ids.device) - starts[flat[order]]
    keep = torch.empty_like(flat, dtype=torch.bool)
    keep[order] = positions < capacity
    return keep.view(ids.shape)


def permute(x: Float[Tensor, "T D"], plan: RowPlan) -> Float[Tensor, "R D"]:
    """Return rows, each a copy of its token; padding rows are zero."""
    if plan.is_in_order:
        return x
    return _Permute.apply(x, plan.choices, plan.slots, plan.is_complete)


def permute_probs(probs: Float[Tensor, "T k"], plan: RowPlan) -> Float[Tensor, " R"]:
    """Return the weight of each row's choice; padding rows get 0."""
    if plan.is_in_order:
        return probs[:, 0]
    every = (plan.is_complete or plan.is_dense, plan.is_complete)
    return _PermuteProbs.apply(probs, plan.choices, plan.slots, every)


def unpermute(rows: Float[Tensor, "R D"], plan: RowPlan) -> Float[Tensor, "T D"]:
    """Return each token's sum of rows, in the order of its choices, without dropped choices."""
    if plan.is_in_order:
        return rows
    return _Unpermute.apply(rows, plan.choices, plan.slots, plan.is_complete)


def permute_reference(x: Float[Tensor, "T D"], plan: RowPlan) -> Float[Tensor, "R D"]:
    """Slow reference of ``permute``, by plain indexing under autograd."""
    topk = plan.slots.shape[1]
    with_zeros = torch.cat([x, x.new_zeros(1, x.shape[1])])  # token T: zeros, for padding rows
    return with_zeros[plan.choices // topk]


def unpermute_reference(rows: Float[Tensor, "R D"], plan: RowPlan) -> Float[Tensor, "T D"]:
    """Slow reference of ``unpermute``, one row after the other under autograd."""
    num_tokens, topk = plan.slots.shape
    sums = list(rows.new_zeros(num_tokens, rows.shape[1]).unbind(0))
    for row, choice in enumerate(plan.choices.tolist()):
        if choice < num_tokens * topk:
            sums[choice // topk] = sums[choice // topk] + rows[row]
    return torch.stack(sums) if sums else rows.new_zeros(0, rows.shape[1])


class _Permute(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, choices: Tensor, slots: Tensor, complete: bool) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.complete = complete
        return copy_to_rows(x, choices, slots, complete)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (slots,) = ctx.saved_tensors
        return sum_rows(grad, slots, ctx.complete), None, None, None


class _Unpermute(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, choices: Tensor, slots: Tensor, complete: bool
    ) -> Tensor:
        ctx.save_for_backward(choices, slots)
        ctx.complete = complete
        return sum_rows(rows, slots, complete)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        choices, slots = ctx.saved_tensors
        return copy_to_rows(grad, choices, slots, ctx.complete), None, None, None


class _PermuteProbs(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any, probs: Tensor, choices: Tensor, slots: Tensor, every: tuple[bool, bool]
    ) -> Tensor:
        # every: whether every row has a choice, and whether every choice has a row.
        ctx.save_for_backward(slots)
        ctx.every = every
        return take_rows(probs.reshape(-1), choices, every[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (slots,) = ctx.saved_tensors
        taken = take_rows(grad, slots.reshape(-1), ctx.every[1])
        return taken.view(slots.shape), None, None, None
