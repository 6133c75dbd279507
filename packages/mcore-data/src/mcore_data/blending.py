"""Mixing datasets by weight: who gives the next sample, decided without chance.

At each step the dataset that is furthest behind its share gives one; ties go to the lowest
number. This is Megatron's rule, and its order is reproduced exactly.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_MOST_DATASETS = np.iinfo(np.int16).max - 1


class MapDataset(Protocol):
    """Anything with a length and samples by number."""

    def __len__(self) -> int:
        """Samples."""
        ...

    def __getitem__(self, sample: int, /) -> dict[str, Any]:
        """One sample."""
        ...


def normalize_weights(weights: Sequence[float]) -> NDArray[np.float64]:
    """Weights with sum 1.

    Raises:
        ValueError: if there are none or too many, one is negative, or all are 0.
    """
    values = np.asarray(weights, np.float64)
    if not 1 <= len(values) <= _MOST_DATASETS:
        raise ValueError(
            f"{len(values)} datasets cannot be blended: 1 to {_MOST_DATASETS} can."
        )
    if not np.isfinite(values).all() or values.min() < 0 or values.sum() == 0:
        raise ValueError(f"blending weights {list(weights)}: give numbers >= 0, not all 0.")
    return values / values.sum()


def blend_by_weight(
    weights: Sequence[float], size: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Order of a blend of known size: dataset of each sample, and its number there."""
    return _blend_slowly(normalize_weights(weights), size, None)


def blend_all(sizes: Sequence[int]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Order of a blend that uses every sample of every dataset exactly once."""
    counts = np.asarray(sizes, np.int64)
    return _blend_slowly(normalize_weights(sizes), int(counts.sum()), counts)


class BlendedDataset:
    """Datasets mixed into one; a sample also says ``dataset_id``, where it comes from.

    Args:
        datasets: map-style datasets.
        weights: share of each; None uses every sample of each exactly once.
        size: samples in the blend; needed with weights.

    Raises:
        ValueError: if a dataset has fewer samples than the blend takes from it.
    """

    def __init__(
        self,
        datasets: Sequence[MapDataset],
        weights: Sequence[float] | None,
        size: int | None = None,
    ) -> None:
        self.datasets = datasets
        if weights is None:
            self.dataset_index, self.sample_index = blend_all([len(d) for d in datasets])
            self._cut(size)
        else:
            if size is None:
                raise ValueError("a weighted blend needs a size: give --train-samples or so.")
            self.dataset_index, self.sample_index = blend_by_weight(weights, size)
        taken = np.bincount(self.dataset_index, minlength=len(datasets))
        for number, dataset in enumerate(datasets):
            if taken[number] > len(dataset):
                raise ValueError(
                    f"the blend takes {taken[number]} samples from dataset {number}, which has "
                    f"{len(dataset)}. Raise --mid-level-dataset-surplus."
                )

    def __len__(self) -> int:
        """Samples of the blend."""
        return len(self.dataset_index)

    def __getitem__(self, sample: int | None) -> dict[str, Any]:
        """Sample of the blend; None gives one that counts nothing."""
        if sample is None:
            filler = self[0]
            return filler | {"loss_mask": np.zeros_like(filler["loss_mask"])}
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        number = int(self.dataset_index[sample])
        return self.datasets[number][int(self.sample_index[sample])] | {
            "dataset_id": np.array(number, np.int64)
        }

    def _cut(self, size: int | None) -> None:
        if size is not None:
            self.dataset_index = self.dataset_index[:size]
            self.sample_index = self.sample_index[:size]


def _blend_slowly(
    weights: NDArray[np.float64], size: int, available: NDArray[np.int64] | None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The rule, one step at a time; ``available`` retires datasets that are used up."""
    counts = np.zeros(len(weights), np.int64)
    dataset_index = np.empty(size, np.int16)
    sample_index = np.empty(size, np.int64)
    for step in range(size):
        behind = weights * max(step, 1) - counts
        if available is not None:
            behind[counts >= available] = -np.inf
        chosen = int(behind.argmax())
        dataset_index[step] = chosen
        sample_index[step] = counts[chosen]
        counts[chosen] += 1
    return dataset_index, sample_index
