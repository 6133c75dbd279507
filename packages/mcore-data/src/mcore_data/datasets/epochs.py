"""A dataset repeated for many epochs, each epoch in a different order.

Megatron shuffles the documents of all epochs together, so its order depends on the number of
samples of the run. Here epoch e is built separately, from the seed and e: the first samples do
not depend on the length of the run, which a mixture that changes during a run requires. Epoch 0
is Megatron's one-epoch order.
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
        build_epoch: builds the dataset of epoch e; all epochs must have the same length.
        num_samples: length of this dataset.
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
        """Return samples stacked: each array has a leading dimension B."""
        indices = np.asarray(samples)
        if not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"sample {indices.min()} to {indices.max()} of {len(self)}")
        epochs, inner_samples = np.divmod(indices, self.per_epoch)
        if (epochs == epochs[0]).all():
            return read_batch(self.epoch(int(epochs[0])), inner_samples.tolist())
        pairs = zip(epochs, inner_samples, strict=True)
        rows = [read_batch(self.epoch(epoch), [sample]) for epoch, sample in pairs]
        return {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}

    @property
    def arrangement(self) -> Arrangement | None:
        """As ``GPTDataset.arrangement``; None if the epochs have none."""
        return getattr(self.epoch(0), "arrangement", None)

    def write(
        self, samples: Sequence[int], rows: TextRows, row_ids: NDArray[np.integer]
    ) -> None:
        """As ``GPTDataset.write``."""
        epochs, inner_samples = np.divmod(np.asarray(samples), self.per_epoch)
        for epoch in np.unique(epochs):
            selected = epochs == epoch
            self.epoch(epoch).write(inner_samples[selected].tolist(), rows, row_ids[selected])

    def epoch(self, number: int) -> Any:
        """Return the dataset of one epoch; the two latest datasets are cached."""
        number = int(number)
        if number not in self._epochs:
            recent = dict(list(self._epochs.items())[-1:])
            self._epochs = {**recent, number: self.build_epoch(number)}
        return self._epochs[number]
