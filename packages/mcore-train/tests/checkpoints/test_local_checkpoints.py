"""A run that keeps checkpoints on local disks goes on from them, bitwise."""

from pathlib import Path

import pytest
import torch
from warm_ranks import run_ranks

from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.batches.datasets import Datasets
from mcore_train.checkpoints.resuming import build_run, load_run, take_snapshot
from mcore_train.composition import compose
from mcore_train.layout_check.rows import Rows
from mcore_train.loop import train
from mcore_train.reporting.log import Reporter
from mcore_train.resolution import resolve

TINY = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 5,
    "lr": 1e-2,
    "mock_data": True,
    "vocab_size": 43,
    "num_workers": 0,
    "make_vocab_size_divisible_by": 8,
    "bf16": True,
    "hidden_dropout": 0.1,
    "use_distributed_optimizer": True,
}


ROWS = Rows(seq_length=8, vocab_size=43, global_batch_size=4, num_steps=16)


def build(**changes):
    plan, ctx = plan_and_groups(**changes)
    return assemble(plan, ctx, datasets=Datasets(train=ROWS))


def plan_and_groups(**changes):
    config = compose({**TINY, **changes})
    return resolve(config, 2), ParallelContext.build(config.parallelism)


def refuse_to_draw(*_, **__):
    raise AssertionError("weights are drawn that are loaded next")


def ended(run):
    """Train to the end; return copies of everything that a checkpoint would hold."""
    train(run, Reporter(None))
    state = {
        name: [piece.data.clone() for piece in shard.pieces]
        for name, shard in take_snapshot(run).shards.items()
    }
    run.ctx.destroy()
    return state


def test_a_run_goes_on_from_local_disks_as_if_it_had_never_stopped(tmp_path):
    pytest.importorskip("nvidia_resiliency_ext")
    run_ranks(stop_and_go_on, 2, str(tmp_path), timeout_s=120.0)


def stop_and_go_on(folder):
    never_stopped = ended(build())
    lasting = f"{folder}/run"
    local = {
        "non_persistent_local_ckpt_dir": f"{folder}/local",
        "non_persistent_save_interval": 2,
    }
    # Ends after 3 of 5 steps without a word, as a lost host does: nothing lasting is there.
    run = build(**local)
    train(run, Reporter(None), until=3)
    assert run.progress.iteration == 3
    rank = run.ctx.global_rank
    run.ctx.destroy()
    here = Path(folder, "local", f"rank_{rank:05d}")
    assert [path.name for path in here.iterdir()] == [f"iter_0000002_of_{rank:05d}"]
    # As a restarted job does; --save has no step yet.
    again = build(**local, save=lasting, auto_resume=True)
    again = load_run(again)
    assert again.origin.checkpoint
    assert again.progress.iteration == 2
    assert again.progress.consumed_train_samples == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "normal_", refuse_to_draw)
        loaded = build_run(*plan_and_groups(**local, save=lasting, auto_resume=True))
    for name, shard in take_snapshot(again).shards.items():
        pairs = zip(shard.pieces, take_snapshot(loaded).shards[name].pieces, strict=True)
        assert all(torch.equal(a.data, b.data) for a, b in pairs), name
    loaded.ctx.destroy()
    found = ended(again)
    assert found.keys() == never_stopped.keys()
    for name, pieces in never_stopped.items():
        assert all(torch.equal(a, b) for a, b in zip(pieces, found[name], strict=True)), name
    # The lasting checkpoint of step 5 is newer than the local one of step 4.
    assert [path.name for path in here.iterdir()] == [f"iter_0000004_of_{rank:05d}"]
    newest = build(**local, load=lasting)
    newest = load_run(newest)
    assert newest.origin.checkpoint
    assert newest.progress.iteration == 5
    newest.ctx.destroy()
    # A run that begins anew over old local steps is told before it trains.
    with pytest.raises(ValueError, match="holds step 4, and this run begins at 0"):
        train(build(**local), Reporter(None))
