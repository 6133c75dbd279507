"""Optimizers by flags: a run on the command line, continued to the last bit, and its rates."""

import json
from shlex import split

import pytest
import torch
from safetensors.torch import load_file
from warm_ranks import run_command, run_ranks

from mcore_parallel.mesh import ParallelContext
from mcore_parallel.testing.ranks import gather_logical
from mcore_train.assembly import assemble
from mcore_train.composition import compose
from mcore_train.loop import train as train_run
from mcore_train.reporting.log import Reporter, read_metrics
from mcore_train.resolution import resolve

FLAGS = split(
    "gpt --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--mock-vocab-size 64 --micro-batch-size 2 --num-workers 0 --device cpu --log-interval 1 "
    "--lr 1e-2 --lr-decay-style constant"
)
MUON = split(
    "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2 "
    "--muon-moment2-method normuon --qk-clip --qk-clip-threshold 0.01"
)
TINY = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "global_batch_size": 4,
    "train_iters": 3,
    "lr": 1e-2,
    "lr_decay_style": "constant",
    "mock_data": True,
    "vocab_size": 40,
    "num_workers": 0,
    "waterfall_interval": 0,
    "make_vocab_size_divisible_by": 8,
}
GROUPS = ["--parameter-groups", "embedding decay_factor=0", "norm lr_factor=0.5"]


def train(folder, *words):
    done = run_command("mcore_train", *FLAGS, *words, "--save", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def saved(folder, step):
    found = {}
    for file in sorted((folder / f"iter_{step:07d}").glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_a_run_that_stopped_goes_on_to_the_last_bit(tmp_path):
    words = [*MUON, *GROUPS]
    train(tmp_path / "straight", *words, "--train-iters", "4")
    train(tmp_path / "first", *words, "--train-iters", "4", "--exit-interval", "2")
    train(tmp_path / "first", *words, "--train-iters", "4", "--load", str(tmp_path / "first"))
    straight, continued = saved(tmp_path / "straight", 4), saved(tmp_path / "first", 4)
    assert straight.keys() == continued.keys()
    assert all(torch.equal(straight[name], continued[name]) for name in straight)


AVERAGED = {
    "ema": ["--ema-decay", "0.5", *MUON],
    "schedule-free": ["--optimizer", "schedule_free"],
}


@pytest.mark.parametrize("kind", AVERAGED)
def test_averaged_weights_are_scored_saved_and_written_as_a_model(tmp_path, kind):
    words = [*AVERAGED[kind], "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "2"]
    plain, scored = tmp_path / "plain", tmp_path / "scored"
    train(plain, *words, "--exit-interval", "2")
    train(plain, *words, "--load", str(plain))
    train(scored, *words, "--eval-average-weights")
    tensors, averaged = saved(plain, 4), saved(scored, 4)
    # A run that stopped goes on to the last bit, and scores of averages change nothing.
    assert tensors.keys() == averaged.keys()
    assert all(torch.equal(tensors[name], averaged[name]) for name in tensors)
    mean = tmp_path / "mean"
    done = run_command("mcore_ckpt", "average", str(plain), "--output", str(mean))
    assert done.returncode == 0, done.stderr
    weights = {}
    for file in (mean / "release").glob("*.safetensors"):
        weights |= load_file(file)
    for name, weight in weights.items():
        assert torch.equal(weight, tensors[name.replace("model.", "optimizer.average.", 1)])
        assert not torch.equal(weight, tensors[name])
    # The score of the averages is that of the model that they make.
    options = ["--eval-interval", "2", "--eval-iters", "2", "--eval-only", "--train-iters", "4"]
    alone = tmp_path / "alone"
    done = run_command(
        *("mcore_train", *FLAGS, *options, "--load", str(mean), "--metrics-file", str(alone))
    )
    assert done.returncode == 0, done.stderr
    kept = [row["loss"] for row in read_metrics(alone) if row["kind"] == "valid"]
    rows = [row for row in read_metrics(scored / "metrics.jsonl") if row["kind"] == "valid"]
    assert kept == pytest.approx([rows[-1]["loss"]], rel=1e-6)
    done = run_command("mcore_ckpt", "average", str(mean), "--output", str(tmp_path / "again"))
    assert "keeps no average of its weights: train with --ema-decay" in done.stderr


def averages_on_ranks(world_size, layout):
    """Averages of a run in float64, as whole tensors."""
    config = compose(TINY | layout)
    ctx = ParallelContext.build(config.parallelism)
    run = assemble(resolve(config, world_size), ctx, dtype=torch.float64)
    train_run(run, Reporter(None))
    found = gather_logical(run.optimizer.named_shards(), ctx.world)
    return {n: tensor for n, tensor in found.items() if n.startswith("average.")}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"ema_decay": 0.5}, marks=pytest.mark.parity_long),
        {"optimizer": "schedule_free"},
    ],
    ids=str,
)
def test_averages_are_those_of_one_rank(options):
    layout = {
        "tensor_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
    }
    one = run_ranks(averages_on_ranks, 1, 1, options)[0]
    four = run_ranks(averages_on_ranks, 4, 4, options | layout)[0]
    assert one.keys() == four.keys() != set()
    for name in one:
        torch.testing.assert_close(four[name], one[name], rtol=1e-9, atol=1e-12)


def test_batches_by_tokens_and_the_rate_that_follows_them(tmp_path):
    rows = train(
        tmp_path,
        *("--global-batch-size", "8", "--step-batch-size-schedule", "0:2 64:8"),
        *("--batch-size-lr-scaling", "sqrt", "--train-samples", "20"),
    )
    assert [row["global_batch_size"] for row in rows] == [2, 2, 8, 8]
    assert [row["lr"] for row in rows] == pytest.approx([5e-3, 5e-3, 1e-2, 1e-2])


def test_options_of_another_optimizer_are_refused():
    done = run_command("mcore_train", *FLAGS, "--train-iters", "1", "--muon-momentum", "0.5")
    assert done.returncode != 0
    assert (
        "--muon-momentum 0.5 has no effect without --optimizer muon"
        in done.stderr + done.stdout
    )
