"""A byte n-gram model: the yardstick beside which a small language model is read.

Interpolated Witten-Bell smoothing: a context that was followed by many different bytes
trusts its own counts less. Everything is counted and looked up with sorted numpy arrays.

Reference:
    Witten & Bell 1991, "The zero-frequency problem", IEEE Trans. Inf. Theory 37(4),
    method C; interpolation as in Chen & Goodman 1998, TR-10-98, section 2.6.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

BORDER = 256
"""Symbol before and after each document, beside the 256 bytes."""
BASE = 257
"""Symbols in all; a context is a number with these digits."""

Codes = np.ndarray
"""int64 [n]: n-grams as numbers in base 257."""


@dataclass(frozen=True, slots=True)
class _Order:
    """Counts of one order: sorted n-grams, and what followed each of their contexts."""

    grams: Codes
    gram_counts: np.ndarray
    contexts: Codes
    context_counts: np.ndarray
    followers: np.ndarray


class ByteNGram:
    """An interpolated Witten-Bell model over bytes and document ends."""

    def __init__(self, documents: Iterable[bytes], order: int = 5) -> None:
        """Count all n-grams up to ``order``.

        Args:
            documents: training text; each is predicted from its border on, end included.
            order: symbols of the longest n-gram, the predicted one among them, 1 to 7.

        Raises:
            ValueError: if ``order`` does not fit an int64 code, or there is no document.
        """
        if not 1 <= order <= 7:
            raise ValueError(f"order {order} must be from 1 to 7")
        symbols = _symbols(documents, order)
        if not symbols.size:
            raise ValueError("no document to count")
        self.order = order
        self._orders = [_count(symbols, n, order) for n in range(1, order + 1)]

    def bits(self, documents: Sequence[bytes]) -> float:
        """Return the code length of documents in bits, their ends included."""
        symbols = _symbols(documents, self.order)
        prob = np.full(int(_predicted(symbols, self.order).sum()), 1.0 / BASE)
        for n, counts in enumerate(self._orders, start=1):
            codes = _codes(symbols, n, self.order)
            seen, together = _look_up(codes, counts.grams, counts.gram_counts)
            known, total = _look_up(codes // BASE, counts.contexts, counts.context_counts)
            _, kinds = _look_up(codes // BASE, counts.contexts, counts.followers)
            count = np.where(seen, together, 0)
            smoothed = (count + kinds * prob) / np.maximum(total + kinds, 1)
            prob = np.where(known, smoothed, prob)
        return float(-np.log2(prob).sum())

    def bits_per_byte(self, documents: Sequence[bytes]) -> float:
        """Return ``bits`` divided by the documents' length in bytes."""
        return self.bits(documents) / sum(map(len, documents))


def _symbols(documents: Iterable[bytes], order: int) -> np.ndarray:
    """Join documents, each with ``order`` borders before it and the last one's end after."""
    border = np.full(order, BORDER, np.int64)
    parts = []
    for document in documents:
        parts += [border, np.frombuffer(document, np.uint8).astype(np.int64)]
    return np.concatenate([*parts, border]) if parts else np.zeros(0, np.int64)


def _predicted(symbols: np.ndarray, order: int) -> np.ndarray:
    """Mark what is predicted: every byte, and the first border after a document."""
    after_byte = np.zeros(symbols.size, bool)
    after_byte[1:] = symbols[:-1] != BORDER
    marks = (symbols != BORDER) | after_byte
    marks[:order] &= symbols[:order] != BORDER
    return marks


def _codes(symbols: np.ndarray, n: int, order: int) -> Codes:
    """Number the n-gram that ends at each predicted symbol; the oldest digit leads."""
    places = np.flatnonzero(_predicted(symbols, order))
    codes = np.zeros(places.size, np.int64)
    for back in range(n - 1, -1, -1):
        codes = codes * BASE + symbols[places - back]
    return codes


def _count(symbols: np.ndarray, n: int, order: int) -> _Order:
    grams, gram_counts = np.unique(_codes(symbols, n, order), return_counts=True)
    contexts, first = np.unique(grams // BASE, return_index=True)
    followers = np.diff(np.append(first, grams.size))
    context_counts = np.add.reduceat(gram_counts, first)
    return _Order(grams, gram_counts, contexts, context_counts, followers)


def _look_up(codes: Codes, keys: Codes, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each code whether it is a key, and its value (0 where it is not)."""
    places = np.minimum(np.searchsorted(keys, codes), keys.size - 1)
    found = keys[places] == codes
    return found, np.where(found, values[places], 0)
