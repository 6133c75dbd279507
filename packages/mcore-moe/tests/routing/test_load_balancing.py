import pytest
import torch

from mcore_moe import aux_loss, sinkhorn, updated_expert_bias, z_loss
from mcore_moe.routing.load_balancing import count_choices

LOGITS = torch.tensor([[2.0, 1, 0, -1], [0, 3, 1, 2], [1, 1.5, -2, 0.5]])


def test_aux_loss_is_one_at_perfect_balance():
    scores = torch.full((4, 4), 0.25, dtype=torch.float64)
    counts = torch.tensor([2, 2, 2, 2])
    assert aux_loss(scores, counts, topk=2).item() == 1.0


def test_aux_loss_equals_the_published_number():
    ids = LOGITS.topk(2).indices
    loss = aux_loss(LOGITS.softmax(1), count_choices(ids, 4), topk=2)
    assert loss.item() == pytest.approx(1.45521881, rel=1e-6)


def test_losses_without_tokens_are_zero_and_not_nan():
    scores = torch.zeros(0, 4, requires_grad=True)
    loss = aux_loss(scores, torch.zeros(4, dtype=torch.int64), 2) + z_loss(scores)
    loss.backward()
    assert loss.item() == 0.0


def test_no_loss_changes_the_counts_it_is_given():
    counts = torch.tensor([3, 2, 0, 1])
    before = counts.clone()
    aux_loss(LOGITS.softmax(1), counts, 2)
    updated_expert_bias(torch.zeros(4), counts, 1e-3)
    assert torch.equal(counts, before)


def test_z_loss_equals_the_published_number():
    assert z_loss(LOGITS).item() == pytest.approx(7.5364760, rel=1e-6)


def test_bias_rises_for_idle_and_falls_for_busy_experts():
    bias = updated_expert_bias(torch.zeros(4), torch.tensor([4, 2, 0, 2]), 0.5)
    assert bias.tolist() == [-0.5, 0.0, 0.5, 0.0]


def test_bias_update_is_exact_for_counts_that_a_float_would_round():
    mean = 2**40 + 1
    counts = torch.tensor([mean - 1, mean + 1, mean, mean])
    assert updated_expert_bias(torch.zeros(4), counts, 1.0).tolist() == [1, -1, 0, 0]


def test_sinkhorn_equals_the_published_row_and_balances_both_ways():
    matrix = sinkhorn(LOGITS)
    torch.testing.assert_close(
        matrix[0], torch.tensor([0.155908, 0.041878, 0.118309, 0.017231]), rtol=0, atol=2e-6
    )
    torch.testing.assert_close(matrix.sum(1), torch.full((3,), 1 / 3), rtol=1e-3, atol=0)
    torch.testing.assert_close(matrix.sum(0), torch.full((4,), 1 / 4), rtol=1e-3, atol=0)


def test_counts_ignore_masked_tokens():
    ids = torch.tensor([[0, 1], [1, 2], [3, 1]])
    assert count_choices(ids, 4).tolist() == [1, 3, 1, 1]
    mask = torch.tensor([True, False, True])
    assert count_choices(ids, 4, mask).tolist() == [1, 2, 0, 1]
