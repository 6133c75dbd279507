"""Which samples a data-parallel rank reads next, from how many all ranks have consumed.

A sampler yields the sample indices of one micro-batch of one rank. The global order is one
stream: each block of micro_batch_size x dp_size consecutive places is cut among the ranks.
So the place in the data is one number, ``consumed_samples``, and a run continues exactly
from it under any other data-parallel size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleSampler:
    """The samples 0, 1, 2, ... once; the last incomplete block is left out.

    Attributes:
        num_samples: length of the dataset.
        micro_batch_size: samples of one micro-batch of one rank.
        dp_rank: rank along the data axis.
        dp_size: ranks along the data axis.
        consumed_samples: samples that all ranks together have had.
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
        """Micro-batches that this rank still gets."""
        left = self.num_samples - self.consumed_samples
        return left // (self.micro_batch_size * self.dp_size)

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

    Differs from Megatron's cyclic order on purpose: there each rank permutes a bucket of its
    own and an epoch leaves out a remainder, so the order depends on the number of ranks and
    cannot be continued under another.

    Attributes:
        num_samples: length of the dataset.
        micro_batch_size: samples of one micro-batch of one rank.
        dp_rank: rank along the data axis.
        dp_size: ranks along the data axis.
        consumed_samples: samples that all ranks together have had, over all epochs.
        seed: of the permutations.
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
        place = self.consumed_samples + self.dp_rank * self.micro_batch_size
        epoch, order = -1, np.zeros(0, np.int64)
        while True:
            batch = []
            for at in range(place, place + self.micro_batch_size):
                if at // self.num_samples != epoch:
                    epoch = at // self.num_samples
                    order = self.order(self.seed, epoch, self.num_samples)
                batch.append(int(order[at % self.num_samples]))
            yield batch
            place += block

    @staticmethod
    def order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
        """The permutation of one epoch."""
        return np.random.default_rng([seed, epoch]).permutation(num_samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class FullSampler:
    """Every sample once, for full validation; None for what the last block is short of.

    So all ranks make the same number of micro-batches, of one size. With a micro-batch size
    of 1, Megatron's for this, rank r takes r, r + dp_size, ...

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
        """Micro-batches of every rank."""
        return math.ceil(self.num_samples / (self.micro_batch_size * self.dp_size))

    def __iter__(self) -> Iterator[list[int | None]]:
        """Yield this rank's micro-batches, None where no sample is left."""
        size = self.micro_batch_size
        for number in range(len(self)):
            first = (number * self.dp_size + self.dp_rank) * size
            yield [i if i < self.num_samples else None for i in range(first, first + size)]


def _check(sampler: SingleSampler | CyclicSampler | FullSampler) -> None:
    if sampler.num_samples < 1:
        raise ValueError("the dataset has no samples.")
    if sampler.micro_batch_size < 1 or not 0 <= sampler.dp_rank < sampler.dp_size:
        raise ValueError(
            f"micro-batch size {sampler.micro_batch_size} and data-parallel rank "
            f"{sampler.dp_rank} of {sampler.dp_size} make no sense."
        )
    if not isinstance(sampler, FullSampler) and sampler.consumed_samples < 0:
        raise ValueError(f"{sampler.consumed_samples} samples cannot have been consumed.")
