"""Makes batches of torch tensors from a map-style dataset; the only module that needs torch.

Each micro-batch is a dict of [B, S] tensors of one data-parallel rank. Many samples are read at
once and cut into micro-batches as views; worker processes read them while a step runs.
"""

import signal
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
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
_JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
    """Return an iterable of one data-parallel rank's micro-batches.

    Args:
        dataset: map-style dataset of numpy samples; with ``external`` an iterable of batches,
            which is returned unchanged.
        micro_batch_size: samples in a batch.
        dp_rank: rank along the data axis.
        dp_size: ranks along the data axis.
        consumed_samples: samples that all ranks together have read; the batches continue after
            these, also under another number of ranks.
        dataloader_type: ``single`` reads the dataset once; ``cyclic`` repeats it endlessly in
            new permutations; ``full`` reads it once, including a last incomplete block, which
            is filled with samples without loss. All but ``cyclic`` have a ``len``.
        num_workers: processes that prepare batches; 0 prepares them in this process. Workers
            ignore the signals that a terminal or a batch system sends to all processes of a
            job, and end with this process.
        seed: seed of the permutations of ``cyclic``.
        pin_memory: whether to put batches in page-locked memory, for asynchronous copies.
        without: keys of samples that are not copied into batches.

    Raises:
        ValueError: if no samples are left, or sizes are not valid.
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
    # Datasets without ``batch`` may have rows of another length in each micro-batch.
    is_joint = hasattr(dataset, "batch")
    num_joined = max(1, _samples_at_once(dataset) // micro_batch_size) if is_joint else 1
    with _many_workers_allowed():
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
        # The traceback of an exception may keep the loader alive until the process waits for
        # the workers at exit.
        Finalize(loader, _end_workers, (ref(loader),), exitpriority=0)
    return _MicroBatches(loader, sampler, micro_batch_size)


@contextmanager
def _many_workers_allowed() -> Iterator[None]:
    """Hide torch's warning of more workers than cores: workers that wait for files use none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


def _ignore_signals(_worker: int) -> None:
    """Ignore signals to the job in a worker; the main process handles them."""
    for number in _JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end_workers(loader: ReferenceType[DataLoader]) -> None:
    """Kill the workers of a loader that still exists when this process exits."""
    workers = getattr(getattr(loader(), "_iterator", None), "_workers", ())
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if one is killed
    for worker in workers:
        worker.kill()


def _samples_at_once(dataset: Any) -> int:
    """Return how many samples to read at once: fewer if samples are large."""
    largest = max(value.size for value in dataset[0].values()) if len(dataset) else 1
    return min(_SAMPLES_AT_ONCE, _NUMBERS_AT_ONCE // largest)


@dataclass(frozen=True, slots=True)
class _MicroBatches:
    """Cuts the large batches of a loader into micro-batches."""

    loader: DataLoader
    sampler: SingleSampler | CyclicSampler | FullSampler
    micro_batch_size: int

    def __len__(self) -> int:
        return len(self.sampler)  # pyrefly: ignore[bad-argument-type] an endless one has none

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        with _many_workers_allowed():
            batches = iter(self.loader)
        for batch in batches:
            size = len(next(iter(batch.values())))
            for first in range(0, size, self.micro_batch_size):
                yield {
                    key: value[first : first + self.micro_batch_size]
                    for key, value in batch.items()
                }


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Batch sampler that joins the indices of ``num_batches`` micro-batches."""

    sampler: SingleSampler | CyclicSampler | FullSampler
    num_batches: int

    def __iter__(self) -> Iterator[list[int | None]]:
        batches = iter(self.sampler)
        while group := list(islice(batches, self.num_batches)):
            yield [index for batch in group for index in batch]


@dataclass(frozen=True, slots=True)
class _Batches:
    """Adapter through which torch's loader reads many samples at once; None: without loss."""

    dataset: MapDataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, samples: list[int | None]) -> dict[str, Any]:
        batch = read_batch(self.dataset, [sample or 0 for sample in samples])
        if None in samples:
            batch["loss_mask"] = batch["loss_mask"].copy()
            batch["loss_mask"][[sample is None for sample in samples]] = 0
        return batch


@dataclass(frozen=True, slots=True)
class _Collate:
    """Converts arrays to tensors that share their memory; copies views before page-locking."""

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
