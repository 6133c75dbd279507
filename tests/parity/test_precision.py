"""The formats that people train in, against float64; and their state under any sharding."""

import pytest
import torch
from parity.case import DENSE, LayoutCase, build_case, trained
from parity.test_toys import replaced

from mcore_parallel.testing.ranks import run_ranks
from mcore_train.batches import train_batches
from mcore_train.checkpoints.resuming import save_run
from mcore_train.layout_check.trial import fingerprint, load_folder, train_one


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1.6e-2)]
)
def test_a_narrower_format_stays_close_and_continues_bitwise(dense, tmp_path, dtype, tolerance):
    oracle = dense["one"]
    found = trained(1, "dense", "one", str(tmp_path), dtype)
    assert found.losses[0] == pytest.approx(oracle.losses[0], rel=tolerance)
    assert found.grad_norm == pytest.approx(oracle.grad_norm, rel=3 * tolerance)
    assert found.resumed == found.final


def test_main_gradients_and_moments_of_bfloat16_weights_are_float32(tmp_path):
    run = build_case(DENSE["one"], dtype=torch.bfloat16)
    assert {shard.dtype for shard in run.data_parallel.grad_shards().values()} == {
        torch.float32
    }
    state = run.optimizer.named_shards()
    assert {shard.dtype for shard in state.values()} == {torch.float32}
    assert any(name.startswith("main.") for name in state)


def hand_over(folder):
    """Train by one sharding of bfloat16, then by the next from its checkpoint, and so on."""
    losses, saved = [], ""
    for step, strategy in enumerate(("optim", "optim_grads_params", "optim_grads", "no_shard")):
        flags = {"data_parallel_sharding_strategy": strategy}
        run = build_case(LayoutCase(2, 2, flags), seed=step, dtype=torch.bfloat16)
        if step:
            load_folder(run, folder)
            assert fingerprint(run) == saved
        losses.append(train_one(run, next(train_batches(run))))
        save_run(replaced(run, save=folder))
        saved = fingerprint(run)
        run.ctx.destroy()
    return losses


def test_bfloat16_state_goes_from_one_sharding_to_another_to_the_last_bit(dense, tmp_path):
    for losses in run_ranks(hand_over, 2, tmp_path, check_shapes=False):
        assert losses == pytest.approx(dense["one"].losses, rel=1.6e-2)
