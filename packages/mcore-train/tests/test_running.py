"""A world is joined with the same options on every rank, or not at all."""

import faulthandler
import io
import json
import re
import shlex
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from warm_ranks import run_ranks

from mcore_ckpt.storage.paths import complete_steps
from mcore_data.indexed.writer import IndexedWriter
from mcore_parallel.mesh import ParallelContext
from mcore_train import __version__
from mcore_train.assembly import assemble
from mcore_train.cli import main
from mcore_train.composition import compose
from mcore_train.options.parsing import parse
from mcore_train.precision import check_device_format, with_device_precision
from mcore_train.reporting.header import StartClock, build_header
from mcore_train.reporting.log import read_metrics
from mcore_train.resolution import resolve
from mcore_train.running import check_same_options, joined_world

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
RUN = MODEL | {"train_iters": 1, "lr": 0.1, "vocab_size": 64}


def complaint(by_rank):
    """What a rank says of the options that the ranks were given."""
    config = compose(MODEL | by_rank.get(dist.get_rank(), {}))
    try:
        check_same_options(config, ParallelContext.build(config.parallelism))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_options_are_named_on_all_ranks():
    other = {1: {"lr": 0.25, "window_size": (7, 0)}}
    equal = {0: {"window_size": (7, 0)}, 1: {"window_size": (7, 0)}}
    told = run_ranks(complaint, 2, other)
    assert told[0] == told[1]
    assert "rank 1 was started with other options than rank 0" in told[0]
    assert "--lr 0.25 instead of 0.0" in told[0]
    assert "--window-size" in told[0]
    assert run_ranks(complaint, 2, equal) == ["", ""]


def format_refusal(capabilities):
    """What a rank says of bf16 where the ranks' GPUs have these capabilities."""
    ctx = ParallelContext.build(compose(MODEL).parallelism)
    with pytest.MonkeyPatch.context() as patch:
        own = capabilities[dist.get_rank()]
        patch.setattr(torch.cuda, "get_device_capability", lambda _: own)
        patch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
        try:
            check_device_format(torch.bfloat16, torch.device("cuda"), ctx.world)
        except ValueError as error:
            return str(error)
    return ""


def test_a_gpu_without_bf16_ends_all_ranks():
    assert run_ranks(format_refusal, 2, ((8, 0), (9, 0))) == ["", ""]
    for told in run_ranks(format_refusal, 2, ((8, 0), (7, 5))):
        assert "Tesla T4 has none: use --fp16" in told


def test_precision_auto_takes_the_format_of_the_gpu_and_its_options(monkeypatch):
    capabilities = [(7, 5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    config = compose(RUN | {"precision": "auto", "loss_scale": 128.0})
    for local_rank in (0, 3):  # joining the world says that rank 3 has no GPU
        chosen = with_device_precision(config, local_rank).precision
        assert (chosen.fp16, chosen.bf16, chosen.loss_scale) == (True, False, 128.0)
    capabilities[0] = (8, 0)
    with pytest.raises(ValueError, match=r"--loss-scale 128\.0 has no effect without --fp16"):
        with_device_precision(config, 0)


def test_a_program_without_a_terminal_joins_a_world_whose_faults_leave_a_stack(monkeypatch):
    was_enabled = faulthandler.is_enabled()
    faulthandler.disable()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    try:
        with joined_world(resolve(compose(RUN | {"device": "cpu", "mock_data": True}), 1)):
            assert faulthandler.is_enabled()
    finally:
        if not was_enabled:
            faulthandler.disable()


def test_a_graph_is_refused_where_there_is_no_gpu():
    changes = {"device": "cpu", "cuda_graph_impl": "full_iteration", "mock_data": True}
    plan = resolve(compose(RUN | changes), 1)
    refusal = pytest.raises(ValueError, match="--cuda-graph-impl full_iteration needs a GPU")
    with refusal, joined_world(plan):
        pass


def test_a_second_run_on_a_folder_is_refused_continues_the_first_or_takes_its_place(
    tmp_path, capfd
):
    shape = [f"--{n.replace('_', '-')}={v}" for n, v in {**MODEL, "seq_length": 8}.items()]
    words = ["gpt", *shape, "--mock-data", "--vocab-size=64", "--num-workers=0", "--lr=0.1"]
    words += ["--lr-decay-style=constant", "--device=cpu", "--save", str(tmp_path)]
    words += ["--precision=auto"]
    assert main([*words, "--train-iters=2"]) == 0
    assert "--precision auto: fp32 on the CPU" in capfd.readouterr().out
    assert main([*words, "--train-iters=2"]) == 2
    assert "holds step 2 of an earlier run" in capfd.readouterr().err
    resumed = [word for word in words if word not in shape] + ["--seq-length=8"]
    assert main([*resumed, "--train-iters=3", "--auto-resume"]) == 0
    assert "continuing at iteration 2" in capfd.readouterr().out
    assert (complete_steps(tmp_path), seen(tmp_path)) == ([2, 3], [1, 2, 3])
    words += ["--micro-batch-size", "auto", "--global-batch-size=2"]
    assert main([*words, "--train-iters=2", "--overwrite"]) == 0
    assert (complete_steps(tmp_path), seen(tmp_path)) == ([2], [1, 2])
    assert "--micro-batch-size auto takes 2" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("length", "batch_size", "steps", "samples"),
    [
        (["--train-samples=48"], 8, [1, 2, 3, 4, 5, 6, 7, 8], 48),
        (["--train-iters=12"], 2, [*range(1, 13)], 4 * 4 + 8 * 2),
        (["--train-iters=8"], 8, [*range(1, 9)], 4 * 4 + 4 * 8),
    ],
)
def test_a_run_that_continues_with_another_batch_size_keeps_its_length_and_tells_its_rate(
    tmp_path, capfd, length, batch_size, steps, samples
):
    words = [f"--{n.replace('_', '-')}={v}" for n, v in {**MODEL, "seq_length": 8}.items()]
    words = ["gpt", *words, "--mock-data", "--vocab-size=64", "--num-workers=0", "--lr=0.1"]
    words += ["--device=cpu", "--log-interval=1", "--save", str(tmp_path), *length]
    assert main([*words, "--global-batch-size=4", "--exit-interval=4"]) == 0
    words += ["--load", str(tmp_path), "--override-opt-param-scheduler"]
    assert main([*words, f"--global-batch-size={batch_size}"]) == 0
    told = capfd.readouterr().out
    assert seen(tmp_path) == steps
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["global_batch_size"] for row in rows[2:6]] == [4, 4, batch_size, batch_size]
    assert rows[-1]["consumed_train_samples"] == samples
    # What is told is what is done, and the linear decay ends with the run.
    assert f"step 5 has a batch of {batch_size} sequences, and the step before had 4" in told
    assert f"the learning rate is {rows[4]['lr']:.6E}" in told
    assert f"This run ends at step {steps[-1]}, the schedule at step {steps[-1]}." in told
    assert rows[4]["lr"] == pytest.approx(0.1 * (1 - 16 / samples))
    assert rows[-1]["lr"] == pytest.approx(0.1 * batch_size / samples)
    assert main([*words, f"--global-batch-size={batch_size}"]) == 0
    assert "has a batch of" not in capfd.readouterr().out  # the size of before


def test_another_schedule_than_the_checkpoints_is_refused_once_before_ranks_start(
    tmp_path, capfd
):
    words = [f"--{n.replace('_', '-')}={v}" for n, v in {**MODEL, "seq_length": 8}.items()]
    words = ["gpt", *words, "--mock-data", "--vocab-size=64", "--num-workers=0", "--lr=0.1"]
    words += ["--device=cpu", "--global-batch-size=4", "--save", str(tmp_path)]
    assert main([*words, "--train-iters=2"]) == 0
    capfd.readouterr()
    words += ["--load", str(tmp_path), "--train-iters=3"]
    assert main([*words, "--nproc=2"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("mcore-train: error: the checkpoint's schedule differs from")
    assert main([*words, "--nproc=2", "--save", "/proc/x", "--auto-resume"]) == 2
    told = capfd.readouterr().err
    assert "--override-opt-param-scheduler" in told  # with all other faults
    assert "--save /proc/x cannot be made" in told


def test_a_run_says_what_it_is_before_it_trains(tmp_path, capfd):
    book, save = tmp_path / "book", tmp_path / "run"
    with IndexedWriter(book, "uint16") as writer:
        writer.add_documents(np.arange(200) % 60, np.array([50] * 4))
    words = [f"--{n.replace('_', '-')}={v}" for n, v in MODEL.items()]
    words = ["gpt", *words, "--vocab-size=64", "--num-workers=0", "--lr=0.1", "--device=cpu"]
    words += ["--seq-length=8", "--global-batch-size=2", "--log-interval=1", "--split=75,25,0"]
    words += ["--data-path", str(book), "--save", str(save), "--save-interval=3"]
    words += ["--train-iters=20", "--tensorboard", "--num-experts=4", "--bf16"]
    words += ["--moe-ffn-hidden-size=16", "--make-vocab-size-divisible-by=64"]
    assert main([*words, "--exit-interval=4"]) == 0
    told = capfd.readouterr().out
    run = assemble(resolve(parse(words[1:]), 1), ParallelContext.single())
    sizes = {name: p.numel() for name, p in run.chunks[0].named_parameters()}
    size = sum(sizes.values())
    active = size - sum(n for name, n in sizes.items() if ".experts." in name) // 2
    row, *_ = read_metrics(save / "metrics.jsonl")
    assert (row["kind"], row["parameters"], row["active_parameters"]) == ("run", size, active)
    assert row["data"] == [
        {"prefix": str(book), "documents": 3, "tokens": 150, "epochs": 320 / 150}
    ]
    layout = "tensor 1, context 1, pipeline 1, data 1, expert 1, sharding no_shard"
    command = re.search(r"^command: mcore-train gpt (.+)$", told, re.MULTILINE)[1]
    assert parse(shlex.split(command)) == parse([*words[1:], "--exit-interval=4"])
    assert compose(row["options"]) == parse([*words[1:], "--exit-interval=4"])
    for line in (
        f"model: gpt, {size:,} parameters, {active:,} of them for a token, vocabulary of 64, ",
        f"format: bfloat16\nlayout: 1 rank: {layout}\ndevices: 1 x cpu\n",
        f"seed: 1234; mcore-train {__version__}, torch {torch.__version__}, ",
        "steps: 1 to 20 of 2 x 8 tokens, 320 tokens to read\n",
        f"data: {book}, 3 documents, 150 tokens to train on, read 2.13 times\n",
        f"saves: every 3 steps to {save}\nstart: ",
    ):
        assert line in told
    parts = "imports", "planning", "joining ranks", "assembly", "loading"
    assert tuple(row["start_s"]) == parts
    assert row["start_s"]["imports"] > row["start_s"]["planning"]  # from the process's start
    assert re.search(r"^start: \S+ s: imports \S+, planning \S+, join", told, re.MULTILINE)
    assert re.search(r"a step takes \S+ ms: \S+ s to the end, \S+ s between saves\n", told)
    assert main([*words, "--auto-resume"]) == 0
    assert "steps: 5 to 20 of 2 x 8 tokens, 256 tokens to read" in capfd.readouterr().out
    attempts = [r for r in read_metrics(save / "metrics.jsonl") if r["kind"] == "run"]
    assert [(r["attempt"], r["continues_from"]) for r in attempts] == [(1, 0), (2, 4)]
    ramp = [*words[1:], "--global-batch-size=4", "--rampup-batch-size", "2", "2", "8"]
    ramp = [word for word in ramp if not word.startswith("--train-iters")]
    ramp.append("--train-samples=76")  # 4 steps of 2, then 17 of 4
    grown = assemble(resolve(parse(ramp), 1), ParallelContext.single())
    assert "steps: 1 to 21 of 2 to 4 x 8 tokens" in str(build_header(grown, StartClock()))


def seen(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line["iteration"] for line in map(json.loads, lines) if line["kind"] == "train"]
