"""GPT samples: L tokens and the same tokens shifted by one, from documents end to end.

Padding is masked by position, never by token id, so a tokenizer whose pad is its end of
document loses no target. The options at document ends look for the end-of-document id.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_data.sample_index import SampleIndexSpec, load_sample_index


class Sequences(Protocol):
    """Stored sequences, such as an ``IndexedDataset``."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence."""
        ...

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """A range of one sequence."""
        ...


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
    ) -> None:
        self.sequences = sequences
        self.sequence_length = sequence_length
        self.shift_labels = shift_labels
        self.reset_position_ids = reset_position_ids
        self.reset_attention_mask = reset_attention_mask
        self.eod_mask_loss = eod_mask_loss
        self.create_attention_mask = create_attention_mask
        self.inter_document_masking = inter_document_masking
        self.eod = eod
        if eod is None and (reset_position_ids or reset_attention_mask or eod_mask_loss):
            raise ValueError(
                "--reset-position-ids, --reset-attention-mask and --eod-mask-loss act on the "
                "end-of-document token, and the tokenizer has none."
            )
        lengths = sequences.lengths
        ids = range(len(lengths)) if document_ids is None else document_ids
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
        """Samples that can be asked for."""
        return len(self.index.shuffle)

    def __getitem__(self, sample: int | None) -> dict[str, NDArray[Any]]:
        """Sample by its place in the shuffled order; None gives one that counts nothing."""
        if sample is None:
            return self[0] | {"loss_mask": np.zeros(self.sequence_length, np.float32)}
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        S = self.sequence_length
        parts = self._parts(sample)
        text = np.zeros(S + 1, np.int64)
        num_tokens = sum(len(part) for part in parts)
        np.concatenate(parts, out=text[:num_tokens])
        loss_mask = np.ones(S, np.float32)
        loss_mask[num_tokens - 1 :] = 0.0  # from here on there is no next token
        tokens, labels = text[:-1], text[1:]
        if self.eod_mask_loss:
            loss_mask[tokens[:num_tokens] == self.eod] = 0.0
        starts = self._document_starts(tokens[:num_tokens], parts)
        result: dict[str, NDArray[Any]] = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": (
                count_from(starts, S)
                if self.reset_position_ids or self.inter_document_masking
                else np.arange(S, dtype=np.int64)
            ),
        }
        if self.create_attention_mask:
            result["attention_mask"] = causal_mask(
                starts if self.reset_attention_mask else starts[:0], S
            )
        if self.inter_document_masking or self.reset_attention_mask:
            result |= packed_borders(starts, S)
        return result

    def sources(self, sample: int) -> list[tuple[int, int, int]]:
        """Where a sample comes from: (sequence, offset, number of tokens) of each part."""
        row = int(self.index.shuffle[sample])
        (first, offset), (last, end) = self.index.samples[row : row + 2].tolist()
        extra = int(self.shift_labels)
        documents = self.index.documents[first : last + 1].tolist()
        if first == last:
            return [(documents[0], offset, end - offset + extra)]
        middle = [(i, 0, int(self.sequences.lengths[i])) for i in documents[1:-1]]
        rest = int(self.sequences.lengths[documents[0]]) - offset
        return [(documents[0], offset, rest), *middle, (documents[-1], 0, end + extra)]

    def _parts(self, sample: int) -> list[NDArray[Any]]:
        return [self.sequences.get(*source) for source in self.sources(sample)]

    def _document_starts(
        self, tokens: NDArray[np.int64], parts: list[NDArray[Any]]
    ) -> NDArray[np.int64]:
        """Positions at which a document starts, the first one left out."""
        if self.inter_document_masking:
            starts = np.cumsum([len(part) for part in parts])
        elif self.eod is None:
            return np.zeros(0, np.int64)
        else:
            starts = np.flatnonzero(tokens == self.eod) + 1
        return starts[(starts > 0) & (starts < self.sequence_length)]


def count_from(starts: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
    """Positions that count from 0 again at each start."""
    origin = np.zeros(sequence_length, np.int64)
    origin[starts] = starts
    return np.arange(sequence_length) - np.maximum.accumulate(origin)


def causal_mask(starts: NDArray[np.int64], sequence_length: int) -> NDArray[np.bool_]:
    """Mask [1, S, S], True = hidden: later tokens, and those before a start."""
    segment = np.zeros(sequence_length, np.int64)
    segment[starts] = 1
    segment = np.cumsum(segment)
    position = np.arange(sequence_length)
    later = position[None, :] > position[:, None]
    return (later | (segment[None, :] != segment[:, None]))[None]


def packed_borders(starts: NDArray[np.int64], sequence_length: int) -> dict[str, NDArray[Any]]:
    """Borders of the documents of a sample in the form of variable-length attention."""
    borders = np.unique(np.concatenate([[0], starts, [sequence_length]]))
    cu_seqlens = np.full(sequence_length + 1, sequence_length, np.int32)
    cu_seqlens[: len(borders)] = borders
    return {"cu_seqlens": cu_seqlens, "max_seqlen": np.array(np.diff(borders).max(), np.int32)}
