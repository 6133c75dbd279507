"""Training in float16: the loss scale finds its place, and skipped steps leave no trace."""

import torch
from parity.case import LayoutCase, build_case
from warm_ranks import run_ranks

from mcore_train.batches.micro_batches import train_batches
from mcore_train.step import train_step


def weights(run):
    return [each.detach().clone() for each in run.chunks[0].parameters()]


def test_steps_that_overflow_change_nothing_and_the_scale_falls_until_one_trains():
    flags = {"fp16": True, "initial_loss_scale": 2.0**34, "hysteresis": 1}
    run = build_case(LayoutCase(flags=flags), dtype=torch.float16)
    batch, before, num_skipped = next(train_batches(run)), weights(run), 0
    while (result := train_step(run, batch, 1e-2, 0.1)).is_skipped:
        assert all(map(torch.equal, weights(run), before))
        assert run.optimizer.num_steps == 0
        num_skipped += 1
        assert run.precision.loss_scaler.value == 2.0 ** (34 - num_skipped)
    assert 0 < num_skipped < 30
    assert run.optimizer.num_steps == 1
    assert not all(map(torch.equal, weights(run), before))
    exact = build_case(LayoutCase())
    want = train_step(exact, next(train_batches(exact)), 1e-2, 0.1)
    torch.testing.assert_close(result.grad_norm, want.grad_norm, rtol=1e-2, atol=0)
    torch.testing.assert_close(result.loss, want.loss, rtol=2e-3, atol=0)


def overflow_on_the_last_stage():
    """Train a step whose last stage alone has an infinite gradient."""
    flags = {"fp16": True, "initial_loss_scale": 2.0**10, "hysteresis": 1}
    flags["pipeline_model_parallel_size"] = 2
    run = build_case(LayoutCase(2, flags=flags), dtype=torch.float16)
    before = weights(run)
    if run.chunks[0].stage.has_loss:
        weight = run.chunks[0].final_norm.weight
        weight.register_hook(lambda grad: grad * float("inf"))
    result = train_step(run, next(train_batches(run)), 1e-2, 0.1)
    is_same = all(map(torch.equal, weights(run), before))
    return result.is_skipped, run.precision.loss_scaler.value, is_same


def test_all_ranks_skip_the_step_that_overflowed_on_one_of_them():
    found = run_ranks(overflow_on_the_last_stage, 2, check_shapes=False)
    assert found == [(True, 2.0**9, True)] * 2
