import pytest
import torch
from warm_ranks import run_ranks

from mcore_models.protocol import LM_LOSS
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_train.losses import count_valid, loss_weights, place

LENGTH = 8


COEFFICIENTS = {LM_LOSS: 1.0, "row loss": 0.25}


def masks_of(placed):
    """Masks of the tokens' loss, and of one loss of every row."""
    return {LM_LOSS: placed["loss_mask"], "row loss": torch.ones(len(placed["tokens"]))}


def batch(mask):
    rows = torch.arange(2 * LENGTH).view(2, LENGTH)
    return {
        "tokens": rows,
        "labels": rows + 1,
        "loss_mask": torch.tensor(mask, dtype=torch.float32),
        "position_ids": rows % 3,
    }


MASK = [[1, 1, 0, 1, 1, 1, 1, 1], [0] * LENGTH]


def test_one_rank_keeps_its_batch_and_counts_its_mask():
    ctx = ParallelContext.single()
    placed = place(batch(MASK), ctx)
    assert torch.equal(placed["tokens"], batch(MASK)["tokens"])
    assert placed.positions is None
    assert count_valid([masks_of(placed)] * 2, ctx) == {LM_LOSS: 14, "row loss": 4}


def test_packed_rows_bring_their_documents_and_whole_ones_none():
    ctx = ParallelContext.single()
    packed = torch.tensor([[0, 3, LENGTH, LENGTH], [0, 1, 5, LENGTH]])
    placed = place({**batch(MASK), "cu_seqlens": packed}, ctx)
    assert [p.borders for p in placed.documents.rows] == [(0, 3, LENGTH), (0, 1, 5, LENGTH)]
    assert torch.equal(placed.positions, batch(MASK)["position_ids"])
    whole = torch.tensor([[0, LENGTH, LENGTH]] * 2)
    placed = place({**batch(MASK), "cu_seqlens": whole}, ctx)
    assert placed.documents is None
    assert placed.positions is None


def test_weights_sum_to_one_over_a_step_in_the_models_precision():
    ctx = ParallelContext.single()
    placed = place(batch(MASK), ctx)
    count = count_valid([masks_of(placed)], ctx)
    weights = loss_weights(masks_of(placed), COEFFICIENTS, count, torch.float64)
    for name, coefficient in COEFFICIENTS.items():
        assert weights[name].dtype == torch.float64
        assert weights[name].sum().item() == pytest.approx(coefficient, rel=1e-15)
    narrow = loss_weights(masks_of(placed), COEFFICIENTS, count, torch.bfloat16)
    assert narrow[LM_LOSS].dtype == torch.float32


def test_a_step_without_any_valid_token_has_weights_of_zero():
    ctx = ParallelContext.single()
    placed = place(batch([[0] * LENGTH] * 2), ctx)
    masks = masks_of(placed)
    weights = loss_weights(masks, COEFFICIENTS, count_valid([masks], ctx), torch.float32)
    assert not weights[LM_LOSS].any()


def split_over_context_ranks():
    ctx = ParallelContext.build(ParallelConfig(context_parallel_size=2))
    placed = place(batch(MASK), ctx, has_own_positions=True)
    return placed, count_valid([masks_of(placed)], ctx)[LM_LOSS].item()


def test_context_ranks_cut_all_tensors_alike_and_count_together():
    found = run_ranks(split_over_context_ranks, 2)
    whole = batch(MASK)
    for rank, columns in enumerate(([0, 1, 6, 7], [2, 3, 4, 5])):
        placed, count = found[rank]
        assert count == 7
        assert torch.equal(placed["tokens"], whole["tokens"][:, columns])
        assert torch.equal(placed["labels"], whole["labels"][:, columns])
        assert torch.equal(placed["loss_mask"], whole["loss_mask"][:, columns])
        assert torch.equal(placed.positions, whole["position_ids"][:, columns])
