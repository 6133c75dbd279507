"""``data_plan.json``: all that decides which tokens a run's steps read, kept in checkpoints.

From it alone the run's datasets are built again, on any host that has the files, and every
sample of every step can be found (``explaining``). It holds options, seed and counts, a
fingerprint of every source, and the batch sizes that the run has had.
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


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps of one batch size in a row.

    Attributes:
        first_step: steps are counted from 1.
        first_sample: samples that the run has used before it.
        batch_size: samples of a step.
    """

    first_step: int
    first_sample: int
    batch_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlan:
    """What decides the samples of a run.

    Attributes:
        data: the options.
        fim: fill-in-the-middle options.
        sequence_length: tokens of a sample.
        seed: of all orders.
        num_samples: samples requested of train, valid and test.
        stretches: batch sizes, from the first step on; the last one goes on.
        iteration: steps done when this was written.
        consumed_samples: samples used until then.
        working_folder: where relative paths of the options begin.
        sources: for each stored source its prefix, sequences, tokens and fingerprint.
        ledger: for each source of the training blend how many samples it has given.
    """

    data: DataConfig
    fim: FIMConfig
    sequence_length: int
    seed: int
    num_samples: tuple[int, int, int]
    stretches: tuple[Stretch, ...]
    iteration: int
    consumed_samples: int
    working_folder: str
    sources: tuple[Mapping[str, Any], ...] = ()
    ledger: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Write the plan as JSON."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1) + "\n"


def parse_plan(text: str) -> DataPlan:
    """Read what ``to_json`` wrote."""
    table: dict[str, Any] = json.loads(text)
    if table.pop("version", None) != _VERSION:
        raise ValueError(f"{PLAN_FILE} has another version than {_VERSION}.")
    table["data"] = _config(DataConfig, table["data"])
    table["fim"] = _config(FIMConfig, table["fim"])
    table["stretches"] = tuple(Stretch(**each) for each in table["stretches"])
    for name in ("num_samples", "sources", "ledger"):
        table[name] = tuple(table[name])
    return DataPlan(**table)


def find_plan(run: str | Path) -> tuple[DataPlan, Path]:
    """Read the plan of a run folder's latest checkpoint, or of a step folder.

    Returns:
        The plan, and the step folder.
    """
    folder = Path(run)
    tracker = folder / _TRACKER
    if tracker.is_file():
        folder = folder / f"iter_{int(tracker.read_text()):07d}"
    file = folder / PLAN_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist. Give a folder that mcore-train saved a checkpoint in, of "
            "a run whose batches did not come from its caller."
        )
    return parse_plan(file.read_text(encoding="utf-8")), folder


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
        }
        for source in prefixes(dataset)
    ]


def given_by_source(plan: DataPlan) -> dict[str, int]:
    """How many samples each source of a mixture has given, by prefix, if it gave any."""
    names = [source["prefix"] for source in plan.sources]
    return {n: count for n, count in zip(names, plan.ledger, strict=False) if count}


def rebuild(plan: DataPlan, tokenizer: Tokenizer | None) -> Any:
    """Build the training dataset of a plan again.

    Raises:
        ValueError: if a source or a mixture's past is not what it was when the plan was
            written.
        FileNotFoundError: if a source is gone.
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
            f"after {plan.consumed_samples} samples the sources had given {plan.ledger}, "
            f"and by today's {plan.data.data_mixture_path or 'weights'} they would have given "
            f"{tuple(built.ledger(plan.consumed_samples))}: bring the mixture's past back."
        )
    for now, then in zip(describe_sources(built), plan.sources, strict=True):
        if now["lengths_hash"] != then["lengths_hash"]:
            raise ValueError(
                f"{now['prefix']} is not the data that the run read: it had "
                f"{then['sequences']} sequences of {then['tokens']} tokens, and has "
                f"{now['sequences']} of {now['tokens']}, or in another order."
            )
    return built


def samples_before(stretches: Sequence[Stretch], step: int) -> int:
    """Samples that a run uses before a step; steps are counted from 1.

    Raises:
        ValueError: for a step before the first one.
    """
    mine = _stretch_of(stretches, step)
    return mine.first_sample + (step - mine.first_step) * mine.batch_size


def find_step(stretches: Sequence[Stretch], place: int) -> tuple[int, int]:
    """Step that reads a place of the data order, and the sample's index in its batch."""
    mine = [each for each in stretches if each.first_sample <= place][-1]
    steps, sample = divmod(place - mine.first_sample, mine.batch_size)
    return mine.first_step + steps, sample


def batch_size_at(stretches: Sequence[Stretch], step: int) -> int:
    """Samples of a step."""
    return _stretch_of(stretches, step).batch_size


def sample_at(plan: DataPlan, dataset: Any, place: int) -> int:
    """Sample of the dataset that stands at a place of the data order."""
    if plan.data.dataloader_type != "cyclic":
        return place
    sampler = CyclicSampler(
        num_samples=len(dataset), micro_batch_size=1, consumed_samples=place, seed=plan.seed
    )
    return next(iter(sampler))[0]


def _stretch_of(stretches: Sequence[Stretch], step: int) -> Stretch:
    if step < stretches[0].first_step:
        raise ValueError(
            f"there is no step {step}: steps are counted from {stretches[0].first_step}."
        )
    return [each for each in stretches if each.first_step <= step][-1]


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
    """The options with file names that hold from any folder; no cache is needed."""

    def whole(word: str) -> str:
        here = Path(folder, word)
        exists = Path(f"{here}.idx").is_file() or here.is_file()
        return str(here) if exists else word

    changed: dict[str, Any] = {"data_cache_path": ""}
    for name, value in asdict(config).items():
        if name.endswith("data_path") and isinstance(value, tuple):
            changed[name] = tuple(map(whole, value))
        elif name in ("data_args_path", "per_split_data_args_path", "data_mixture_path"):
            changed[name] = whole(str(value)) if value else ""
    return replace(config, **changed)
