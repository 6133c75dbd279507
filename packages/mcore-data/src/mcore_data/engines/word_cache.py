"""A cache of the ids of words, which looks up many words at once.

A word is a run of bytes whose ids do not depend on the surrounding bytes. Words of up to 15
bytes, almost all, are stored as two 64-bit numbers with their bytes and length, in an
open-addressing hash table of numpy arrays: a few array operations look up a batch of words, and
compare all bytes. Longer words are in a dictionary. The caller's function encodes each new word
once.
"""

import re
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_WORDS = 1 << 20
MAX_BYTES = 64 << 20
"""Bytes of long words and ids after which the cache is cleared."""

_BATCH_BYTES = 1 << 18
_LONGEST_SHORT = 15
_FIRST_SLOTS = 1 << 16
_ODD_A = np.uint64(0x9E3779B97F4A7C15)
_ODD_B = np.uint64(0xC2B2AE3D27D4EB4F)
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)


class WordTable:
    """Cache of the ids of words.

    Args:
        encode: returns the ids of new words.
        max_words: number of words after which the cache is cleared.
        max_bytes: bytes of long words and ids after which the cache is cleared.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[bytes]], Sequence[Sequence[int]]],
        max_words: int = MAX_WORDS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._encode = encode
        self._max_words = max_words
        self._max_bytes = max_bytes
        self._clear()

    def encode(
        self, data: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the ids of all words, concatenated, and the borders between words.

        Args:
            data: bytes that contain the words, as returned by ``padded``.
            starts: first byte of each word.
            ends: one past the last byte of each word; no word is empty.

        Returns:
            The ids, and borders [words + 1]: word i has the ids ``borders[i]`` to
            ``borders[i + 1]``.
        """
        numbers = self._numbers(data, starts, ends)
        lengths = self._lengths[numbers]
        borders = np.zeros(len(numbers) + 1, np.int64)
        np.cumsum(lengths, out=borders[1:])
        shift = self._firsts[numbers]
        shift -= borders[:-1]
        index = np.repeat(shift, lengths)
        index += np.arange(len(index))
        return self._ids[index], borders

    def _numbers(
        self, data: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the number of each word in the cache; encode and add new words."""
        if self._count > self._max_words or self._kept_bytes > self._max_bytes:
            self._clear()
        sizes = ends - starts
        numbers = self._bytes[np.frombuffer(data, np.uint8)[starts]]
        wider = np.flatnonzero(sizes > 1)
        low, high = _keys(data, starts[wider], sizes[wider])
        numbers[wider] = self._find(low, high)
        rare = np.flatnonzero(numbers == 0)
        if len(rare):
            spans = zip(starts[rare].tolist(), ends[rare].tolist(), strict=True)
            words = [data[start:end] for start, end in spans]
            cached = list(map(self._long.get, words))
            if None in cached:
                missing = [
                    word for word, number in zip(words, cached, strict=True) if not number
                ]
                learnt = self._learn(list(dict.fromkeys(missing)))
                pairs = zip(words, cached, strict=True)
                cached = [number or learnt[word] for word, number in pairs]
            numbers[rare] = np.fromiter(cached, np.int64, len(cached))
        return numbers

    def _find(self, low: NDArray[np.uint64], high: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the number of each short word, 0 for words not in the table."""
        slots = _slots(low, high, len(self._table))
        numbers = self._table[slots]
        is_other = (self._low[numbers] != low) | (self._high[numbers] != high)
        # Linear probing, at once for all words whose slot holds another word.
        rest = np.flatnonzero(is_other)
        while len(rest):
            rest = rest[numbers[rest] != 0]  # an empty slot: the word is not in the table
            slots[rest] = (slots[rest] + 1) & (len(self._table) - 1)
            slot_numbers = self._table[slots[rest]]
            numbers[rest] = slot_numbers
            rest = rest[
                (self._low[slot_numbers] != low[rest])
                | (self._high[slot_numbers] != high[rest])
            ]
        return numbers

    def _learn(self, words: list[bytes]) -> dict[bytes, int]:
        """Encode words, add them to the cache, and return their numbers."""
        encoded = self._encode(words)
        lengths = np.fromiter(map(len, encoded), np.int64, len(words))
        ids = np.fromiter(chain.from_iterable(encoded), np.uint32, int(lengths.sum()))
        firsts = self._num_ids + np.cumsum(lengths) - lengths
        count, num_ids = self._count + len(words), self._num_ids + len(ids)
        sizes = np.fromiter(map(len, words), np.int64, len(words))
        starts = np.cumsum(sizes) - sizes
        joined = padded(b"".join(words))
        low, high = _keys(joined, starts, sizes)
        self._low = _appended(self._low, self._count, low)
        self._high = _appended(self._high, self._count, high)
        self._lengths = _appended(self._lengths, self._count, lengths)
        self._firsts = _appended(self._firsts, self._count, firsts)
        self._ids = _appended(self._ids, self._num_ids, ids)
        numbers = np.arange(self._count, count)
        self._count, self._num_ids = count, num_ids
        known = dict(zip(words, numbers.tolist(), strict=True))
        is_long = sizes > _LONGEST_SHORT
        for i in np.flatnonzero(is_long).tolist():
            self._long[words[i]] = known[words[i]]
        is_byte = sizes == 1
        self._bytes[np.frombuffer(joined, np.uint8)[starts[is_byte]]] = numbers[is_byte]
        self._kept_bytes += int(sizes[is_long].sum()) + 4 * len(ids)
        if 2 * count > len(self._table):
            self._table = np.zeros(4 * len(self._table), np.int64)
            numbers = np.arange(1, count)
        self._place(numbers[self._high[numbers] != 0])
        return known

    def _place(self, numbers: NDArray[np.int64]) -> None:
        """Insert words into the table by number."""
        slots = _slots(self._low[numbers], self._high[numbers], len(self._table))
        # All words are written to their free slots. Of several words for one slot the last
        # write remains, and the other words try the next slot.
        while len(numbers):
            free = self._table[slots] == 0
            self._table[slots[free]] = numbers[free]
            is_left = self._table[slots] != numbers
            numbers, slots = numbers[is_left], (slots[is_left] + 1) & (len(self._table) - 1)

    def _clear(self) -> None:
        """Remove all words; number 0 means "no word"."""
        self._table = np.zeros(_FIRST_SLOTS, np.int64)
        self._bytes = np.zeros(256, np.int64)  # numbers of words of a single byte
        self._low = np.zeros(1, np.uint64)
        self._high = np.zeros(1, np.uint64)
        self._lengths = np.zeros(1, np.int64)
        self._firsts = np.zeros(1, np.int64)
        self._ids = np.zeros(0, np.uint32)
        self._count, self._num_ids, self._kept_bytes = 1, 0, 0
        self._long: dict[bytes, int] = {}


def padded(data: bytes) -> bytes:
    """Return bytes with padding, since words are read in units of eight bytes."""
    return data + bytes(16 + -len(data) % 8)


def encode_in_batches(
    texts: Sequence[bytes],
    encode: Callable[[list[bytes]], list[NDArray[np.integer]]],
    before_border: re.Pattern[bytes],
) -> list[NDArray[np.integer]]:
    """Encode texts in batches that fit the caches of a processor; return the ids of each.

    Args:
        texts: texts in UTF-8.
        encode: returns the ids of each text, or part of a text, of a batch.
        before_border: pattern of places where a text longer than a batch may be divided: before
            the last byte of a match.
    """
    parts = [_divided(text, before_border) for text in texts]
    encoded: list[NDArray[np.integer]] = []
    batch: list[bytes] = []
    size = 0
    for part in chain.from_iterable(parts):
        batch.append(part)
        size += len(part)
        if size >= _BATCH_BYTES:
            encoded += encode(batch)
            batch, size = [], 0
    if batch:
        encoded += encode(batch)
    if len(encoded) == len(texts):
        return encoded
    rest = iter(encoded)
    return [np.concatenate([next(rest) for _ in text_parts]) for text_parts in parts]


def _divided(text: bytes, before_border: re.Pattern[bytes]) -> list[bytes]:
    """Cut a text at borders into parts of about the size of a batch."""
    cuts = [0]
    while len(text) - cuts[-1] > 2 * _BATCH_BYTES:
        match = before_border.search(text, cuts[-1] + _BATCH_BYTES)
        if match is None:
            break
        cuts.append(match.end() - 1)
    return [text[low:high] for low, high in pairwise([*cuts, len(text)])]


def _keys(
    data: bytes, starts: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return each word's key: bytes 0 to 7, and length << 56 with bytes 8 to 14.

    The key of a word of more than 15 bytes is 0.
    """
    lanes = np.frombuffer(data, "<u8")
    low = _eight_bytes(lanes, starts)
    low &= _MASKS[np.minimum(sizes, 8)]
    high = sizes.astype(np.uint64) << np.uint64(56)
    more = np.flatnonzero(sizes > 8)
    if len(more):
        rest = sizes[more] - 8
        upper_bytes = _eight_bytes(lanes, starts[more] + 8) & _MASKS[np.minimum(rest, 7)]
        is_short = rest <= _LONGEST_SHORT - 8
        high[more] = np.where(is_short, high[more] | upper_bytes, 0)
        low[more[~is_short]] = 0
    return low, high


def _eight_bytes(lanes: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the eight bytes from each position on, from two adjacent 8-byte lanes."""
    lane = positions >> 3
    shift = ((positions & 7) << 3).astype(np.uint64)
    words = lanes[lane] >> shift
    lane += 1
    words |= lanes[lane] << (np.uint64(64) - shift)  # a shift by 64 gives 0
    return words


def _slots(
    low: NDArray[np.uint64], high: NDArray[np.uint64], num_slots: int
) -> NDArray[np.int64]:
    """Return the first slot to probe for each word: the top bits of a multiplicative hash."""
    mixed = high * _ODD_B
    mixed ^= low
    mixed *= _ODD_A
    mixed ^= mixed >> np.uint64(32)
    mixed *= _ODD_B
    mixed >>= np.uint64(65 - num_slots.bit_length())
    return mixed.view(np.int64)


def _appended(array: NDArray[Any], used: int, values: NDArray[Any]) -> NDArray[Any]:
    """Append values after the used part of an array; returns a larger array if it is full."""
    if used + len(values) > len(array):
        larger = np.zeros(2 * (used + len(values)), array.dtype)
        larger[:used] = array[:used]
        array = larger
    array[used : used + len(values)] = values
    return array
