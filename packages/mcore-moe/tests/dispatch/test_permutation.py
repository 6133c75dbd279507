import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_moe import RowPlan, permute, plan_rows, unpermute
from mcore_moe.dispatch.permutation import (
    permute_probs,
    permute_reference,
    plan_slice,
    trimmed,
    unpermute_reference,
    within_capacity,
)
from mcore_moe.kernels.rows import plan_choices

IDS = torch.tensor([[0, 1], [1, 3], [1, 0]])
PROBS = torch.tensor([[0.731059, 0.268941], [0.731059, 0.268941], [0.622459, 0.377541]])


def test_rows_are_sorted_by_expert_then_by_token():
    plan = plan_rows(IDS, 4)
    assert (plan.choices // 2).tolist() == [0, 2, 0, 1, 2, 1]
    assert plan.counts.tolist() == [2, 3, 0, 1]
    expected = [0.731059, 0.377541, 0.268941, 0.731059, 0.622459, 0.268941]
    assert permute_probs(PROBS, plan).tolist() == pytest.approx(expected)


def test_capacity_keeps_the_most_wanted_choices():
    keep = within_capacity(IDS, PROBS, 4, capacity=1)
    assert keep.tolist() == [[True, False], [True, True], [False, False]]


def test_capacity_by_position_keeps_the_first_tokens():
    keep = within_capacity(IDS, PROBS, 4, capacity=1, policy="position")
    assert keep.tolist() == [[True, True], [False, True], [False, False]]


def test_padded_plan_gives_every_expert_the_same_number_of_rows():
    keep = within_capacity(IDS, PROBS, 4, capacity=2)
    plan = plan_rows(IDS, 4, keep, capacity=2)
    assert plan.counts.tolist() == [2, 2, 2, 2]
    # Experts 0 to 3 get tokens 0 and 2; 1 and 2; nobody; 1. Number 6 fills.
    assert plan.choices.tolist() == [0, 5, 2, 4, 6, 6, 3, 6]
    assert permute_probs(PROBS, plan)[[4, 5, 7]].abs().sum() == 0


def test_combine_without_dropping_counts_every_token_k_times():
    x = torch.randn(3, 5, dtype=torch.float64)
    plan = plan_rows(IDS, 4)
    torch.testing.assert_close(unpermute(permute(x, plan), plan), 2 * x)


CASES = st.fixed_dictionaries(
    {
        "num_tokens": st.integers(0, 7),
        "num_experts": st.integers(1, 6),
        "topk": st.integers(1, 6),
        "capacity": st.integers(0, 4),
        "kind": st.sampled_from(["whole", "dropped", "padded"]),
        "seed": st.integers(0, 2**31),
    }
)


def build_plan(case):
    """Plan random choices, all of them, or within a capacity, or padded to it."""
    num_experts, capacity = case["num_experts"], case["capacity"]
    generator = torch.Generator().manual_seed(case["seed"])
    scores = torch.rand(case["num_tokens"], num_experts, generator=generator)
    ids = scores.argsort(dim=1)[:, : case["topk"]]
    if case["kind"] == "whole":
        return plan_rows(ids, num_experts)
    keep = within_capacity(ids, scores.gather(1, ids), num_experts, capacity)
    return plan_rows(ids, num_experts, keep, capacity if case["kind"] == "padded" else 0)


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_permute_and_unpermute_equal_their_slow_twins_with_gradients(case):
    plan = build_plan(case)
    for fast, slow, rows in (
        (permute, permute_reference, plan.slots.shape[0]),
        (unpermute, unpermute_reference, plan.choices.numel()),
    ):
        x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
        expected, result = slow(x, plan), fast(x, plan)
        torch.testing.assert_close(result, expected)
        if not expected.requires_grad:
            continue
        grad = torch.randn_like(expected)
        (gx,) = torch.autograd.grad(result, x, grad)
        (expected_gx,) = torch.autograd.grad(expected, x, grad)
        torch.testing.assert_close(gx, expected_gx)


@settings(max_examples=30, deadline=None)
@given(CASES)
def test_every_row_knows_its_choice_and_every_choice_its_row(case):
    plan = build_plan(case)
    num_rows, num_choices = plan.choices.numel(), plan.slots.numel()
    slots = plan.slots.reshape(-1).tolist()
    choices = plan.choices.tolist()
    assert plan.counts.sum() == num_rows
    assert all(slots[c] == r for r, c in enumerate(choices) if c < num_choices)
    assert all(choices[r] == c for c, r in enumerate(slots) if r < num_rows)
    assert sorted(choices) == list(range(num_choices)) or not plan.is_complete


def test_gradients_of_probs_come_back_to_their_choices():
    keep = within_capacity(IDS, PROBS, 4, capacity=1)
    probs = PROBS.clone().requires_grad_()
    permute_probs(probs, plan_rows(IDS, 4, keep)).sum().backward()
    assert torch.equal(probs.grad, keep.float())


def test_a_plan_that_is_trimmed_forgets_rows_of_no_expert():
    keep = within_capacity(IDS, PROBS, 4, capacity=1)
    # As on a GPU: as many rows as choices, the last of them of no expert.
    whole = RowPlan(*plan_choices.reference(IDS.where(keep, 4), 4, has_all=True), True, True)
    plan, wanted = trimmed(whole, int(keep.sum())), plan_rows(IDS, 4, keep)
    for name in ("choices", "slots", "offsets"):
        assert torch.equal(getattr(plan, name), getattr(wanted, name)), name
    assert not plan.is_complete
    assert plan.is_dense


def test_a_part_behind_the_last_row_is_empty_where_the_rows_fill_one_part():
    ids = torch.tensor([[0], [1], [0], [1]])
    plan = plan_rows(ids, 2, torch.tensor([[True], [True], [False], [False]]))
    first, second = (plan_slice(plan, begin, 2) for begin in (0, 2))
    assert first.offsets.tolist() == [0, 1, 2]
    assert second.offsets.tolist() == [0, 0, 0]
    assert second.choices.numel() == 2
    assert (second.slots == 2).all()
