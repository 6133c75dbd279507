"""The formats that people train in, against float64; and their state under any sharding."""

import pytest
import torch
from parity.case import DENSE, NUM_STEPS, SAVED_STEP, LayoutCase, build_case, trained
from parity.test_toys import replaced
from warm_ranks import run_ranks

from mcore_train.batches.micro_batches import train_batches
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
    narrow_rows = {"bf16": True, "main_grads_dtype": "bf16", "optimizer_cpu_offload": True}
    for step, flags in enumerate(
        (
            {"data_parallel_sharding_strategy": "optim"},
            {"data_parallel_sharding_strategy": "optim_grads_params"},
            {"data_parallel_sharding_strategy": "optim_grads", **narrow_rows},
            {"data_parallel_sharding_strategy": "no_shard"},
        )
    ):
        run = build_case(LayoutCase(2, 2, flags), seed=step, dtype=torch.bfloat16)
        if step:
            run = load_folder(run, folder)
            assert fingerprint(run) == saved
        if step == NUM_STEPS:
            return losses
        losses.append(train_one(run, next(train_batches(run))))
        save_run(replaced(run, save=folder))
        saved = fingerprint(run)
        run.ctx.destroy()
    raise AssertionError("the last sharding has nothing left to train")


def test_bfloat16_state_goes_from_one_sharding_to_another_to_the_last_bit(dense, tmp_path):
    for losses in run_ranks(hand_over, 2, tmp_path, check_shapes=False):
        assert losses == pytest.approx(dense["one"].losses, rel=1.6e-2)


def narrow(tmp_path, seed=1234, **flags):
    flags = {"bf16": True, "use_distributed_optimizer": True, **flags}
    return replaced(
        build_case(LayoutCase(1, 4, flags), seed=seed, dtype=torch.bfloat16), save=tmp_path
    )


def test_weights_without_main_weights_learn_and_their_state_goes_both_ways(dense, tmp_path):
    run = narrow(tmp_path, main_params_dtype="bf16")
    batches = train_batches(run)
    losses = [train_one(run, next(batches)) for _ in range(SAVED_STEP)]
    assert not any(name.startswith("main.") for name in run.optimizer.named_shards())
    save_run(run)
    rest = [train_one(run, next(batches)) for _ in range(2)]
    assert losses + rest == pytest.approx(dense["one"].losses, rel=1.6e-2)

    again = narrow(tmp_path, seed=7, main_params_dtype="bf16")
    again = load_folder(again, tmp_path)
    batches = train_batches(again)
    assert [train_one(again, next(batches)) for _ in range(2)] == rest

    wide = narrow(tmp_path, seed=8)  # makes its main weights of the weights
    wide = load_folder(wide, tmp_path)
    batches = train_batches(wide)
    found = [train_one(wide, next(batches)) for _ in range(2)]
    assert found[0] == rest[0]
    assert found == pytest.approx(rest, rel=1e-3)
    save_run(wide)
    final = narrow(tmp_path, seed=9, main_params_dtype="bf16")
    final = load_folder(final, tmp_path)
    shards = final.data_parallel.weight_shards()
    for name, shard in wide.data_parallel.weight_shards().items():
        assert (shards[name].pieces[0].data == shard.pieces[0].data).all()
