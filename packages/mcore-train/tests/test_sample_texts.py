"""Texts that a run writes while it trains, by weights that never touch a file."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forks import exit_code, fork
from rich.console import Console
from warm_ranks import run_ranks

from mcore_ckpt.storage.paths import complete_steps
from mcore_infer.config import SamplingConfig
from mcore_infer.evaluation.lambada import score_lambada
from mcore_infer.evaluation.wikitext import score_wikitext
from mcore_infer.generation import generate_text
from mcore_infer.loading import load_model
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.composition import compose
from mcore_train.guards.signals import Stopped, StopRequest
from mcore_train.loop import train
from mcore_train.reporting.log import SAMPLES as SAMPLES_FILE
from mcore_train.reporting.log import Reporter, read_metrics
from mcore_train.resolution import build_plan
from mcore_train.sample_texts import TextWriter

TINY = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 4,
    "lr": 1e-2,
    "mock_data": True,
    "mock_vocab_size": 200,
    "tokenizer_type": "ByteTokenizer",
    "num_workers": 0,
    "log_interval": 1,
}
SAMPLES = {
    "sample_interval": 2,
    "sample_prompts": ("In the", "", "In the"),
    "sample_num_tokens": 12,
    "sample_temperature": 0.7,
}


def losses(changes):
    config = compose({**TINY, **changes})
    world = torch.distributed.get_world_size()
    plan = build_plan(config, world)
    run = assemble(plan, ParallelContext.build(config.parallelism))
    found = []
    console = Console(quiet=True) if run.ctx.global_rank == 0 else None
    save = config.saving.save
    with Reporter(console, samples_file=Path(save, SAMPLES_FILE) if save else None) as reporter:
        train(run, reporter, on_report=lambda report: found.append(report.loss))
    run.ctx.destroy()
    return found


def trained(folder, layout):
    plain = losses(layout)
    saved = {"save": str(folder), "save_interval": 2}
    assert losses(layout | SAMPLES | saved) == plain


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"pipeline_model_parallel_size": 2}, marks=pytest.mark.parity_long),
        {"num_experts": 2, "expert_model_parallel_size": 2, "moe_ffn_hidden_size": 8},
    ],
    ids=["pp2", "ep2"],
)
def test_a_text_is_that_of_the_checkpoint_of_its_step_and_training_does_not_notice(
    layout, tmp_path
):
    run_ranks(trained, 2, tmp_path / "run", layout)
    text = (tmp_path / "run/samples.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["iteration"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (2, 4) for prompt in SAMPLES["sample_prompts"]
    ]
    sampling = SamplingConfig(num_tokens=12, temperature=0.7)
    prompts = SAMPLES["sample_prompts"]
    for step in (2, 4):
        loaded = load_model(tmp_path / "run", ParallelContext.single(), step=step)
        texts = generate_text(loaded.model, loaded.tokenizer, prompts, sampling, 1234)
        assert texts == [line["text"] for line in lines if line["iteration"] == step]
    assert len({line["text"] for line in lines}) > 1


def build(**changes):
    config = compose({**TINY, **SAMPLES, **changes})
    return assemble(build_plan(config, 1), ParallelContext.single())


class KillingTokenizer:
    """Kills the process where texts are turned into words."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, *_, **__):
        os.kill(os.getpid(), signal.SIGKILL)


def test_texts_lose_no_step_to_a_kill_and_are_left_between_tokens(tmp_path):
    run = build(save=str(tmp_path), save_interval=2)
    run = replace(run, tokenizer=KillingTokenizer(run.tokenizer))
    assert exit_code(fork(lambda: train(run, Reporter(None)))) == -signal.SIGKILL
    assert complete_steps(tmp_path) == [2]
    with StopRequest(run.ctx) as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            TextWriter(run).write(stop.check)  # before the tokenizer is used


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_prompts": ("So",)}, "--sample-prompts So has no effect without"),
        (
            {"sample_interval": 5, "tokenizer_type": "HuggingFaceTokenizer"},
            "--sample-interval writes text: give --tokenizer-model",
        ),
        ({"sample_interval": -1}, "--sample-interval"),
        ({"sample_interval": 1, "sample_temperature": 0.0}, "--sample-temperature"),
    ],
)
def test_options_of_texts_that_cannot_be_met_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build_plan(compose({**TINY, **changes}), 1)


PASSAGES = ("the cat sat on the mat", "one two three four", "a b a b a b")


def score_tasks(folder, layout):
    lambada, wiki = folder / "lambada.jsonl", folder / "wiki.txt"
    tasks = (f"LAMBADA:{lambada}", f"WIKITEXT103:{wiki}")
    options = {"eval_task_interval": 2, "eval_tasks": tasks, "seq_length": 32}
    config = compose(
        {**TINY, **options, **layout, "save": str(folder / "run"), "save_interval": 2}
    )
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    run = assemble(build_plan(config, world), ParallelContext.build(config.parallelism))
    console = Console(quiet=True) if run.ctx.global_rank == 0 else None
    with Reporter(console, metrics_file=folder / "metrics.jsonl", with_lines=False) as reporter:
        train(run, reporter)
    run.ctx.destroy()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"pipeline_model_parallel_size": 2}, marks=pytest.mark.parity_long),
        {"num_experts": 2, "expert_model_parallel_size": 2, "moe_ffn_hidden_size": 8},
    ],
    ids=["pp2", "ep2"],
)
def test_tasks_are_scored_as_those_of_the_checkpoint_of_their_step(layout, tmp_path):
    lines = [json.dumps({"text": text}) for text in PASSAGES]
    (tmp_path / "lambada.jsonl").write_text("\n".join(lines))
    (tmp_path / "wiki.txt").write_text(" ".join(PASSAGES) * 3)
    run_ranks(score_tasks, 2, tmp_path, layout)
    rows = [
        row for row in read_metrics(tmp_path / "metrics.jsonl") if row["kind"][:4] == "task"
    ]
    assert [(row["kind"], row["iteration"]) for row in rows] == [
        (f"task {name}", step) for step in (2, 4) for name in ("LAMBADA", "WIKITEXT103")
    ]
    for row in rows:
        loaded = load_model(tmp_path / "run", ParallelContext.single(), step=row["iteration"])
        model = loaded.model.eval(), loaded.tokenizer
        if row["kind"] == "task LAMBADA":
            score = score_lambada(*model, PASSAGES, context_tokens=32)
            assert (row["accuracy"], row["num_examples"]) == (score.accuracy, 3)
        else:
            text = (tmp_path / "wiki.txt").read_text()
            found = score_wikitext(*model, text, detokenizer="wiki", context_tokens=32)
            assert row["adjusted_perplexity"] == pytest.approx(found.adjusted_perplexity)


def test_a_task_without_a_file_is_refused():
    with pytest.raises(ValueError, match=r"--eval-tasks LAMBADA must be LAMBADA:FILE, "):
        build(eval_task_interval=2, eval_tasks=("LAMBADA",))
