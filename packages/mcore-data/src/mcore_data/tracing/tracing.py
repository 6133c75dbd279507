"""Maps samples to stored sequences and stored sequences to samples.

Both directions go through blends and epochs down to the stored sequences. They read the indices
from which samples are made, and never search the tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_data.datasets.blending import OrderedBlend
from mcore_data.datasets.epochs import EpochsDataset


@dataclass(frozen=True, slots=True)
class SampleRange:
    """A range of a stored sequence that a sample contains.

    Attributes:
        prefix: prefix of the ``.bin``/``.idx`` pair; "" for data that is not stored.
        sequence: number of the sequence in the pair.
        offset: index of the range's first token in the sequence.
        length: tokens of the range.
    """

    prefix: str
    sequence: int
    offset: int
    length: int


def trace(dataset: Any, sample: int) -> list[SampleRange]:
    """Return the ranges of stored sequences that a sample consists of, in order."""
    if isinstance(dataset, OrderedBlend):
        number = int(dataset.dataset_index[sample])
        return trace(dataset.datasets[number], int(dataset.sample_index[sample]))
    if isinstance(dataset, EpochsDataset):
        epoch, epoch_sample = divmod(sample, dataset.per_epoch)
        return trace(dataset.epoch(epoch), epoch_sample)
    prefix = dataset_prefix(dataset)
    return [SampleRange(prefix, *part) for part in dataset.sources(sample) if part[2]]


def find(dataset: Any, prefix: str, sequence: int) -> Iterator[int]:
    """Yield the samples that contain tokens of a stored sequence, in ascending order."""
    if isinstance(dataset, OrderedBlend):
        yield from sorted(
            int(position)
            for number, part in enumerate(dataset.datasets)
            for position in _positions_in_blend(dataset, number, find(part, prefix, sequence))
        )
    elif isinstance(dataset, EpochsDataset):
        for epoch in range(-(-len(dataset) // dataset.per_epoch)):
            for epoch_sample in find(dataset.epoch(epoch), prefix, sequence):
                if epoch * dataset.per_epoch + epoch_sample < len(dataset):
                    yield epoch * dataset.per_epoch + epoch_sample
    elif dataset_prefix(dataset) == prefix:
        yield from sorted(dataset.samples_with(sequence))


def prefixes(dataset: Any) -> list[Any]:
    """List the stored sequences below a dataset, each once, with prefix and lengths."""
    if isinstance(dataset, OrderedBlend):
        stored = [each for part in dataset.datasets for each in prefixes(part)]
    elif isinstance(dataset, EpochsDataset):
        stored = prefixes(dataset.epoch(0))
    else:
        stored = [dataset.sequences]
    return list({getattr(each, "prefix", ""): each for each in stored}.values())


def dataset_prefix(dataset: Any) -> str:
    """Return the prefix of the pair below a dataset that is not a blend."""
    return getattr(dataset.sequences, "prefix", "")


def _positions_in_blend(
    blend: OrderedBlend, number: int, samples: Iterator[int]
) -> Iterator[int]:
    positions = np.flatnonzero(blend.dataset_index == number)
    yield from (positions[sample] for sample in samples if sample < len(positions))
