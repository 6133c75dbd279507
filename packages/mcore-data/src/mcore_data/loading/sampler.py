"""Samplers: which samples a data-parallel rank reads next, given the number consumed so far.

A sampler yields the sample indices of the micro-batches of one rank. The global order is one
stream; each block of micro_batch_size x dp_size consecutive samples is divided over the ranks.
So one number, ``consumed_samples``, is the position in the data, and a run continues exactly
under any other data-parallel size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleSampler:
    """Samples 0, 1, 2, ... once; a last incomplete block is dropped.

    Attributes:
        num_samples: length of the dataset.
        micro_batch_size: samples of one micro-batch of one rank.
        dp_rank: rank along the data axis.
        dp_size: ranks along the data axis.
        consumed_samples: samples that all ranks together have read.
    """

    num_samples: int
    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    consumed_samples: int = 0

    def __post_init__(self) -> None:
        _check(self)
        if self.consumed_samples >= self.num_samples:
            raise ValueError(
                f"{self.consumed_samples} samples are consumed and the dataset has "
                f"{self.num_samples}: nothing is left. Build the dataset for more samples, "
                "or use --dataloader-type cyclic."
            )

    def __len__(self) -> int:
        """Return the number of micro-batches left for this rank."""
        remaining = self.num_samples - self.consumed_samples
        return remaining // (self.micro_batch_size * self.dp_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's micro-batches."""
        block = self.micro_batch_size * self.dp_size
        first = self.consumed_samples + self.dp_rank * self.micro_batch_size
        for number in range(len(self)):
            start = first + number * block
            yield list(range(start, start + self.micro_batch_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class CyclicSampler:
    """Endless epochs, each a permutation of all samples by (seed, epoch).

    Differs from Megatron's cyclic order on purpose: in Megatron each rank permutes its own
    bucket and an epoch drops a remainder, so the order depends on the number of ranks.

    Attributes:
        num_samples: length of the dataset.
        micro_batch_size: samples of one micro-batch of one rank.
        dp_rank: rank along the data axis.
        dp_size: ranks along the data axis.
        consumed_samples: samples that all ranks together have read, over all epochs.
        seed: seed of the permutations.
    """

    num_samples: int
    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    consumed_samples: int = 0
    seed: int = 1234

    def __post_init__(self) -> None:
        _check(self)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's micro-batches without end."""
        block = self.micro_batch_size * self.dp_size
        start = self.consumed_samples + self.dp_rank * self.micro_batch_size
        epoch, order = -1, np.zeros(0, np.int64)
        while True:
            batch = []
            for position in range(start, start + self.micro_batch_size):
                if position // self.num_samples != epoch:
                    epoch = position // self.num_samples
                    order = self.order(self.seed, epoch, self.num_samples)
                batch.append(int(order[position % self.num_samples]))
            yield batch
            start += block

    @staticmethod
    def order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
        """Return the permutation of one epoch."""
        return np.random.default_rng([seed, epoch]).permutation(num_samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class FullSampler:
    """Every sample once, for full validation, with None to fill the last block.

    All ranks have the same number of micro-batches of equal size. With a micro-batch size of 1,
    as in Megatron, rank r reads samples r, r + dp_size, ...

    Attributes:
        num_samples: length of the dataset.
        micro_batch_size: samples of one micro-batch of one rank.
        dp_rank: rank along the data axis.
        dp_size: ranks along the data axis.
    """

    num_samples: int
    micro_batch_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        """Return the number of micro-batches of every rank."""
        return math.ceil(self.num_samples / (self.micro_batch_size * self.dp_size))

    def __iter__(self) -> Iterator[list[int | None]]:
        """Yield this rank's micro-batches, None where no sample is left."""
        size = self.micro_batch_size
        for number in range(len(self)):
            first = (number * self.dp_size + self.dp_rank) * size
            yield [i if i < self.num_samples else None for i in range(first, first + size)]


def _check(sampler: SingleSampler | CyclicSampler | FullSampler) -> None:
    if sampler.num_samples < 1:
        raise ValueError("the dataset has no samples: give it more data.")
    if sampler.micro_batch_size < 1 or not 0 <= sampler.dp_rank < sampler.dp_size:
        raise ValueError(
            f"micro-batch size {sampler.micro_batch_size} and data-parallel rank "
            f"{sampler.dp_rank} of {sampler.dp_size} are not valid: the size must be 1 or "
            "more, and the rank below the number of ranks."
        )
    if not isinstance(sampler, FullSampler) and sampler.consumed_samples < 0:
        raise ValueError(
            f"consumed_samples {sampler.consumed_samples} is negative: give 0 or more."
        )
