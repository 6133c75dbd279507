"""Where a sample comes from, and where a document went.

Both look through blends and epochs down to the stored sequences. Nothing is searched for in
the tokens: the same indices that make a sample say what it is made of.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_data.datasets.blending import OrderedBlend
from mcore_data.datasets.epochs import EpochsDataset


@dataclass(frozen=True, slots=True)
class SampleRange:
    """A range of a stored sequence that stands in a sample.

    Attributes:
        prefix: of the ``.bin``/``.idx`` pair; "" for data that is not stored.
        sequence: number of the sequence in the pair.
        offset: first token, in the sequence.
        length: tokens.
    """

    prefix: str
    sequence: int
    offset: int
    length: int


def trace(dataset: Any, sample: int) -> list[SampleRange]:
    """Say which ranges of which sequences make a sample, in their order in it."""
    if isinstance(dataset, OrderedBlend):
        number = int(dataset.dataset_index[sample])
        return trace(dataset.datasets[number], int(dataset.sample_index[sample]))
    if isinstance(dataset, EpochsDataset):
        epoch, inside = divmod(sample, dataset.per_epoch)
        return trace(dataset.epoch(epoch), inside)
    prefix = dataset_prefix(dataset)
    return [SampleRange(prefix, *part) for part in dataset.sources(sample) if part[2]]


def find(dataset: Any, prefix: str, sequence: int) -> Iterator[int]:
    """Yield the samples that a stored sequence stands in, the first ones first."""
    if isinstance(dataset, OrderedBlend):
        yield from sorted(
            int(place)
            for number, part in enumerate(dataset.datasets)
            for place in _places_in_blend(dataset, number, find(part, prefix, sequence))
        )
    elif isinstance(dataset, EpochsDataset):
        for epoch in range(-(-len(dataset) // dataset.per_epoch)):
            for inside in find(dataset.epoch(epoch), prefix, sequence):
                if epoch * dataset.per_epoch + inside < len(dataset):
                    yield epoch * dataset.per_epoch + inside
    elif dataset_prefix(dataset) == prefix:
        yield from sorted(dataset.places(sequence))


def prefixes(dataset: Any) -> list[Any]:
    """List the stored datasets below a dataset, each with a prefix and lengths, once."""
    if isinstance(dataset, OrderedBlend):
        found = [each for part in dataset.datasets for each in prefixes(part)]
    elif isinstance(dataset, EpochsDataset):
        found = prefixes(dataset.epoch(0))
    else:
        found = [dataset.sequences]
    return list({getattr(each, "prefix", ""): each for each in found}.values())


def dataset_prefix(dataset: Any) -> str:
    """Prefix of the pair below a dataset that is no blend."""
    return getattr(dataset.sequences, "prefix", "")


def _places_in_blend(blend: OrderedBlend, number: int, samples: Iterator[int]) -> Iterator[int]:
    mine = np.flatnonzero(blend.dataset_index == number)
    yield from (mine[sample] for sample in samples if sample < len(mine))
