"""Mixes datasets by weight, in a deterministic order.

Each sample comes from the dataset that is furthest below its share; ties go to the lowest
number. This is Megatron's rule and gives Megatron's order exactly, with one exception: a
dataset of weight 0 never gives a sample, while in Megatron it can win a tie.
"""

import hashlib
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_data.indexed.caching import cached_arrays

_MIN_CHUNK = 256
_MAX_DATASETS = np.iinfo(np.int16).max - 1


class MapDataset(Protocol):
    """Anything with a length and samples by number."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, sample: int, /) -> dict[str, Any]:
        """Return one sample."""


def normalize_weights(weights: Sequence[float]) -> NDArray[np.float64]:
    """Return weights scaled to sum 1."""
    values = np.asarray(weights, np.float64)
    if not 1 <= len(values) <= _MAX_DATASETS:
        raise ValueError(f"{len(values)} datasets cannot be blended: 1 to {_MAX_DATASETS} can.")
    if not np.isfinite(values).all() or values.min() < 0 or values.sum() == 0:
        raise ValueError(f"blending weights {list(weights)}: give numbers >= 0, not all 0.")
    return values / values.sum()


def blend_by_weight(
    weights: Sequence[float], size: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return for each sample of a blend its dataset and its number in the dataset."""
    return _with_numbers(_draw(normalize_weights(weights), size), len(weights))


def blend_all(sizes: Sequence[int]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return the order of a blend that uses every sample of every dataset exactly once."""
    counts = np.asarray(sizes, np.int64)
    shares, size = normalize_weights(sizes), int(counts.sum())
    drawn = _draw(shares, size)
    if not np.array_equal(np.bincount(drawn, minlength=len(counts)), counts):
        # By rounding, one dataset would give more samples than it has. Draw again with the rule
        # that a used-up dataset gives no more.
        drawn = draw_slowly(shares, size, counts)
    return _with_numbers(drawn, len(counts))


def draw_slowly(
    shares: NDArray[np.float64], size: int, available: NDArray[np.int64] | None = None
) -> NDArray[np.int16]:
    """Return the dataset of each sample, drawn one by one: reference of ``blend_by_weight``.

    Args:
        shares: share of each dataset, sum 1.
        size: number of samples.
        available: samples of each dataset; a used-up dataset gives no more.
    """
    counts = np.zeros(len(shares), np.int64)
    drawn = np.empty(size, np.int16)
    for step in range(size):
        deficit = np.where(shares > 0, shares * max(step, 1) - counts, -np.inf)
        if available is not None:
            deficit[counts >= available] = -np.inf
        drawn[step] = chosen = int(deficit.argmax())
        counts[chosen] += 1
    return drawn


def draw_phases(
    phases: Sequence[tuple[int, Sequence[float]]], size: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return the order of a mixture whose weights change; datasets continue across phases.

    Args:
        phases: (first sample, weights of all datasets) of each phase; the first begins at 0. A
            dataset of weight 0 gives no sample in the phase.
        size: total number of samples.
    """
    begins = [begin for begin, _ in phases]
    if not begins or begins[0] != 0 or any(b <= a for a, b in pairwise(begins)):
        raise ValueError(
            f"the phases of a mixture begin at samples {begins}: the first must begin at 0 and "
            "each later than the one before."
        )
    stops = [*(min(begin, size) for begin in begins[1:]), size]
    drawn = [
        _draw(normalize_weights(weights), stop - begin)
        for (begin, weights), stop in zip(phases, stops, strict=True)
        if stop > begin
    ]
    return _with_numbers(np.concatenate(drawn), len(phases[0][1]))


class OrderedBlend:
    """Datasets mixed in a given order; samples have an additional ``dataset_id``.

    Args:
        datasets: map-style datasets.
        dataset_index: int16, the dataset of each sample.
        sample_index: int64, the number of each sample in its dataset.

    Raises:
        ValueError: if a dataset has fewer samples than the blend takes from it.
    """

    def __init__(
        self,
        datasets: Sequence[MapDataset],
        dataset_index: NDArray[np.int16],
        sample_index: NDArray[np.int64],
    ) -> None:
        self.datasets = datasets
        self.dataset_index = dataset_index
        self.sample_index = sample_index
        for number, taken in enumerate(self.ledger(len(self))):
            if taken > len(datasets[number]):
                raise ValueError(
                    f"the blend takes {taken} samples from dataset {number}, which has "
                    f"{len(datasets[number])}. Raise --mid-level-dataset-surplus."
                )

    def __len__(self) -> int:
        """Return the number of samples of the blend."""
        return len(self.dataset_index)

    def __getitem__(self, sample: int | None) -> dict[str, Any]:
        """Return a sample of the blend; None: one without any loss."""
        if sample is None:
            filler = self[0]
            return filler | {"loss_mask": np.zeros_like(filler["loss_mask"])}
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        number = int(self.dataset_index[sample])
        return self.datasets[number][int(self.sample_index[sample])] | {
            "dataset_id": np.array(number, np.int64)
        }

    def batch(self, samples: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Return samples stacked: each array has a leading dimension B."""
        indices = np.asarray(samples)
        if not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"sample {indices.min()} to {indices.max()} of {len(self)}")
        numbers = self.dataset_index[indices]
        rows_of = {
            number: np.flatnonzero(numbers == number) for number in np.unique(numbers).tolist()
        }
        inner_samples = self.sample_index[indices]
        arrangements = [getattr(self.datasets[n], "arrangement", None) for n in rows_of]
        shared = arrangements[0]
        if shared and all(other == shared for other in arrangements):
            # Each dataset writes its rows in place, without another copy.
            text = shared.empty_rows(len(indices))
            for number, rows in rows_of.items():
                self.datasets[number].write(inner_samples[rows].tolist(), text, rows)  # pyrefly: ignore
            stacked = shared.arrange(text)
        else:
            stacked = self._stack(rows_of, inner_samples)
        return stacked | {"dataset_id": numbers.astype(np.int64)}

    def _stack(
        self, rows_of: dict[int, NDArray[np.intp]], inner_samples: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """Copy samples to their rows; ``rows_of`` maps a dataset to rows of the batch."""
        stacked: dict[str, NDArray[Any]] = {}
        for number, rows in rows_of.items():
            for key, values in read_batch(
                self.datasets[number], inner_samples[rows].tolist()
            ).items():
                if key not in stacked:
                    shape = (len(inner_samples), *values.shape[1:])
                    stacked[key] = np.empty(shape, values.dtype)
                stacked[key][rows] = values
        return stacked

    def ledger(self, num_samples: int) -> list[int]:
        """Return how many of the first ``num_samples`` samples come from each dataset."""
        dataset_index = self.dataset_index[:num_samples]
        return np.bincount(dataset_index, minlength=len(self.datasets)).tolist()


class BlendedDataset(OrderedBlend):
    """Datasets mixed by weight.

    Args:
        datasets: map-style datasets.
        weights: share of each dataset; None uses every sample of each dataset exactly once.
        size: samples in the blend; required with weights.
        cache_folder: folder in which the order is cached for later runs and other ranks.

    Raises:
        ValueError: if a dataset has fewer samples than the blend takes from it.
    """

    def __init__(
        self,
        datasets: Sequence[MapDataset],
        weights: Sequence[float] | None,
        size: int | None = None,
        cache_folder: str | Path = "",
    ) -> None:
        sizes = [len(dataset) for dataset in datasets]
        if weights is not None and size is None:
            raise ValueError(
                "a weighted blend needs a size: give --train-iters or --train-samples."
            )

        def build() -> tuple[NDArray[np.int16], NDArray[np.int64]]:
            if weights is None:
                return blend_all(sizes)
            assert size is not None
            return blend_by_weight(weights, size)

        spec = f"blend-1 {sizes}" if weights is None else f"blend-1 {list(weights)} {size}"
        key = hashlib.blake2b(spec.encode(), digest_size=16).hexdigest()
        order = cached_arrays(cache_folder, key, ("dataset_index", "dataset_sample"), build)
        super().__init__(datasets, *(part[:size] for part in order))


def read_batch(dataset: MapDataset, samples: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Return stacked samples of a map-style dataset, by its ``batch`` if it has one."""
    batch = getattr(dataset, "batch", None)
    if batch is not None:
        return batch(samples)
    rows = [dataset[sample] for sample in samples]
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _draw(shares: NDArray[np.float64], size: int) -> NDArray[np.int16]:
    """Return the order of ``draw_slowly``; datasets of share 0 give no sample."""
    positive = np.flatnonzero(shares).astype(np.int16)
    return positive[_draw_all(shares[positive], size)]


def _draw_all(shares: NDArray[np.float64], size: int) -> NDArray[np.int16]:
    """Return the order of ``draw_slowly``, computed for many chunks of samples in parallel.

    A chunk depends only on the counts at its start, which are approximately known, since no
    count deviates far from its share. So all chunks are drawn at once from estimated counts,
    after a warm-up of half a chunk that corrects most wrong estimates. A chunk is final if it
    starts with the counts at the end of the previous chunk; the others are drawn again from
    these counts. The first chunk starts from exact counts, so the result is exact.
    """
    stride = max(_MIN_CHUNK, math.isqrt(size))
    begins = np.arange(0, max(size, 1), stride)
    starts = np.zeros((len(begins), len(shares)), np.int64)
    warm_up = begins[1:] - stride // 2
    estimates = _estimate_counts(shares, warm_up)
    _, starts[1:] = _draw_chunks(shares, warm_up, estimates, stride // 2)
    drawn = np.empty((len(begins), stride), np.int16)
    ends = np.empty_like(starts)
    stale = np.arange(len(begins))
    while len(stale):
        drawn[stale], ends[stale] = _draw_chunks(shares, begins[stale], starts[stale], stride)
        stale = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
        starts[stale] = ends[stale - 1]
    return drawn.reshape(-1)[:size]


def _draw_chunks(
    shares: NDArray[np.float64], begins: NDArray[np.int64], counts: NDArray[Any], length: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Draw ``length`` samples of each chunk; return their datasets and the final counts."""
    counts = counts.astype(np.float64)
    rows = np.arange(len(begins))
    drawn = np.empty((length, len(begins)), np.int16)
    for step in range(length):
        deficit = np.maximum(begins + step, 1)[:, None] * shares
        deficit -= counts
        drawn[step] = chosen = deficit.argmax(axis=1)
        counts[rows, chosen] += 1
    return drawn.T, counts.astype(np.int64)


def _estimate_counts(
    shares: NDArray[np.float64], steps: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return counts that sum to ``steps``: shares rounded down, largest remainders up."""
    exact = steps[:, None] * shares
    counts = np.floor(exact).astype(np.int64)
    missing = steps - counts.sum(axis=1)
    order = np.argsort(counts - exact, axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    return counts + (rank < missing[:, None])


def _with_numbers(
    drawn: NDArray[np.int16], num_datasets: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Number the samples of each dataset consecutively; return (drawn, numbers)."""
    numbers = np.empty(len(drawn), np.int64)
    for dataset in range(num_datasets):
        rows = np.flatnonzero(drawn == dataset)
        numbers[rows] = np.arange(len(rows))
    return drawn, numbers
