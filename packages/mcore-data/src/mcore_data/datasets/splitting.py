"""Which documents are for training and which are held out."""

import re

import numpy as np
from numpy.typing import NDArray

_NUMBER = re.compile(r"[.0-9]+")
_NO_SHARE = re.compile(r"[a-zA-Z-]|\.\d*\.|(?<!\d)\.(?!\d)")
"""A minus, a word such as nan, a point too many: ``_NUMBER`` would read something else."""
NUM_SPLITS = 3


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of train, valid and test from ``--split``, with sum 1.

    Numbers may be separated by any signs; missing ones are 0.
    """
    is_read = not _NO_SHARE.search(split)
    numbers = [float(number) for number in _NUMBER.findall(split)] if is_read else []
    if not 1 <= len(numbers) <= NUM_SPLITS or sum(numbers) == 0:
        raise ValueError(f"--split {split!r}: give up to three shares, such as 969,30,1.")
    numbers += [0.0] * (NUM_SPLITS - len(numbers))
    train, valid, test = (number / sum(numbers) for number in numbers)
    return train, valid, test


def split_bounds(split: str, num_elements: int) -> tuple[range | None, ...]:
    """Elements of train, valid and test: consecutive ranges, None for a share of 0.

    Borders are rounded half to even, as Megatron rounds them.
    """
    shares = parse_split(split)
    borders = [0]
    total = 0.0
    for share in shares:
        total += share
        borders.append(round(total * num_elements))
    return tuple(
        range(borders[i], borders[i + 1]) if share > 0 else None
        for i, share in enumerate(shares)
    )


def held_out(
    num_documents: int, num_held_out: int, seed: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Draw documents to hold out; returns (the others, the held-out ones), both rising."""
    if not 0 <= num_held_out < num_documents:
        raise ValueError(f"{num_held_out} of {num_documents} documents cannot be held out.")
    chosen = np.zeros(num_documents, bool)
    chosen[np.random.default_rng(seed).permutation(num_documents)[:num_held_out]] = True
    everything = np.arange(num_documents, dtype=np.int32)
    return everything[~chosen], everything[chosen]
