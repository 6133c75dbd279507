"""Optimizers by flags: a run on the command line, continued to the last bit, and its rates."""

import json
from shlex import split

import pytest
import torch
from safetensors.torch import load_file
from warm_ranks import run_command

FLAGS = split(
    "gpt --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--mock-vocab-size 64 --micro-batch-size 2 --num-workers 0 --device cpu --log-interval 1 "
    "--lr 1e-2 --lr-decay-style constant"
)
MUON = split(
    "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2 "
    "--muon-moment2-method normuon --qk-clip --qk-clip-threshold 0.01"
)
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
