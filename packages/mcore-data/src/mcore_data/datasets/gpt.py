"""GPT samples: S tokens and the same tokens shifted by one, from concatenated documents.

A batch of samples is one vectorised look-up of ranges of documents, and one copy that converts
the stored tokens to int64. ``arrangement`` adds masks, positions and document borders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.arrangement import Arrangement, SampleOptions, TextRows
from mcore_data.datasets.sample_index import SampleIndexSpec, load_sample_index

_PLAIN = SampleOptions()


class Sequences(Protocol):
    """Stored sequences, such as an ``IndexedDataset``."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence."""

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return a range of one sequence."""

    def gather(
        self,
        sequences: NDArray[np.integer],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> NDArray[Any]:
        """Return ranges of many sequences, concatenated."""


class PartTransform(Protocol):
    """Rewrites each document's part of a sample, such as ``FillInMiddle``."""

    @property
    def pad(self) -> int:
        """Id that pads a rewritten sample; padding never counts in the loss."""

    def __call__(
        self, part: NDArray[np.int64], random: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return the tokens that replace a sample's part of one document."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The ranges of stored sequences that samples consist of, sample after sample.

    Attributes:
        sequences: int32 [P], ids of the stored sequences.
        offsets: int64 [P], first token of each range.
        lengths: int64 [P], tokens of each range.
        counts: int64 [B], ranges of each sample.
    """

    sequences: NDArray[np.int32]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]


class GPTDataset:
    """Map-style dataset of fixed-length samples as numpy arrays.

    A sample has ``tokens``, ``labels`` and ``position_ids`` (int64 [S]) and ``loss_mask``
    (float32 [S], 1 where the label counts); with ``create_attention_mask`` also
    ``attention_mask`` (bool [1, S, S], True = hidden), with ``reset_attention_mask`` or
    ``inter_document_masking`` also ``cu_seqlens`` (int32 [S + 1], document borders padded with
    S) and ``max_seqlen`` (int32 scalar).

    Args:
        sequences: the stored tokens.
        sequence_length: S, tokens in a sample.
        seed: seed of the shuffles.
        num_samples: smallest number of samples; 0 means one epoch. ``len`` may be larger, since
            the index covers full epochs.
        document_ids: sequences to use, in any order; None means all.
        options: labels, masks, positions and document borders.
        cache_folder: folder in which the index is cached for later runs and other ranks.
        transform: rewrites each document's part of a sample, with random numbers from the seed
            and the sample's number only; the row is then cut or padded to its length.

    Raises:
        ValueError: if an option needs ``eod``, or the documents do not fill a sample.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        sequence_length: int,
        seed: int = 1234,
        num_samples: int = 0,
        document_ids: Sequence[int] | NDArray[np.integer] | None = None,
        options: SampleOptions = _PLAIN,
        cache_folder: str | Path = "",
        transform: PartTransform | None = None,
    ) -> None:
        self.sequences = sequences
        self.sequence_length = sequence_length
        self.shift_labels = options.shift_labels
        self.seed = seed
        self.transform = transform
        self.arrangement = Arrangement(sequence_length, options)
        self._blocked: NDArray[np.bool_] | None = getattr(sequences, "blocked", None)
        lengths = sequences.lengths
        ids = range(len(lengths)) if document_ids is None else document_ids
        self.document_ids = ids
        if not isinstance(ids, range):
            ids = np.asarray(ids, np.int32)
        ends = ids if len(ids) < 2 or not isinstance(ids, range) else ids[:: len(ids) - 1]
        if len(ids) and not 0 <= np.min(ends) <= np.max(ends) < len(lengths):
            raise ValueError(f"document ids must lie in 0 to {len(lengths) - 1}.")
        spec = SampleIndexSpec(
            sequence_length=sequence_length,
            extra_tokens=int(options.shift_labels),
            num_samples=num_samples,
            seed=seed,
            drop_last_partial=options.drop_last_partial,
        )
        self.index = load_sample_index(lengths, ids, spec, cache_folder)

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def __getitem__(self, sample: int | None) -> dict[str, NDArray[Any]]:
        """Return a sample by its index in the shuffled order; None: one without any loss."""
        if sample is None:
            return self[0] | {"loss_mask": np.zeros(self.sequence_length, np.float32)}
        return {key: value[0] for key, value in self.batch([sample]).items()}

    def batch(self, samples: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Return samples stacked: each array has a leading dimension B.

        Batches share ``position_ids`` unless positions are reset: copy before changing them.

        Raises:
            IndexError: if a sample does not exist.
        """
        rows = self.arrangement.empty_rows(len(samples))
        self.write(samples, rows, np.arange(len(samples)))
        return self.arrangement.arrange(rows)

    def write(
        self, samples: Sequence[int], rows: TextRows, row_ids: NDArray[np.integer]
    ) -> None:
        """Write the text of samples to rows of a batch, from which ``arrange`` makes samples.

        Args:
            samples: numbers of the samples, [b].
            rows: rows of the batch; other rows do not change.
            row_ids: row of each sample, [b].

        Raises:
            IndexError: if a sample does not exist.
        """
        parts = self.parts(samples)
        begins = np.cumsum(parts.counts) - parts.counts
        num_tokens = np.add.reduceat(parts.lengths, begins)
        size = self.sequence_length + 1
        part_lengths = []
        if self.transform is None and (num_tokens == size).all():
            text = self.sequences.gather(parts.sequences, parts.offsets, parts.lengths)
            rows.text[row_ids] = text.reshape(-1, size)  # the copy converts to int64
            if self.arrangement.options.needs_borders:
                part_lengths = np.split(parts.lengths, begins[1:])
        else:
            rows.text[row_ids] = self.transform.pad if self.transform else 0
            for sample, row, start, count in zip(
                samples, row_ids, begins, parts.counts, strict=True
            ):
                sample_parts = slice(start, start + count)
                part_lengths.append(self._fill(rows.text[row], parts, sample_parts, sample))
            num_tokens = np.array([min(sum(n), size) for n in part_lengths])
        rows.num_tokens[row_ids] = num_tokens
        if self._blocked is not None and (blocked := self._blocked[parts.sequences]).any():
            stored_lengths = np.split(parts.lengths, begins[1:])
            self._hide(
                rows, row_ids, np.split(blocked, begins[1:]), part_lengths or stored_lengths
            )
        # part_lengths is empty if no option needs borders.
        for row, lengths in zip(row_ids, part_lengths, strict=False):
            rows.part_ends[row] = np.cumsum(lengths)

    def parts(self, samples: Sequence[int]) -> Parts:
        """Return the ranges of stored sequences that samples consist of.

        Raises:
            IndexError: if a sample does not exist.
        """
        indices = np.asarray(samples)
        if not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"sample {indices.min()} to {indices.max()} of {len(self)}")
        rows = self.index.shuffle[indices].astype(np.int64)
        first, last = self.index.samples[rows], self.index.samples[rows + 1]
        counts = (last[:, 0] - first[:, 0] + 1).astype(np.int64)
        ends = np.cumsum(counts)
        begins = ends - counts
        # For each sample the positions first, first + 1, ..., last in the order of documents.
        # Inner documents are read in full; the first starts at an offset, the last is cut.
        positions = np.arange(ends[-1]) - np.repeat(begins - first[:, 0], counts)
        sequences = self.index.documents[positions]
        stops = self.sequences.lengths[sequences].astype(np.int64)
        stops[ends - 1] = last[:, 1] + int(self.shift_labels)
        offsets = np.zeros(len(positions), np.int64)
        offsets[begins] = first[:, 1]
        return Parts(sequences, offsets, stops - offsets, counts)

    def sources(self, sample: int) -> list[tuple[int, int, int]]:
        """Return the parts of a sample as (sequence, offset, number of tokens)."""
        parts = self.parts([sample])
        columns = (parts.sequences.tolist(), parts.offsets.tolist(), parts.lengths.tolist())
        return list(zip(*columns, strict=True))

    def samples_with(self, sequence: int) -> list[int]:
        """Return the samples that contain tokens of a stored sequence, in text order."""
        positions = np.flatnonzero(self.index.documents == sequence)  # one for each epoch
        # Row r of ``samples`` starts at document position starts[r]. A sequence may be in the
        # last row that starts before it, and in all rows that start in it.
        starts = self.index.samples[:, 0]
        first = np.maximum(np.searchsorted(starts, positions, side="left") - 1, 0)
        last = np.searchsorted(starts, positions, side="right")
        rows = [row for a, b in zip(first, last, strict=True) for row in range(a, b)]
        rows = [row for row in dict.fromkeys(rows) if row < len(self.index.shuffle)]
        samples = np.argsort(self.index.shuffle)[np.array(rows, np.int64)].tolist()
        return [
            sample
            for sample in samples
            if sample < len(self)
            and any(part == sequence and count for part, _, count in self.sources(sample))
        ]

    def _hide(
        self,
        rows: TextRows,
        row_ids: NDArray[np.integer],
        blocked: Sequence[NDArray[np.bool_]],
        lengths: Sequence[NDArray[np.int64]],
    ) -> None:
        """Overwrite blocked documents, and record their tokens for the loss mask.

        Args:
            rows: filled rows.
            row_ids: row of each sample.
            blocked: for each sample, whether each part is of a blocked document.
            lengths: for each sample, tokens of each part.
        """
        size = rows.text.shape[1]
        for row, is_blocked, sizes in zip(row_ids.tolist(), blocked, lengths, strict=True):
            hidden = np.repeat(is_blocked, sizes)[:size]
            if hidden.any():
                hidden = np.pad(hidden, (0, size - len(hidden)))
                rows.text[row, hidden] = self.arrangement.options.eod or 0
                rows.hidden[row] = hidden

    def _fill(
        self, row: NDArray[np.int64], parts: Parts, sample_parts: slice, sample: int
    ) -> NDArray[np.int64]:
        """Write one short or rewritten sample to a row; return the lengths of its parts."""
        lengths = parts.lengths[sample_parts]
        text = self.sequences.gather(
            parts.sequences[sample_parts], parts.offsets[sample_parts], lengths
        )
        text = text.astype(np.int64)
        if self.transform is not None:
            random = np.random.default_rng([self.seed, sample])
            pieces = [
                self.transform(part, random) for part in np.split(text, np.cumsum(lengths)[:-1])
            ]
            lengths = np.array([len(piece) for piece in pieces])
            text = np.concatenate(pieces)
        count = min(len(text), len(row))
        row[:count] = text[:count]
        return lengths
