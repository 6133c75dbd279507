"""Tasks of lm-evaluation-harness in the training loop; `nox -s extras` brings the package."""

import json
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from rich.console import Console
from warm_ranks import run_ranks

from mcore_infer.evaluation.harness import HarnessTasks
from mcore_infer.loading import load_model
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_train.assembly import assemble
from mcore_train.composition import compose
from mcore_train.loop import train
from mcore_train.reporting.log import Reporter, read_metrics
from mcore_train.resolution import build_plan

pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that are not ours
TINY = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 4,
    "lr": 1e-2,
    "mock_data": True,
    "mock_vocab_size": 200,
    "num_workers": 0,
    "tokenizer_type": "ByteTokenizer",
    "save_interval": 2,
}
QUESTIONS = [("the cat sat on", " the mat", " a dog"), ("two and two are", " four", " five")]


def write_task(folder):
    rows = [{"question": q, "choices": [yes, no], "answer": 0} for q, yes, no in QUESTIONS]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "tiny.yaml").write_text(
        f"""task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    return str(folder / "tiny.yaml")


@contextmanager
def without_defaults():
    """Spare the harness the index of its own tasks, which takes seconds."""
    from lm_eval import tasks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
        yield


def trained(folder, changes):
    """Train with or without tasks; return the bits of the weights."""
    config = compose({**TINY, **changes, "save": str(folder)})
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    run = assemble(build_plan(config, world), ParallelContext.build(config.parallelism))
    console = Console(quiet=True) if run.ctx.global_rank == 0 else None
    with (
        without_defaults(),
        Reporter(console, metrics_file=folder / "metrics.jsonl", with_lines=False) as reporter,
    ):
        train(run, reporter)
    weights = [p.detach().clone() for chunk in run.chunks for p in chunk.parameters()]
    run.ctx.destroy()
    return weights


@pytest.mark.parametrize(
    "layout", [{}, {"pipeline_model_parallel_size": 2}], ids=["one", "pp2"]
)
def test_tasks_of_the_harness_are_scored_by_name(tmp_path, layout):
    pytest.importorskip("lm_eval")
    tasks = f"lm-eval:{write_task(tmp_path)}"
    options = layout | {"eval_task_interval": 2, "eval_tasks": (tasks,)}
    plain, scored = tmp_path / "plain", tmp_path / "scored"
    if layout:
        without = run_ranks(trained, 2, plain, layout)[0]
        weights = run_ranks(trained, 2, scored, options)[0]
    else:
        without, weights = trained(plain, layout), trained(scored, options)
    assert all(map(torch.equal, weights, without)), "tasks changed the training"
    rows = [row for row in read_metrics(scored / "metrics.jsonl") if row["kind"] == "task tiny"]
    assert [row["iteration"] for row in rows] == [2, 4]
    with without_defaults():
        harness = HarnessTasks([tasks.partition(":")[2]])
    for row in rows:
        loaded = load_model(scored, ParallelContext.single(), step=row["iteration"])
        found = harness.scores(
            loaded.model.eval(), loaded.tokenizer, context_tokens=64, axis=SINGLE
        )
        assert row["acc"] == found["tiny"]["acc"]


def test_a_task_that_the_harness_has_not_is_refused_before_training(tmp_path):
    pytest.importorskip("lm_eval")
    with pytest.raises(ValueError, match="cannot load the task no-such-task"):
        trained(tmp_path, {"eval_task_interval": 2, "eval_tasks": ("lm-eval:no-such-task",)})
