"""From a map-style dataset to batches of torch tensors: the only room that needs torch.

Each micro-batch is a dict of [B, S] tensors of one data-parallel rank. Samples are made many
at a time and handed out as views, and worker processes prepare the next ones while the step
runs.
"""

import signal
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing.util import Finalize
from typing import Any, Literal
from weakref import ReferenceType, ref

import torch
from torch.utils.data import DataLoader

from mcore_data.datasets.blending import MapDataset, read_batch
from mcore_data.loading.sampler import CyclicSampler, FullSampler, SingleSampler

_PREFETCH = 4
_SAMPLES_AT_ONCE = 128
_NUMBERS_AT_ONCE = 1 << 19
_OF_A_JOB = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def build_loader(
    dataset: MapDataset | Iterable[dict[str, torch.Tensor]],
    *,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    consumed_samples: int = 0,
    dataloader_type: Literal["single", "cyclic", "full", "external"] = "single",
    num_workers: int = 0,
    seed: int = 1234,
    pin_memory: bool = False,
    without: Collection[str] = (),
) -> Iterable[dict[str, torch.Tensor]]:
    """Micro-batches of one data-parallel rank, from a place in the data on.

    Args:
        dataset: map-style dataset of numpy samples; with ``external`` the loader itself,
            which is returned as it is.
        micro_batch_size: samples in a batch.
        dp_rank: rank along the data axis.
        dp_size: ranks along the data axis.
        consumed_samples: samples that all ranks together have had; the batches continue
            there, whatever the number of ranks was before.
        dataloader_type: ``single`` goes through the dataset once, ``cyclic`` for ever in new
            permutations, ``full`` once to the last sample: what the last micro-batches are
            short of is filled up with samples that count nothing, and ``len`` is known.
        num_workers: processes that prepare batches; 0 prepares them in this one. They ignore
            the signals that a terminal or a batch system sends to every process of a job, and
            end with the process that reads the batches.
        seed: of the permutations of ``cyclic``.
        pin_memory: put batches where a GPU copies them from without waiting.
        without: entries of samples that nothing reads: they are not copied into batches.

    Raises:
        ValueError: if nothing is left of the data, or sizes make no sense.
    """
    if dataloader_type == "external":
        return dataset  # pyrefly: ignore
    share = {
        "num_samples": len(dataset),  # pyrefly: ignore
        "micro_batch_size": micro_batch_size,
        "dp_rank": dp_rank,
        "dp_size": dp_size,
    }
    sampler: SingleSampler | CyclicSampler | FullSampler
    if dataloader_type == "full":
        sampler = FullSampler(**share)
    elif dataloader_type == "cyclic":
        sampler = CyclicSampler(**share, consumed_samples=consumed_samples, seed=seed)
    else:
        sampler = SingleSampler(**share, consumed_samples=consumed_samples)
    # Rows of other datasets may be of other lengths in each micro-batch.
    is_joint = hasattr(dataset, "batch")
    num_joined = max(1, _samples_at_once(dataset) // micro_batch_size) if is_joint else 1
    with warnings.catch_warnings():
        # Workers may be more than cores: some wait for files.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader = DataLoader(
            _Batches(dataset),  # pyrefly: ignore
            batch_sampler=_Grouped(sampler, num_joined),
            num_workers=num_workers,
            prefetch_factor=_PREFETCH if num_workers else None,
            worker_init_fn=_ignore_signals,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            collate_fn=_Collate(pin_memory, frozenset(without)),  # pyrefly: ignore[bad-argument-type]
        )
    if num_workers:
        # A fault's traceback may hold the loader until its workers are waited for.
        Finalize(loader, _end_workers, (ref(loader),), exitpriority=0)
    return _MicroBatches(loader, sampler, micro_batch_size)


def _ignore_signals(_worker: int) -> None:
    """Leave it to the reader of the batches how a signal to the whole job ends it."""
    for number in _OF_A_JOB:
        signal.signal(number, signal.SIG_IGN)


def _end_workers(loader: ReferenceType[DataLoader]) -> None:
    """End the workers of a loader that is still there when this process exits."""
    iterator = getattr(loader(), "_iterator", None)
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()


def _samples_at_once(dataset: Any) -> int:
    """Samples to make at once: many share a fixed cost, but long ones would fill memory."""
    largest = max(value.size for value in dataset[0].values()) if len(dataset) else 1
    return min(_SAMPLES_AT_ONCE, _NUMBERS_AT_ONCE // largest)


@dataclass(frozen=True, slots=True)
class _MicroBatches:
    """Cuts what a loader made at once into micro-batches."""

    loader: DataLoader
    sampler: SingleSampler | CyclicSampler | FullSampler
    micro_batch_size: int

    def __len__(self) -> int:
        return len(self.sampler)  # pyrefly: ignore[bad-argument-type] an endless one has none

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for made in self.loader:
            size = len(next(iter(made.values())))
            for first in range(0, size, self.micro_batch_size):
                yield {
                    key: value[first : first + self.micro_batch_size]
                    for key, value in made.items()
                }


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Joins the indices of some micro-batches; the last group may be of fewer."""

    sampler: SingleSampler | CyclicSampler | FullSampler
    num_batches: int

    def __iter__(self) -> Iterator[list[int | None]]:
        batches = iter(self.sampler)
        while group := list(islice(batches, self.num_batches)):
            yield [index for batch in group for index in batch]


@dataclass(frozen=True, slots=True)
class _Batches:
    """A dataset from which torch's loader fetches many samples at once; None is a filler."""

    dataset: MapDataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, samples: list[int | None]) -> dict[str, Any]:
        made = read_batch(self.dataset, [sample or 0 for sample in samples])
        if None in samples:
            made["loss_mask"] = made["loss_mask"].copy()
            made["loss_mask"][[sample is None for sample in samples]] = 0
        return made


@dataclass(frozen=True, slots=True)
class _Collate:
    """Arrays to tensors that share their memory; contiguous ones where a GPU copies them."""

    contiguous: bool
    without: frozenset[str]

    def __call__(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        tensors = {
            key: torch.from_numpy(value)
            for key, value in batch.items()
            if key not in self.without
        }
        if self.contiguous:
            tensors = {key: value.contiguous() for key, value in tensors.items()}
        return tensors
