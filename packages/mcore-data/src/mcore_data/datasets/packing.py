"""Packs texts of any length into rows of one length, with their borders.

A text of n tokens takes n - 1 positions of a row: it makes n - 1 pairs of a token and its
label. Attention stays inside a text: ``cu_seqlens`` has the borders, and positions restart at
0. The algorithm is first-fit decreasing: texts from the longest to the shortest, each into the
first row with room. All texts of one length are placed at once, into runs of rows with equal
room. Rows are read in a shuffled order, different in each epoch.

Reference:
    Krell et al. 2021, Efficient Sequence Packing without Cross-contamination.
    arXiv:2107.02027.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.arrangement import count_from, packed_borders
from mcore_data.indexed.caching import cached_arrays

TooLong = Literal["truncate", "split", "skip"]


class Texts(Protocol):
    """Token sequences by number, such as an ``IndexedDataset``."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence."""

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return a range of one sequence."""


class PackedDataset:
    """Map-style dataset of rows, each packed with several texts.

    A sample has ``tokens``, ``labels`` and ``position_ids`` (int64 [S]), ``loss_mask``
    (float32 [S]), ``cu_seqlens`` (int32 [S + 1], borders of the texts and of the unused rest,
    padded with S) and ``max_seqlen`` (int32 scalar).

    Args:
        texts: the stored tokens.
        sequence_length: S, tokens in a row.
        weights: for each token of ``texts`` 1 if the token counts as a label, else 0; None: all
            count. The first token of a text is never a label.
        seed: seed of the order of rows.
        num_samples: ``len`` of the dataset; 0 means one epoch.
        document_ids: texts to use; None means all.
        too_long: what to do with a text of more than S + 1 tokens.
        cache_folder: folder in which the packing is cached for later runs and other ranks.

    Raises:
        ValueError: if no text has two tokens, or the weights do not fit the texts.
    """

    def __init__(
        self,
        texts: Texts,
        *,
        sequence_length: int,
        weights: Texts | None = None,
        seed: int = 1234,
        num_samples: int = 0,
        document_ids: Sequence[int] | range | None = None,
        too_long: TooLong = "split",
        cache_folder: str | Path = "",
    ) -> None:
        if sequence_length < 1 or num_samples < 0:
            raise ValueError(
                f"{num_samples} rows of --seq-length {sequence_length} cannot be made: use at "
                "least 1 token, and at least 0 rows."
            )
        self.sequences = texts
        self.weights = weights
        self.sequence_length = sequence_length
        self.seed = seed
        lengths = np.asarray(texts.lengths)
        if weights is not None and not np.array_equal(lengths, weights.lengths):
            raise ValueError(
                "the loss masks and the texts differ in length: prepare both pairs again from "
                "one input."
            )
        ids = range(len(lengths)) if document_ids is None else document_ids
        self.document_ids = ids = np.asarray(ids, np.int64)
        settings = f"packing-1 {sequence_length} {too_long} {len(ids)}"
        digest = hashlib.blake2b(settings.encode(), digest_size=16)
        digest.update(ids.data)
        digest.update(np.ascontiguousarray(lengths).data)

        def build() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            pieces = cut_texts(lengths, ids, sequence_length, too_long)
            return pack(pieces, sequence_length)

        self.pieces, self.rows = cached_arrays(
            cache_folder, digest.hexdigest(), ("pieces", "rows"), build
        )
        self.per_epoch = len(self.rows) - 1
        self.num_samples = num_samples or self.per_epoch
        self._cached_order = (-1, np.zeros(0, np.int64))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: int | None) -> dict[str, NDArray[Any]]:
        """Return one row; None: a row without any loss."""
        if sample is None:
            return self[0] | {"loss_mask": np.zeros(self.sequence_length, np.float32)}
        S = self.sequence_length
        tokens, labels = np.zeros(S, np.int64), np.zeros(S, np.int64)
        loss_mask = np.zeros(S, np.float32)
        ends, start = [], 0
        blocked = getattr(self.sequences, "blocked", None)
        for source in self.sources(sample):
            text = self.sequences.get(*source)
            is_blocked = blocked is not None and blocked[source[0]]
            stop = start + len(text) - 1
            tokens[start:stop], labels[start:stop] = text[:-1], text[1:]
            if is_blocked:  # attention is limited to one text, so no other text sees the zeros
                tokens[start:stop] = labels[start:stop] = 0
            elif self.weights is None:
                loss_mask[start:stop] = 1.0
            else:
                loss_mask[start:stop] = self.weights.get(*source)[1:]
            ends.append(stop)
            start = stop
        borders = np.array(ends)
        borders = borders[borders < S]
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": count_from(borders, S),
            **packed_borders(borders, S),
        }

    def sources(self, sample: int) -> list[tuple[int, int, int]]:
        """Return the texts of a sample as (sequence, offset, number of tokens)."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        epoch, position = divmod(sample, self.per_epoch)
        row = int(self._order(epoch)[position])
        pieces = self.pieces[self.rows[row] : self.rows[row + 1]]
        return [tuple(piece) for piece in pieces.tolist()]

    def samples_with(self, sequence: int) -> list[int]:
        """Return the samples that contain tokens of a stored sequence."""
        pieces = np.flatnonzero(self.pieces[:, 0] == sequence)
        rows = np.unique(np.searchsorted(self.rows, pieces, side="right") - 1)
        epochs = range(-(-len(self) // self.per_epoch))
        samples = [
            epoch * self.per_epoch + int(position)
            for epoch in epochs
            for position in np.argsort(self._order(epoch))[rows]
        ]
        return [sample for sample in samples if sample < len(self)]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._cached_order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.per_epoch)
            self._cached_order = (epoch, order)
        return self._cached_order[1]


def cut_texts(
    lengths: NDArray[np.int32], ids: NDArray[np.int64], sequence_length: int, too_long: TooLong
) -> NDArray[np.int64]:
    """Cut texts into ranges that fit a row: int64 [P, 3], (sequence, offset, tokens).

    Consecutive parts of a split text overlap by one token: the last label of a part is the
    first token of the next. Texts of fewer than two tokens have no label and are dropped.

    Raises:
        ValueError: if no text has two tokens.
    """
    max_tokens = sequence_length + 1
    ids = ids[lengths[ids] > 1]
    if too_long == "skip":
        ids = ids[lengths[ids] <= max_tokens]
    sizes = lengths[ids].astype(np.int64)
    if not len(ids):
        raise ValueError(
            "there is no text to pack: a text needs at least two tokens, and with "
            f'too_long="skip" at most {max_tokens}.'
        )
    counts = np.ones_like(sizes)
    if too_long == "split":
        counts = -(-(sizes - 1) // sequence_length)
    firsts = np.cumsum(counts) - counts
    number = np.arange(counts.sum()) - np.repeat(firsts, counts)
    offsets = number * sequence_length
    stops = np.minimum(np.repeat(sizes, counts), offsets + max_tokens)
    return np.stack([np.repeat(ids, counts), offsets, stops - offsets], axis=1)


def pack(
    pieces: NDArray[np.int64], sequence_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack pieces into rows by first-fit decreasing, all pieces of one length at once.

    Args:
        pieces: (sequence, offset, tokens), each of 2 to S + 1 tokens.
        sequence_length: S.

    Returns:
        The pieces sorted by row, and the index of the first piece of each row, [rows + 1].
    """
    needs = pieces[:, 2] - 1
    order = np.argsort(-needs, kind="stable")
    row_of = np.empty(len(pieces), np.int64)
    rooms, run_sizes = np.zeros(0, np.int64), np.zeros(0, np.int64)
    start = 0
    for need, count in zip(*_runs(needs[order]), strict=True):
        rows, rooms, run_sizes = _place(need, count, rooms, run_sizes, sequence_length)
        row_of[order[start : start + count]] = rows
        start += count
    by_row = np.argsort(row_of, kind="stable")
    per_row = np.bincount(row_of, minlength=int(run_sizes.sum()))
    return pieces[by_row], np.concatenate([[0], np.cumsum(per_row)])


def _place(
    need: int,
    count: int,
    rooms: NDArray[np.int64],
    counts: NDArray[np.int64],
    sequence_length: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Place ``count`` pieces of length ``need`` into the first rows with room for them.

    Consecutive rows with equal room form a run: ``rooms`` holds the free positions of a row of
    each run, ``counts`` the number of rows of each run.

    Returns:
        The row of each piece, and the new ``rooms`` and ``counts``.
    """
    opened = -(-count // (sequence_length // need))  # enough new rows for all pieces
    rooms = np.append(rooms, sequence_length)
    counts = np.append(counts, opened)
    firsts = np.cumsum(counts) - counts
    fits = rooms // need  # pieces that fit a row of each run
    before = np.cumsum(fits * counts) - fits * counts
    taken = np.clip(count - before, 0, fits * counts)
    fits = np.maximum(fits, 1)
    # Each run is cut in three: rows that take ``fits`` pieces, one row with ``extra`` pieces if
    # any, and rows that take none.
    filled, extra = taken // fits, taken % fits
    rows = []
    for run in np.flatnonzero(taken).tolist():
        first, full = int(firsts[run]), int(filled[run])
        rows.append(np.repeat(np.arange(first, first + full), fits[run]))
        rows.append(np.full(extra[run], first + full))
    partial = (extra > 0).astype(np.int64)
    untouched = counts - filled - partial
    untouched[-1] = 0  # new rows that were not needed
    rooms = np.stack([rooms - fits * need * (filled > 0), rooms - extra * need, rooms], axis=1)
    counts = np.stack([filled, partial, untouched], axis=1)
    is_used = counts.reshape(-1) > 0
    return np.concatenate(rows), rooms.reshape(-1)[is_used], counts.reshape(-1)[is_used]


def _runs(values: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Return the distinct values of a sorted array, and how often each occurs."""
    borders = np.flatnonzero(np.diff(values)) + 1
    counts = np.diff(np.concatenate([[0], borders, [len(values)]]))
    return values[np.concatenate([[0], borders])].tolist(), counts.tolist()
