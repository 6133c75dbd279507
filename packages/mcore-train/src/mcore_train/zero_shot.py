"""Scores zero-shot tasks with a model while it trains, by its weights in a serving layout.

The tasks are those of ``mcore-infer eval``, read from files, and those of
lm-evaluation-harness, by its names; training continues with the same bits as without them.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from mcore_ckpt.save_load.rank_agreement import raise_on_all_ranks
from mcore_infer.evaluation.harness import HarnessTasks
from mcore_infer.evaluation.lambada import read_texts, score_lambada
from mcore_infer.evaluation.wikitext import detokenizer_name, score_wikitext
from mcore_parallel.mesh import SINGLE
from mcore_train.assembly import Run
from mcore_train.reporting.log import Reporter
from mcore_train.sample_texts import ServingCopy

log = logging.getLogger(__name__)

HARNESS = "lm-eval"
"""Prefix of tasks of lm-evaluation-harness in --eval-tasks."""
_OVERLAP = 32
"""Tokens of context that a window of WikiText shares with the one before."""


class ZeroShotTasks:
    """Scores the tasks of a run whenever they are due."""

    def __init__(self, run: Run) -> None:
        """Read the files, build the groups of the serving layout; all ranks call it together.

        Raises:
            ValueError: if a file is not of its task, or the harness has no such task.
            FileNotFoundError: if there is no such file.
        """
        self._run = run
        pairs = [task.split(":", 1) for task in run.plan.config.evaluation.eval_tasks]
        names = [name for kind, name in pairs if kind == HARNESS]
        with raise_on_all_ranks(run.ctx.world):  # a host may lack files, or the network
            self._harness = HarnessTasks(names) if names else None
            self._texts = [
                (kind, file, Path(file).read_text("utf-8"))
                for kind, file in pairs
                if kind != HARNESS
            ]
            for kind, _, text in self._texts:
                if kind == "LAMBADA":
                    read_texts(text.split("\n"))
        self._serving = ServingCopy(run)

    def score(self, reporter: Reporter) -> None:
        """Score each task with the current weights; all ranks call it together."""
        run, model = self._run, self._serving.model()
        # Ranks that share experts run every batch together: each scores all of them.
        has_experts = run.plan.config.parallelism.expert_model_parallel_size > 1
        options = {
            "context_tokens": run.plan.config.batch.seq_length,
            "axis": SINGLE if has_experts else self._serving.ctx.dp,
        }
        tokenizer, step = run.tokenizer, run.progress.iteration
        assert tokenizer is not None
        with torch.no_grad():
            for name, file, text in self._texts:
                if name == "LAMBADA":
                    score = score_lambada(
                        model, tokenizer, read_texts(text.split("\n")), **options
                    )
                    numbers = {"accuracy": score.accuracy, "num_examples": score.num_examples}
                else:
                    overlap = min(_OVERLAP, options["context_tokens"])
                    score = score_wikitext(
                        model,
                        tokenizer,
                        text,
                        detokenizer=detokenizer_name(file),
                        overlap=overlap,
                        **options,
                    )
                    numbers = {
                        "loss": score.loss,
                        "perplexity": score.perplexity,
                        "adjusted_perplexity": score.adjusted_perplexity,
                    }
                _report(reporter, name, step, numbers)
            if self._harness is not None:
                scores = self._harness.scores(model, tokenizer, **options)
                for name, numbers in scores.items():
                    _report(reporter, name, step, numbers)

    def close(self) -> None:
        """Destroy the groups; all ranks call it together."""
        self._serving.close()


def _report(reporter: Reporter, name: str, step: int, numbers: Mapping[str, float]) -> None:
    shown = " | ".join(f"{key}: {value:.6g}" for key, value in numbers.items())
    log.info(" %s at iteration %d | %s |", name, step, shown)
    reporter.record(f"task {name}", step, numbers)
