"""``data_plan.json`` of a checkpoint: everything that determines the tokens of each step.

The plan holds options, seed and counts, a fingerprint of every source, and the history of batch
sizes. A host that has the files can rebuild the run's datasets from the plan, and find every
sample of every step (``explaining``).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from mcore_data.config import DataConfig, FIMConfig
from mcore_data.datasets.from_flags import build_gpt_datasets
from mcore_data.loading.sampler import CyclicSampler
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_data.tracing.tracing import prefixes

PLAN_FILE = "data_plan.json"
_TRACKER = "latest_checkpointed_iteration.txt"
_VERSION = 1
_FILES = ("data_args_path", "per_split_data_args_path", "data_mixture_path", "blocklist")


@dataclass(frozen=True, slots=True)
class BatchSizePhase:
    """Consecutive steps with one batch size.

    Attributes:
        first_step: number of the first step, counted from 1.
        first_sample: number of samples used before the first step.
        batch_size: samples of a step.
    """

    first_step: int
    first_sample: int
    batch_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlan:
    """Everything that determines the samples of a run.

    Attributes:
        data: data options.
        fim: fill-in-the-middle options.
        sequence_length: tokens of a sample.
        seed: seed of all shuffles.
        num_samples: requested samples of train, valid and test.
        stretches: batch sizes from the first step on; the last phase has no end. (The name is
            that of the file.)
        iteration: completed steps when the plan was written.
        consumed_samples: samples used by these steps.
        working_folder: folder to which relative paths of the options refer.
        sources: for each stored source its prefix, sequences, tokens and fingerprint, and the
            numbers of sequences and tokens that ``--blocklist`` hides.
        ledger: for each source of the training blend the number of samples used.
    """

    data: DataConfig
    fim: FIMConfig
    sequence_length: int
    seed: int
    num_samples: tuple[int, int, int]
    stretches: tuple[BatchSizePhase, ...]
    iteration: int
    consumed_samples: int
    working_folder: str
    sources: tuple[Mapping[str, Any], ...] = ()
    ledger: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1) + "\n"


def parse_plan(text: str | bytes, file: str | Path = PLAN_FILE) -> DataPlan:
    """Parse the JSON of ``DataPlan.to_json``.

    Raises:
        ValueError: naming ``file``, if the text is damaged or of another version.
    """
    try:
        table: dict[str, Any] = json.loads(text)
        version = table.pop("version", None)
        if version == _VERSION:
            table["data"] = _config(DataConfig, table["data"])
            table["fim"] = _config(FIMConfig, table["fim"])
            table["stretches"] = tuple(BatchSizePhase(**each) for each in table["stretches"])
            for name in ("num_samples", "sources", "ledger"):
                table[name] = tuple(table[name])
            return DataPlan(**table)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}.") from error
    raise ValueError(
        f"{file} has version {version}, not {_VERSION}: use the release of mcore-data that "
        "wrote it."
    )


def find_plan(run: str | Path) -> tuple[DataPlan, Path]:
    """Read the plan of a run folder's latest checkpoint, or of a step folder.

    Returns:
        The plan, and the step folder that holds it.
    """
    folder = Path(run)
    tracker = folder / _TRACKER
    if tracker.is_file():
        step = tracker.read_bytes().strip()
        if not step.isdigit():
            raise ValueError(f"{tracker} holds {step[:40]!r}: it must hold a step.")
        folder = folder / f"iter_{int(step):07d}"
    file = folder / PLAN_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist. Give the --save folder of an mcore-train run that read "
            "its data by --data-path or a similar option."
        )
    return parse_plan(file.read_bytes(), file), folder


def describe_sources(dataset: Any) -> list[dict[str, Any]]:
    """Count and fingerprint the stored sources of a dataset; reads their indices only."""
    return [
        {
            "prefix": getattr(source, "prefix", ""),
            "sequences": len(source.lengths),
            "tokens": int(source.lengths.sum(dtype=np.int64)),
            "lengths_hash": hashlib.blake2b(
                np.ascontiguousarray(source.lengths).data, digest_size=16
            ).hexdigest(),
            **_blocked(source),
        }
        for source in prefixes(dataset)
    ]


def _blocked(source: Any) -> dict[str, int]:
    blocked = getattr(source, "blocked", None)
    if blocked is None:
        return {}
    tokens = int(source.lengths[blocked].sum(dtype=np.int64))
    return {"blocked_sequences": int(blocked.sum()), "blocked_tokens": tokens}


def samples_by_source(plan: DataPlan) -> dict[str, int]:
    """Return the number of samples used of each source, by prefix, without zeros."""
    names = [source["prefix"] for source in plan.sources]
    return {n: count for n, count in zip(names, plan.ledger, strict=False) if count}


def rebuild(plan: DataPlan, tokenizer: Tokenizer | None) -> Any:
    """Rebuild the training dataset of a plan.

    Raises:
        ValueError: if a source, or the past phases of a mixture, have changed since the plan
            was written.
        FileNotFoundError: if a source does not exist any more.
    """
    built: Any = build_gpt_datasets(
        _absolute(plan.data, plan.working_folder),
        tokenizer,
        sequence_length=plan.sequence_length,
        seed=plan.seed,
        num_samples=plan.num_samples,
        fim=plan.fim,
        samples_before=lambda step: samples_before(plan.stretches, step),
        only=("train",),
    )[0]
    if plan.ledger and tuple(built.ledger(plan.consumed_samples)) != plan.ledger:
        raise ValueError(
            f"of the first {plan.consumed_samples} samples, {plan.ledger} came from the "
            f"sources; by {plan.data.data_mixture_path or 'the weights'} now it would be "
            f"{tuple(built.ledger(plan.consumed_samples))}: restore the past phases of the "
            "mixture."
        )
    for current, stored in zip(describe_sources(built), plan.sources, strict=True):
        if current["lengths_hash"] != stored["lengths_hash"]:
            raise ValueError(
                f"{current['prefix']} is not the data that the run read: it had "
                f"{stored['sequences']} sequences with {stored['tokens']} tokens, and now has "
                f"{current['sequences']} with {current['tokens']}, or another order. Restore "
                "the files."
            )
    return built


def samples_before(phases: Sequence[BatchSizePhase], step: int) -> int:
    """Return the number of samples that a run uses before a step, counted from 1.

    Raises:
        ValueError: if the step is before the first phase.
    """
    phase = _phase_of(phases, step)
    return phase.first_sample + (step - phase.first_step) * phase.batch_size


def find_step(phases: Sequence[BatchSizePhase], position: int) -> tuple[int, int]:
    """Return the step that reads a position of the data order, and the index in its batch."""
    phase = [each for each in phases if each.first_sample <= position][-1]
    steps, sample = divmod(position - phase.first_sample, phase.batch_size)
    return phase.first_step + steps, sample


def batch_size_at(phases: Sequence[BatchSizePhase], step: int) -> int:
    """Return the number of samples of a step."""
    return _phase_of(phases, step).batch_size


def sample_at(plan: DataPlan, dataset: Any, position: int) -> int:
    """Return the number of the dataset's sample at a position of the data order."""
    if plan.data.dataloader_type != "cyclic":
        return position
    sampler = CyclicSampler(
        num_samples=len(dataset), micro_batch_size=1, consumed_samples=position, seed=plan.seed
    )
    return next(iter(sampler))[0]


def _phase_of(phases: Sequence[BatchSizePhase], step: int) -> BatchSizePhase:
    if step < phases[0].first_step:
        raise ValueError(
            f"there is no step {step}: steps are counted from {phases[0].first_step}."
        )
    return [each for each in phases if each.first_step <= step][-1]


def _config(kind: type, table: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(kind)}
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in table.items()
            if name in known
        }
    )


def _absolute(config: DataConfig, folder: str) -> DataConfig:
    """Return options without a cache, with paths made absolute relative to ``folder``."""

    def absolute(word: str) -> str:
        path = Path(folder, word)
        exists = Path(f"{path}.idx").is_file() or path.is_file()
        return str(path) if exists else word

    changed: dict[str, Any] = {"data_cache_path": ""}
    for name, value in asdict(config).items():
        if name.endswith("data_path") and isinstance(value, tuple):
            changed[name] = tuple(map(absolute, value))
        elif name in _FILES:
            changed[name] = absolute(str(value)) if value else ""
    return replace(config, **changed)
