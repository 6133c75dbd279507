"""Stores the results of a frozen model for each sample, and reads them with the samples.

``mcore-train reference`` runs the frozen model of a command once over the samples of its
datasets; a run with the same data options and ``--reference-cache`` reads the results with each
sample and holds no frozen model. A folder has one array for each entry and split,
``train/<entry>.npy`` of ``[samples, S, ...]``, and ``reference.json``, written last, which
describes the samples and the model.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_data.datasets.blending import read_batch
from mcore_data.indexed.caching import map_array
from mcore_data.tracing.data_plan import describe_sources
from mcore_models.families import GPT_FAMILY, Family
from mcore_parallel.collectives import all_reduce
from mcore_parallel.context_parallel.zigzag import zigzag_join
from mcore_parallel.launch import launcher
from mcore_train.assembly import Run, assemble
from mcore_train.batches.datasets import num_samples
from mcore_train.batches.micro_batches import place_for
from mcore_train.composition import TrainConfig
from mcore_train.options.output_checks import build_checked_plan
from mcore_train.precision import with_device_precision
from mcore_train.reporting.log import set_up
from mcore_train.resolution import Plan
from mcore_train.running import joined_world

log = logging.getLogger(__name__)

_INDEX = "reference.json"
_SPLITS = ("train", "valid", "test")


class AnnotatedDataset:
    """Map-style dataset that adds stored entries to the samples of another dataset.

    Args:
        dataset: the samples without the entries.
        entries: memory-mapped arrays by name, one row for each sample.
    """

    def __init__(self, dataset: Any, entries: Mapping[str, NDArray[Any]]) -> None:
        self.dataset, self.entries = dataset, entries

    def __len__(self) -> int:
        return min(len(rows) for rows in self.entries.values())

    def __getitem__(self, sample: int) -> dict[str, NDArray[Any]]:
        """Return one sample."""
        return {**self.dataset[sample], **{n: rows[sample] for n, rows in self.entries.items()}}

    def batch(self, samples: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Return stacked samples."""
        stored = {name: rows[list(samples)] for name, rows in self.entries.items()}
        return {**read_batch(self.dataset, samples), **stored}


def annotate_datasets(plan: Plan, built: Sequence[Any]) -> list[Any]:
    """Add the entries of ``--reference-cache`` to the train, valid and test datasets.

    Raises:
        ValueError: if the folder was written for other samples or options.
        FileNotFoundError: if the folder is not complete.
    """
    folder = Path(plan.config.objective.reference_cache)
    if not (folder / _INDEX).is_file():
        raise FileNotFoundError(
            f"--reference-cache {folder} holds no {_INDEX}: write it by mcore-train reference "
            "with the options of this run."
        )
    try:
        stored = dict(json.loads((folder / _INDEX).read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{folder / _INDEX} is damaged ({error}): write it anew by mcore-train reference."
        ) from error
    current = _description(plan, built)
    different = [
        f"{name}: {stored.get(name)} in the folder, {value} here"
        for name, value in current.items()
        if value is not None and stored.get(name) != value
    ]
    if different:
        raise ValueError(
            f"--reference-cache {folder} was written for other samples or options "
            f"({'; '.join(different)}): write it anew by mcore-train reference."
        )
    annotated: list[Any] = []
    for split, dataset in zip(_SPLITS, built, strict=True):
        files = sorted((folder / split).glob("*.npy")) if dataset is not None else []
        entries = {file.stem: map_array(file) for file in files}
        annotated.append(None if dataset is None else AnnotatedDataset(dataset, entries))
    return annotated


def write_reference_cache(config: TrainConfig, family: Family = GPT_FAMILY) -> int:
    """Write the folder of ``--reference-cache`` with the run's frozen model; return 0.

    Raises:
        ValueError: with every conflict, before any collective.
    """
    world = launcher.read_environment()
    set_up(world.rank == 0)
    if not config.objective.reference_cache:
        raise ValueError("mcore-train reference needs --reference-cache, the folder to write.")
    config = with_device_precision(config, world.local_rank)
    folder = Path(config.objective.reference_cache)
    config = replace(config, objective=replace(config.objective, reference_cache=""))
    plan = build_checked_plan(config, world.world_size, family)
    with joined_world(plan) as ctx:
        run = assemble(plan, ctx)
        write_entries(run, folder)
    return 0


def write_entries(run: Run, folder: Path) -> None:
    """Store the frozen model's entries of all samples; all ranks call it together.

    Ranks write different rows of the same files, so the folder must be on a file system that
    all ranks share.

    Raises:
        ValueError: if the objective's entries cannot be stored.
    """
    data, objective = run.datasets, run.objective
    if not objective.stored_entries or run.frozen is None:
        raise ValueError(
            f"--objective {run.plan.config.objective.objective} has nothing to store: use dpo, "
            "or distill with --distill-top-k."
        )
    is_first = run.ctx.global_rank == 0
    length = run.plan.config.batch.seq_length
    built = (data.train, data.valid, data.test)
    sizes = _sizes(run.plan, built)
    if is_first:
        (folder / _INDEX).unlink(missing_ok=True)
        for split, size in sizes.items():
            (folder / split).mkdir(parents=True, exist_ok=True)
            for name, (dtype, tail) in objective.stored_entries.items():
                file, shape = folder / split / f"{name}.npy", (size, length, *tail)
                np.lib.format.open_memmap(file, "w+", np.dtype(dtype), shape).flush()
    _meet(run)
    for split, dataset in zip(_SPLITS, built, strict=True):
        if split in sizes:
            _write_split(run, dataset, sizes[split], folder / split)
            log.info("%s: %d samples of %s", folder, sizes[split], split)
    _meet(run)
    if is_first:
        text = json.dumps(_description(run.plan, built), indent=1)
        (folder / _INDEX).write_text(text)


def _write_split(run: Run, dataset: Any, count: int, folder: Path) -> None:
    """Store the entries of one dataset, as many micro-batches at once as a step has."""
    ctx, size = run.ctx, run.plan.config.batch.micro_batch_size
    names = list(run.objective.stored_entries)
    files = {n: np.lib.format.open_memmap(folder / f"{n}.npy", "r+") for n in names}
    block = size * ctx.dp.size
    starts = range(ctx.dp.rank * size, count + ctx.dp.rank * size, block)
    # Ranks without samples in the last block repeat the last sample.
    samples = [[min(i, count - 1) for i in range(at, at + size)] for at in starts]
    together = run.plan.num_microbatches
    for first in range(0, len(samples), together):
        part = samples[first : first + together]
        batches = []
        for each in part:
            rows = read_batch(dataset, each).items()
            tensors = {name: torch.from_numpy(np.ascontiguousarray(row)) for name, row in rows}
            batches.append(place_for(run, tensors))
        for each, batch in zip(part, run.annotate(batches), strict=True):
            if names[0] not in batch.entries:  # not the last stage
                continue
            for name in names:
                rows = zigzag_join(batch[name], ctx.cp, 1)
                if ctx.tp.rank == 0 and ctx.cp.rank == 0:
                    files[name][each] = rows.cpu().numpy()
    for file in files.values():
        file.flush()


def _sizes(plan: Plan, built: Sequence[Any]) -> dict[str, int]:
    """Return the number of samples that a run reads of each split."""
    reads_all = plan.config.data.dataloader_type == "cyclic"
    return {
        split: min(len(dataset), wanted) if wanted and not reads_all else len(dataset)
        for split, dataset, wanted in zip(_SPLITS, built, num_samples(plan), strict=True)
        if dataset is not None
    }


def _meet(run: Run) -> None:
    all_reduce(torch.zeros(1, device=run.ctx.device), run.ctx.world)


def _description(plan: Plan, built: Sequence[Any]) -> dict[str, Any]:
    """Describe samples, objective and frozen model; None: values that are not compared."""
    config = plan.config
    return {
        "objective": config.objective.objective,
        "reference_model": config.objective.reference_model or None,
        "seq_length": config.batch.seq_length,
        "seed": config.run.seed,
        "num_samples": _sizes(plan, built),
        "lengths": [each["lengths_hash"] for each in describe_sources(built[0])],
        "top_k": config.distillation.distill_top_k,
        "temperature": config.distillation.distill_temperature,
    }
