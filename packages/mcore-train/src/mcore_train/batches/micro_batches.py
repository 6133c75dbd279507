"""Yields the micro-batches of one rank, for training and evaluation.

Map-style datasets are read by the sampler of ``--dataloader-type``. With ``external`` the
caller gives the batches: as an iterable, or as a function of a position in the data, by which a
run also continues at the exact sample, and on another number of ranks.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_base.options import flag
from mcore_data.loading.loader import build_loader
from mcore_data.preprocessing.workers import max_workers
from mcore_models.protocol import MicroBatch
from mcore_parallel.launch.launcher import num_cores
from mcore_train.assembly import Run
from mcore_train.batches.batch_ramp import piece_length
from mcore_train.batches.datasets import Dataset
from mcore_train.losses import place

log = logging.getLogger(__name__)

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPosition:
    """Position of a rank's next micro-batches, for a function that returns them."""

    consumed_samples: int
    """Sequences that all ranks together have read; 0 for validation."""
    micro_batch_size: int
    """Rows of a micro-batch."""
    seq_length: int
    """Tokens of a row."""
    dp_rank: int
    """This rank along the data axis."""
    dp_size: int
    """Ranks that read different sequences."""


BatchSource = Iterable[Batch] | Callable[[BatchPosition], Iterable[Batch]]
"""Type of the members of ``Datasets`` with ``--dataloader-type external``."""


def train_batches(run: Run) -> Iterator[list[MicroBatch]]:
    """Yield this rank's micro-batches, step after step, from the run's progress on.

    If the objective has a frozen model, its results are added by a forward pass of all ranks.

    Raises:
        ValueError: if external batches cannot continue at the run's progress, or have other
            shapes than the run.
        RuntimeError: if the data end before the run does.
    """
    wanted, cores = run.plan.config.data.num_workers, num_cores()
    if wanted > (most := max_workers(cores)):
        log.warning("--num-workers %d: starting %d, the most for %d cores", wanted, most, cores)
    if run.objective.makes_batches():
        yield from run.objective.open_batches(run)
        return
    source = iter(_open(run, run.datasets.train, run.progress.consumed_train_samples))
    options = run.plan.config.batch
    while True:
        consumed = run.progress.consumed_train_samples
        length = piece_length(options.seq_length_schedule, options.seq_length, consumed)
        yield run.annotate(
            [
                place_for(run, cut_rows(_next(source, run), length))
                for _ in range(run.plan.num_microbatches_at(consumed))
            ]
        )


def cut_rows(batch: Batch, length: int) -> Batch:
    """Cut the packed rows of a batch into pieces without attention between them.

    Args:
        batch: with position_ids and cu_seqlens; returned as it is if no row is longer than
            ``length``.
        length: tokens of a piece; the last piece of a row may be shorter.
    """
    positions = batch.get("position_ids")
    if positions is None or positions.shape[1] <= length:
        return batch
    num_tokens = positions.shape[1]
    marks = torch.arange(0, num_tokens, length, dtype=batch["cu_seqlens"].dtype)
    rows = [torch.cat([row, marks]).unique() for row in batch["cu_seqlens"]]
    borders = batch["cu_seqlens"].new_full((len(rows), num_tokens + 1), num_tokens)
    for row, starts in zip(borders, rows, strict=True):
        row[: len(starts)] = starts
    # Positions count from the start of the document or of the piece, whichever is later.
    from_piece = torch.arange(num_tokens, dtype=positions.dtype) % length
    cut = {"cu_seqlens": borders, "position_ids": torch.minimum(positions, from_piece)}
    return {**batch, **cut, "max_seqlen": borders.diff(dim=1).amax(1)}


def place_for(run: Run, batch: Batch) -> MicroBatch:
    """Move the entries of a batch that this rank reads to its device; no communication."""
    return place(
        run.chunks[0].prepare(batch),
        run.ctx,
        has_own_positions=run.plan.config.data.reset_position_ids,
        entries=run.entries,
        read=run.read_entries,
    )


def valid_batches(run: Run, dataset: Dataset) -> tuple[Iterable[Batch], int]:
    """Return the micro-batches of a validation, from the dataset's start, and their number."""
    if run.plan.config.data.full_validation:
        return _all_batches(run, dataset)
    batches = _open(run, dataset, 0, is_trained=False)
    if isinstance(batches, Iterator):
        raise ValueError(
            "--dataloader-type external: the validation batches can be read only once, and "
            "every validation reads them: give a list, or a function that starts anew."
        )
    return batches, run.plan.config.evaluation.eval_iters * _eval_microbatches(run)


def final_batches(run: Run) -> tuple[Iterable[Batch], int]:
    """Return the micro-batches of the test data at the end of a run, and their number.

    The number is that of a validation, or all test data if they are fewer.
    """
    plan, dataset = run.plan, run.datasets.test
    eval_iters = plan.config.evaluation.eval_iters
    is_external = plan.config.data.dataloader_type == "external"
    if not is_external and len(dataset) < eval_iters * plan.global_batch_size:
        return _all_batches(run, dataset)
    return _open(run, dataset, 0, is_trained=False), eval_iters * _eval_microbatches(run)


def _all_batches(run: Run, dataset: Dataset) -> tuple[Iterable[Batch], int]:
    size = _eval_size(run)
    loader = build_loader(dataset, dataloader_type="full", **_share(run, size))
    return loader, len(loader)  # pyrefly: ignore[bad-argument-type]


def _eval_size(run: Run) -> int:
    """Return the sequences of one forward pass of a validation."""
    config = run.plan.config
    return config.evaluation.eval_micro_batch_size or config.batch.micro_batch_size


def _eval_microbatches(run: Run) -> int:
    """Return the forward passes of a data rank for one global batch of a validation."""
    return run.plan.global_batch_size // (run.ctx.dp.size * _eval_size(run))


def _open(
    run: Run, dataset: Dataset, consumed_samples: int, *, is_trained: bool = True
) -> Iterable[Batch]:
    config = run.plan.config
    if config.data.dataloader_type == "external":
        return _open_external(run, dataset, consumed_samples)
    return build_loader(
        dataset,
        consumed_samples=consumed_samples,
        dataloader_type=config.data.dataloader_type,
        seed=config.run.seed,
        **_share(run, config.batch.micro_batch_size if is_trained else _eval_size(run)),
    )


def _share(run: Run, micro_batch_size: int) -> dict[str, Any]:
    """Return the arguments of ``build_loader`` that select and read this rank's samples."""
    data = run.plan.config.data
    is_packed = data.reset_attention_mask or data.dataloader_inter_document_masking
    is_packed = is_packed or data.sft or data.preferences
    entries = run.entries
    # Load one entry of each length even if this rank reads none of them: its shape gives the
    # length of the rows.
    firsts = {entry.length: name for name, entry in reversed(list(entries.items()))}
    read = {*firsts.values()} | run.read_entries
    if data.reset_position_ids or is_packed or not run.datasets.sources:
        read |= {"position_ids"}
    return {
        "without": {*entries, "position_ids"} - read,
        "micro_batch_size": micro_batch_size,
        "dp_rank": run.ctx.dp.rank,
        "dp_size": run.ctx.dp.size,
        "num_workers": min(data.num_workers, max_workers(num_cores())),
        "pin_memory": run.ctx.device.type == "cuda",
    }


def _open_external(run: Run, source: BatchSource, consumed_samples: int) -> Iterable[Batch]:
    batch = run.plan.config.batch
    if callable(source):
        return source(
            BatchPosition(
                consumed_samples=consumed_samples,
                micro_batch_size=batch.micro_batch_size,
                seq_length=batch.seq_length,
                dp_rank=run.ctx.dp.rank,
                dp_size=run.ctx.dp.size,
            )
        )
    if consumed_samples:
        raise ValueError(
            f"--dataloader-type external: the run continues after {consumed_samples} samples, "
            "and an iterable has no position. Give a function of BatchPosition, which "
            "returns the batches from there on."
        )
    return source


def _next(source: Iterator[Batch], run: Run) -> Batch:
    batch = next(source, None)
    if batch is None:
        progress = run.progress
        raise RuntimeError(
            f"the training data end within step {progress.iteration + 1} of "
            f"{run.plan.train_iters}, after {progress.consumed_train_samples} samples."
        )
    if run.plan.config.data.dataloader_type == "external":
        _check(batch, run)
    return batch


def _check(batch: Batch, run: Run) -> None:
    """Raise if a batch of the caller has other shapes than the run was planned with."""
    options = run.plan.config.batch
    entries = run.entries
    needed = {n: entry.length for n, entry in entries.items() if not entry.is_derived}
    if run.plan.config.data.reset_position_ids or "cu_seqlens" in batch:
        needed["position_ids"] = "seq_length"
    for name, length in needed.items():
        row = (getattr(options, length),) if length else ()
        expected = (options.micro_batch_size, *row)
        shape = tuple(batch[name].shape) if name in batch else None
        if shape is None or shape[: len(expected)] != expected:
            fault = f"of shape {shape}" if shape else "missing"
            flags = ["--micro-batch-size", *([flag(length)] if length else [])]
            raise ValueError(
                f"--dataloader-type external: {name} is {fault}, and every micro-batch needs "
                f"it as {expected} ({', '.join(flags)})."
            )
