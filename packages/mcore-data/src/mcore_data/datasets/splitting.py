"""Splits documents into training, validation and test by ``--split``."""

import re

import numpy as np
from numpy.typing import NDArray

_NUMBER = re.compile(r"[.0-9]+")
_NO_SHARE = re.compile(r"[a-zA-Z-]|\.\d*\.|(?<!\d)\.(?!\d)")
"""Minus signs, words such as nan, and malformed numbers, which ``_NUMBER`` would misread."""
NUM_SPLITS = 3


def parse_split(split: str) -> tuple[float, float, float]:
    """Parse ``--split`` to the shares of train, valid and test, with sum 1.

    Numbers may be separated by any other characters; missing numbers are 0.
    """
    is_wellformed = not _NO_SHARE.search(split)
    numbers = [float(number) for number in _NUMBER.findall(split)] if is_wellformed else []
    if not 1 <= len(numbers) <= NUM_SPLITS or sum(numbers) == 0:
        raise ValueError(f"--split {split!r}: give up to three shares, such as 969,30,1.")
    numbers += [0.0] * (NUM_SPLITS - len(numbers))
    train, valid, test = (number / sum(numbers) for number in numbers)
    return train, valid, test


def split_bounds(split: str, num_elements: int) -> tuple[range | None, ...]:
    """Return the consecutive ranges of train, valid and test; None for a share of 0.

    Borders are rounded half to even, as in Megatron.
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
    """Draw documents to hold out; return (the others, the held-out ones), both sorted."""
    if not 0 <= num_held_out < num_documents:
        raise ValueError(f"{num_held_out} of {num_documents} documents cannot be held out.")
    chosen = np.zeros(num_documents, bool)
    chosen[np.random.default_rng(seed).permutation(num_documents)[:num_held_out]] = True
    everything = np.arange(num_documents, dtype=np.int32)
    return everything[~chosen], everything[chosen]
