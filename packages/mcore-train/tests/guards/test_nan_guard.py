"""Gradients that are not finite end the run before it overwrites what was good."""

import os
import time

import pytest
import torch
from warm_ranks import run_ranks

from mcore_ckpt.storage.paths import complete_steps
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.composition import compose
from mcore_train.guards.nan_guard import FiniteGradients, NonFiniteError
from mcore_train.loop import train
from mcore_train.reporting.log import Reporter
from mcore_train.resolution import resolve

BAD = 4
TINY = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 6,
    "lr": 1e-2,
    "mock_data": True,
    "vocab_size": 40,
    "num_workers": 0,
    "make_vocab_size_divisible_by": 8,
}


def build(world_size=1, on_rank=0, **changes):
    """A run in which one gradient of one rank is infinite in one step."""
    config = compose({**TINY, **changes})
    plan = resolve(config, world_size)
    run = assemble(plan, ParallelContext.build(config.parallelism))

    def spoil(grad):
        is_bad = run.progress.iteration == BAD - 1 and run.ctx.global_rank == on_rank
        return torch.full_like(grad, torch.inf) if is_bad else grad

    next(p for p in run.chunks[0].parameters() if p.dim() == 1).register_hook(spoil)
    return run


@pytest.mark.parametrize("is_async", [False, True])
def test_no_step_from_the_bad_one_on_is_saved(tmp_path, is_async):
    run = build(save=str(tmp_path), save_interval=1, async_save=is_async)
    with pytest.raises(FloatingPointError, match=r"norm of iteration 4 is (nan|inf)"):
        train(run, Reporter(None))
    assert complete_steps(tmp_path) == [1, 2, 3]


def test_a_good_step_that_is_still_being_written_comes_to_disk(tmp_path, monkeypatch):
    really = os.fsync

    def slowly(file):
        time.sleep(0.2)
        really(file)

    monkeypatch.setattr(os, "fsync", slowly)
    with pytest.raises(NonFiniteError):
        train(build(save=str(tmp_path), save_interval=3, async_save=True), Reporter(None))
    assert complete_steps(tmp_path) == [3]


@pytest.mark.parametrize("last", [BAD, BAD + 1])
def test_the_last_step_is_looked_at_too(tmp_path, last):
    with pytest.raises(NonFiniteError):
        train(build(save=str(tmp_path), train_iters=last), Reporter(None))
    assert complete_steps(tmp_path) == []


def test_a_run_that_may_go_on_does():
    run = build(check_for_nan_in_loss_and_grad=False)
    assert train(run, Reporter(None))
    assert not all(p.isfinite().all() for p in run.chunks[0].parameters())


def fail_together(layout):
    with pytest.raises(NonFiniteError) as found:
        train(build(2, on_rank=1, **layout), Reporter(None))
    assert "--min-loss-scale" in str(found.value)
    return found.value.iteration


@pytest.mark.parametrize(
    "layout",
    [{"pipeline_model_parallel_size": 2}, {"use_distributed_optimizer": True}],
    ids=str,
)
def test_all_ranks_end_at_the_same_step_when_one_is_bad(layout):
    assert run_ranks(fail_together, 2, layout) == [BAD, BAD]


def test_a_norm_is_read_one_step_late_and_once():
    gradients = FiniteGradients()
    gradients.add(1, torch.tensor(torch.nan))
    with pytest.raises(NonFiniteError):
        gradients.add(2, torch.tensor(1.0))
    gradients.check()
