"""A dataset gone through again and again, each epoch in an order of its own.

Megatron shuffles the documents of all epochs together, so its order depends on how many
samples a run needs. Here epoch e is built by itself, from the seed and e: the first
samples stay what they are however many more are wanted later, which a mixture that changes
during a run needs. Epoch 0 is Megatron's one-epoch order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.arrangement import Arrangement, TextRows
from mcore_data.datasets.blending import MapDataset, read_batch


class EpochsDataset:
    """``num_samples`` samples of a dataset, epoch after epoch.

    Args:
        build_epoch: makes the dataset of epoch e; all must have the same length.
        num_samples: samples wanted.
    """

    def __init__(self, build_epoch: Callable[[int], MapDataset], num_samples: int) -> None:
        self.build_epoch = build_epoch
        self.num_samples = num_samples
        self._epochs = {0: build_epoch(0)}
        self.per_epoch = len(self._epochs[0])

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: int) -> dict[str, Any]:
        return {key: value[0] for key, value in self.batch([sample]).items()}

    def batch(self, samples: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Samples stacked: each array has a leading dimension B."""
        places = np.asarray(samples)
        if not 0 <= places.min() <= places.max() < len(self):
            raise IndexError(f"sample {places.min()} to {places.max()} of {len(self)}")
        numbers, inside = np.divmod(places, self.per_epoch)
        if (numbers == numbers[0]).all():
            return read_batch(self.epoch(int(numbers[0])), inside.tolist())
        rows = [read_batch(self.epoch(e), [i]) for e, i in zip(numbers, inside, strict=True)]
        return {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}

    @property
    def arrangement(self) -> Arrangement | None:
        """As ``GPTDataset.arrangement``; None if the epochs have none."""
        return getattr(self.epoch(0), "arrangement", None)

    def write(
        self, samples: Sequence[int], rows: TextRows, places: NDArray[np.integer]
    ) -> None:
        """As ``GPTDataset.write``."""
        numbers, inside = np.divmod(np.asarray(samples), self.per_epoch)
        for number in np.unique(numbers):
            mine = numbers == number
            self.epoch(number).write(inside[mine].tolist(), rows, places[mine])

    def epoch(self, number: int) -> Any:
        """The dataset of one epoch; the last two used are kept."""
        number = int(number)
        if number not in self._epochs:
            recent = dict(list(self._epochs.items())[-1:])
            self._epochs = {**recent, number: self.build_epoch(number)}
        return self._epochs[number]
