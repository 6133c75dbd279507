"""Batches from the caller, all validation data at once, and data that are too short."""

import os

import numpy as np
import pytest
import torch
from warm_ranks import run_command, run_ranks

from mcore_data.cli import main as mcore_data
from mcore_data.datasets.mock import MockGPTDataset
from mcore_data.indexed.writer import IndexedWriter
from mcore_data.loading.loader import build_loader
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.batches.datasets import Datasets
from mcore_train.batches.micro_batches import BatchPosition, train_batches, valid_batches
from mcore_train.checkpoints.resuming import load_run
from mcore_train.composition import compose
from mcore_train.evaluation import validate
from mcore_train.loop import train
from mcore_train.reporting.log import Reporter
from mcore_train.resolution import resolve

TINY = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "seq_length": 8,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 4,
    "lr": 1e-2,
    "vocab_size": 40,
    "num_workers": 0,
    "log_interval": 1,
    "make_vocab_size_divisible_by": 8,
}
EXTERNAL = {"dataloader_type": "external"}


def build(datasets=None, world_size=1, **changes):
    config = compose({**TINY, **changes})
    plan = resolve(config, world_size)
    run = assemble(plan, ParallelContext.build(config.parallelism), datasets=datasets)
    return load_run(run)


def losses_of(run, until=0):
    reports = []
    train(run, Reporter(None), on_report=reports.append, until=until)
    return [report.loss for report in reports]


def batches_from(place: BatchPosition):
    """A caller's own loader: made-up rows, from any place on."""
    assert place.seq_length == TINY["seq_length"]
    return build_loader(
        MockGPTDataset(8, vocab_size=40, num_samples=100),
        micro_batch_size=place.micro_batch_size,
        dp_rank=place.dp_rank,
        dp_size=place.dp_size,
        consumed_samples=place.consumed_samples,
    )


@pytest.fixture
def texts(tmp_path):
    """Two corpora, of 20 and of 31 documents of 10 tokens."""
    for name, count in (("a", 20), ("b", 31)):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            writer.add_documents(np.arange(10 * count) % 40, np.full(count, 10))
    return str(tmp_path / "a"), str(tmp_path / "b")


def what_each_stage_reads(texts, changes):
    run = build(world_size=3, num_layers=3, data_path=texts[:1], **changes)
    batch = next(train_batches(run))[0]
    losses = losses_of(run)
    names = ("tokens", "labels", "loss_mask")
    read = [name in batch.entries and not batch[name].is_meta for name in names]
    return read, {part.shape for part in batch.entries.values()}, losses


def test_a_pipeline_stage_moves_to_its_device_only_what_it_reads(texts):
    layout = {"pipeline_model_parallel_size": 3, "global_batch_size": 6}
    found = run_ranks(what_each_stage_reads, 3, texts, layout)
    assert [read for read, _, _ in found] == [
        [True, False, False],
        [False, False, False],
        [False, True, True],
    ]
    assert all(shapes == {(2, 8)} for _, shapes, _ in found)
    alone = build(num_layers=3, data_path=texts[:1], global_batch_size=6)
    assert found[1][2] == pytest.approx(losses_of(alone), rel=1e-5)


def test_workers_are_as_many_as_wanted_up_to_a_multiple_of_the_cores(texts, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    for wanted, started in ((2, 2), (500, 8)):
        run = build(data_path=texts[:1], num_workers=wanted)
        batches, _ = valid_batches(run, run.datasets.train)
        assert batches.loader.num_workers == started


def test_a_run_on_batches_of_the_caller_continues_to_the_sample(tmp_path):
    datasets = Datasets(train=batches_from)
    whole = losses_of(build(datasets, **EXTERNAL))
    options = {**EXTERNAL, "save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    assert losses_of(build(datasets, **options), until=2) == whole[:2]
    load_only = {**options, "save": "", "ckpt_step": 2}
    assert losses_of(build(datasets, **load_only)) == whole[2:]
    for continued in run_ranks(continue_under_two_ranks, 2, load_only):
        assert continued == pytest.approx(whole[2:], rel=1e-5)
    listed = Datasets(train=list(batches_from(place_at(0))))
    assert losses_of(build(listed, **EXTERNAL)) == whole
    with pytest.raises(ValueError, match=r"continues after 8 samples.*Give a function of"):
        losses_of(build(listed, **load_only))


def continue_under_two_ranks(options):
    datasets = Datasets(train=batches_from)
    return losses_of(build(datasets, world_size=2, micro_batch_size=1, **options))


def test_full_validation_scores_every_sample_once_under_every_layout(texts):
    options = {"data_path": ["7", texts[0], "3", texts[1]], "split": "6,4", "num_layers": 2}
    options |= {"eval_interval": 1, "full_validation": True}
    score = validate(build(**options), Reporter(None))
    # 8 and 12 documents of 10 tokens, whatever the weights; the last label closes a sample.
    assert score.num_tokens == 8 * ((80 - 1) // 8 + (120 - 1) // 8)
    for scores in run_ranks(score_in_layouts, 2, options):
        for found in scores:
            assert found.num_tokens == score.num_tokens
            assert found.loss == pytest.approx(score.loss, rel=1e-5)


def score_in_layouts(options):
    layouts = [
        # 23 samples over two ranks by threes: a filler at the end of one.
        {"micro_batch_size": 3, "global_batch_size": 12},
        # 12 micro-batches in groups of 5: a pipeline that is short at the end.
        {"pipeline_model_parallel_size": 2, "global_batch_size": 10},
    ]
    return [
        validate(build(world_size=2, **options, **layout), Reporter(None)) for layout in layouts
    ]


def place_at(consumed_samples):
    return BatchPosition(
        consumed_samples=consumed_samples, micro_batch_size=2, seq_length=8,
        dp_rank=0, dp_size=1,
    )  # fmt: skip


def test_validation_takes_batches_of_the_caller_from_their_start_each_time():
    datasets = Datasets(train=batches_from, valid=batches_from)
    run = build(datasets, **EXTERNAL, eval_interval=1, eval_iters=3)
    score = validate(run, Reporter(None))
    assert score.num_tokens == 3 * 4 * 8
    assert validate(run, Reporter(None)) == score
    once = Datasets(train=batches_from, valid=iter(list(batches_from(place_at(0)))))
    with pytest.raises(ValueError, match="can be read only once"):
        validate(build(once, **EXTERNAL, eval_interval=1), Reporter(None))


def test_batches_of_the_caller_that_will_not_do_are_named():
    few = [*batches_from(place_at(0))][:3]
    with pytest.raises(RuntimeError, match="end within step 2 of 4, after 4 samples"):
        losses_of(build(Datasets(train=few), **EXTERNAL))
    rows = torch.zeros(2, 9, dtype=torch.int64)
    for batch, message in (
        ({"tokens": rows}, r"tokens is of shape \(2, 9\), and every micro-batch .* \(2, 8\)"),
        ({"tokens": rows[:, :8], "labels": rows[:, :8]}, "loss_mask is missing"),
        ({**few[0], "cu_seqlens": torch.tensor([[0, 8]] * 2), "position_ids": rows},
         "position_ids is of shape"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            losses_of(build(Datasets(train=[batch] * 2), **EXTERNAL))


def test_flags_that_batches_of_the_caller_have_no_use_for_are_refused():
    for options, message in (
        ({**EXTERNAL, "mock_data": True}, "leave --data-path and the other sources out"),
        (
            {**EXTERNAL, "full_validation": True, "eval_interval": 1},
            "external data have no length",
        ),
        ({"mock_data": True, "full_validation": True}, "has no effect without --eval-interval"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve(compose({**TINY, **options}), 1)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    done = run_command("mcore_train", "gpt", *words, "--dataloader-type", "external")
    assert done.returncode == 2
    assert "takes its batches from a program: call assemble(" in done.stderr


def test_data_that_end_within_the_run_are_refused_before_it(texts):
    with pytest.raises(ValueError, match=r"have 62 samples, and the run takes 400: several"):
        build(data_path=texts, split="1", train_iters=100)
    own = {"train_data_path": texts[:1], "valid_data_path": texts, "eval_interval": 1}
    with pytest.raises(
        ValueError, match=r"validation data have 62 samples.*takes 80: give few"
    ):
        build(**own, eval_iters=20)
    assert len(build(**own, full_validation=True).datasets.valid) == 62
    cyclic = {"dataloader_type": "cyclic", "train_iters": 100, "data_path": texts}
    assert len(build(**cyclic, split="1").datasets.train) == 62


def test_weights_need_no_validation_samples_where_nothing_is_validated(texts):
    run = build(data_path=["0.5", texts[0], "0.5", texts[1]], split="8,2")
    assert len(run.datasets.train) == 16
    assert run.datasets.valid is None


def test_a_run_finds_the_indices_that_were_made_offline(texts, tmp_path, capsys):
    cache = tmp_path / "cache"
    words = ["--data-path", "7", texts[0], "3", texts[1], "--split", "6,4", "--eod-mask-loss"]
    sizes = ["--seq-length", "8", "--num-samples", "16", "8", "0", "--seed", "5"]
    assert mcore_data(["index", *words, *sizes, "--data-cache-path", str(cache)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == ["train: 17 samples", "valid: 9 samples", "test: none"]
    made = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    run = build(
        data_path=("7", texts[0], "3", texts[1]), split="6,4", data_cache_path=str(cache),
        eval_interval=1, eval_iters=2, seed=5,
    )  # fmt: skip
    assert len(run.datasets.train) == 17
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == made
