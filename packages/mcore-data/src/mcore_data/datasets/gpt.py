"""GPT samples: L tokens and the same tokens shifted by one, from documents end to end.

A batch of samples is one vectorised look-up: which ranges of which documents, then one copy
that widens the stored tokens to int64. ``arrangement`` adds the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.arrangement import Arrangement, SampleOptions, TextRows
from mcore_data.datasets.sample_index import SampleIndexSpec, load_sample_index


class Sequences(Protocol):
    """Stored sequences, such as an ``IndexedDataset``."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence."""

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """A range of one sequence."""

    def gather(
        self,
        sequences: NDArray[np.integer],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> NDArray[Any]:
        """Ranges of many sequences, end to end."""


class PartTransform(Protocol):
    """Something that rewrites a sample document by document, such as fill-in-the-middle."""

    @property
    def pad(self) -> int:
        """Id that fills what a rewritten sample is short of; never counts in the loss."""

    def __call__(
        self, part: NDArray[np.int64], random: np.random.Generator
    ) -> NDArray[np.int64]:
        """Tokens to take in place of the sample's range of one document."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The ranges of stored sequences that make some samples, sample after sample.

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
    ``inter_document_masking`` also ``cu_seqlens`` (int32 [S + 1], borders of the documents,
    filled up with S) and ``max_seqlen`` (int32 scalar).

    Args:
        sequences: the stored tokens.
        sequence_length: S, tokens in a sample.
        seed: of the shuffles.
        num_samples: samples wanted at least; 0 means one epoch. Whole epochs are laid out,
            so ``len`` may be larger.
        document_ids: sequences to use, in any order; None means all.
        eod: end-of-document id; needed by the options that act on it.
        shift_labels: take one token more, so that the last label is a real token (Megatron's
            add_extra_token_to_sequence). False masks the last position instead.
        drop_last_partial: leave out the last tokens if they fill no sample; False pads.
        reset_position_ids: count positions from 0 again after each end of document.
        reset_attention_mask: let no token see behind an end of document: gives the borders,
            at the tokens ``eod``.
        eod_mask_loss: no loss where the input token is an end of document.
        create_attention_mask: give the causal mask even when nothing is reset.
        inter_document_masking: give document borders for packed attention; they are the
            borders of the stored documents, whatever ids these hold.
        cache_folder: where the index is kept for later runs and other ranks.
        transform: rewrites each document's part of a sample, by chance drawn from the seed
            and the sample's number alone; the row is then cut or padded to its length.

    Raises:
        ValueError: if an option needs ``eod``, or the documents make no sample.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        sequence_length: int,
        seed: int = 1234,
        num_samples: int = 0,
        document_ids: Sequence[int] | NDArray[np.integer] | None = None,
        eod: int | None = None,
        shift_labels: bool = True,
        drop_last_partial: bool = True,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
        create_attention_mask: bool = False,
        inter_document_masking: bool = False,
        cache_folder: str | Path = "",
        transform: PartTransform | None = None,
    ) -> None:
        self.sequences = sequences
        self.sequence_length = sequence_length
        self.shift_labels = shift_labels
        self.seed = seed
        self.transform = transform
        options = SampleOptions(
            eod=eod,
            reset_position_ids=reset_position_ids,
            reset_attention_mask=reset_attention_mask,
            eod_mask_loss=eod_mask_loss,
            create_attention_mask=create_attention_mask,
            inter_document_masking=inter_document_masking,
        )
        self.arrangement = Arrangement(sequence_length, options)
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
            extra_tokens=int(shift_labels),
            num_samples=num_samples,
            seed=seed,
            drop_last_partial=drop_last_partial,
        )
        self.index = load_sample_index(lengths, ids, spec, cache_folder)

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def __getitem__(self, sample: int | None) -> dict[str, NDArray[Any]]:
        """Sample by its place in the shuffled order; None gives one that counts nothing."""
        if sample is None:
            return self[0] | {"loss_mask": np.zeros(self.sequence_length, np.float32)}
        return {key: value[0] for key, value in self.batch([sample]).items()}

    def batch(self, samples: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Samples stacked: each array has a leading dimension B.

        Batches share ``position_ids`` where nothing resets them: copy them to change them.

        Raises:
            IndexError: if a sample does not exist.
        """
        rows = self.arrangement.empty_rows(len(samples))
        self.write(samples, rows, np.arange(len(samples)))
        return self.arrangement.arrange(rows)

    def write(
        self, samples: Sequence[int], rows: TextRows, places: NDArray[np.integer]
    ) -> None:
        """Write samples into rows of a batch, for ``arrangement`` to make samples of.

        Args:
            samples: which samples, [b].
            rows: of the batch; those at other places are left as they are.
            places: row of each sample, [b].

        Raises:
            IndexError: if a sample does not exist.
        """
        parts = self.parts(samples)
        begins = np.cumsum(parts.counts) - parts.counts
        num_tokens = np.add.reduceat(parts.lengths, begins)
        size = self.sequence_length + 1
        part_lengths = []
        if self.transform is None and (num_tokens == size).all():
            found = self.sequences.gather(parts.sequences, parts.offsets, parts.lengths)
            rows.text[places] = found.reshape(-1, size)  # widened on the way
            if self.arrangement.options.needs_borders:
                part_lengths = np.split(parts.lengths, begins[1:])
        else:
            rows.text[places] = self.transform.pad if self.transform else 0
            for sample, place, start, count in zip(
                samples, places, begins, parts.counts, strict=True
            ):
                mine = slice(start, start + count)
                part_lengths.append(self._fill(rows.text[place], parts, mine, sample))
            num_tokens = np.array([min(sum(n), size) for n in part_lengths])
        rows.num_tokens[places] = num_tokens
        for place, lengths in zip(places, part_lengths, strict=False):  # none if not needed
            rows.part_ends[place] = np.cumsum(lengths)

    def parts(self, samples: Sequence[int]) -> Parts:
        """Where samples come from.

        Raises:
            IndexError: if a sample does not exist.
        """
        places = np.asarray(samples)
        if not 0 <= places.min() <= places.max() < len(self):
            raise IndexError(f"sample {places.min()} to {places.max()} of {len(self)}")
        rows = self.index.shuffle[places].astype(np.int64)
        first, last = self.index.samples[rows], self.index.samples[rows + 1]
        counts = (last[:, 0] - first[:, 0] + 1).astype(np.int64)
        ends = np.cumsum(counts)
        begins = ends - counts
        line = np.arange(ends[-1]) - np.repeat(begins - first[:, 0], counts)
        sequences = self.index.documents[line]
        stops = self.sequences.lengths[sequences].astype(np.int64)
        stops[ends - 1] = last[:, 1] + int(self.shift_labels)
        offsets = np.zeros(len(line), np.int64)
        offsets[begins] = first[:, 1]
        return Parts(sequences, offsets, stops - offsets, counts)

    def sources(self, sample: int) -> list[tuple[int, int, int]]:
        """Where a sample comes from: (sequence, offset, number of tokens) of each part."""
        parts = self.parts([sample])
        columns = (parts.sequences.tolist(), parts.offsets.tolist(), parts.lengths.tolist())
        return list(zip(*columns, strict=True))

    def places(self, sequence: int) -> list[int]:
        """Samples that a stored sequence takes part in, in the order of the text."""
        line = np.flatnonzero(self.index.documents == sequence)
        rows = self.index.samples[:, 0]
        first = np.maximum(np.searchsorted(rows, line, side="left") - 1, 0)
        last = np.searchsorted(rows, line, side="right")
        rows = [row for a, b in zip(first, last, strict=True) for row in range(a, b)]
        rows = [row for row in dict.fromkeys(rows) if row < len(self.index.shuffle)]
        samples = np.argsort(self.index.shuffle)[np.array(rows, np.int64)].tolist()
        return [
            sample
            for sample in samples
            if sample < len(self)
            and any(part == sequence and count for part, _, count in self.sources(sample))
        ]

    def _fill(
        self, row: NDArray[np.int64], parts: Parts, mine: slice, sample: int
    ) -> NDArray[np.int64]:
        """Write one sample that is short or rewritten; returns the lengths of its parts."""
        lengths = parts.lengths[mine]
        text = self.sequences.gather(parts.sequences[mine], parts.offsets[mine], lengths)
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
