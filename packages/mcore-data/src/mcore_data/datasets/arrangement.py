"""Makes samples from rows of tokens: labels, loss mask, positions and document borders.

All fixed-length datasets use this module. A row holds S + 1 tokens; the last one is only a
label. Padding is masked by position, never by token id, so no target is lost if the padding id
is the end-of-document id. The reset options look for the end-of-document id; packed borders are
those of the stored documents, whatever their ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    """How samples are made of tokens: labels, masks, positions, document borders.

    Attributes:
        eod: end-of-document id, required by the options that depend on it.
        reset_position_ids: count positions from 0 again after each end of document.
        reset_attention_mask: add document borders at end-of-document tokens, so that no token
            attends to tokens before its document.
        eod_mask_loss: no loss at positions whose input token is an end of document.
        create_attention_mask: add the dense causal mask, [1, S, S], even if nothing is reset.
        inter_document_masking: add the borders of the stored documents, whatever their ids, for
            packed attention.
        shift_labels: read one more token, so that the last label is a real token (Megatron's
            add_extra_token_to_sequence). False masks the last position instead.
        drop_last_partial: drop the last tokens if they do not fill a sample; False pads.
    """

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = False
    inter_document_masking: bool = False
    shift_labels: bool = True
    drop_last_partial: bool = True

    @property
    def needs_borders(self) -> bool:
        """Whether samples depend on document borders."""
        return (
            self.reset_position_ids
            or self.reset_attention_mask
            or self.create_attention_mask
            or self.inter_document_masking
        )


@dataclass(frozen=True, slots=True)
class TextRows:
    """Rows of a batch, which one or several datasets fill with text.

    Attributes:
        text: int64 [B, S + 1].
        num_tokens: int64 [B], tokens of each row.
        part_ends: for each row the ends of its stored documents, if an option needs them.
        hidden: for rows with blocked documents a mask of their tokens, bool [S + 1], by row.
    """

    text: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    part_ends: list[NDArray[np.int64]]
    hidden: dict[int, NDArray[np.bool_]] = field(default_factory=dict)


@dataclass(slots=True)
class Arrangement:
    """Makes samples from rows of text; datasets with equal arrangements can fill one batch.

    Attributes:
        sequence_length: S, tokens in a sample.
        options: masks, positions and borders to add.

    Raises:
        ValueError: if an option needs ``eod``.
    """

    sequence_length: int
    options: SampleOptions
    _positions: NDArray[np.int64] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        options = self.options
        reads_ends = options.reset_position_ids or options.reset_attention_mask
        if (reads_ends or options.eod_mask_loss) and options.eod is None:
            raise ValueError(
                "--reset-position-ids, --reset-attention-mask and --eod-mask-loss act on the "
                "end-of-document token, and the tokenizer has none. Leave these flags out, or "
                "use a tokenizer that has one."
            )

    def empty_rows(self, count: int) -> TextRows:
        """Allocate rows for a batch of ``count`` samples."""
        text = np.empty((count, self.sequence_length + 1), np.int64)
        return TextRows(text, np.empty(count, np.int64), [np.empty(0, np.int64)] * count)

    def arrange(self, rows: TextRows) -> dict[str, NDArray[Any]]:
        """Make a batch of samples from filled rows; batches share the array of positions."""
        count = len(rows.text)
        if self._positions is None or len(self._positions) < count:
            self._positions = np.tile(np.arange(self.sequence_length), (count, 1))
        batch = arrange(
            rows.text, rows.num_tokens, rows.part_ends, self._positions[:count], self.options
        )
        for row, hidden in rows.hidden.items():
            batch["loss_mask"][row, hidden[:-1] | hidden[1:]] = 0.0
        return batch


def arrange(
    text: NDArray[np.int64],
    num_tokens: NDArray[np.int64],
    part_ends: Sequence[NDArray[np.int64]],
    positions: NDArray[np.int64],
    options: SampleOptions,
) -> dict[str, NDArray[Any]]:
    """Make a batch of samples from rows of text; tokens and labels are views of ``text``.

    Args:
        text: int64 [B, S + 1], padded with 0.
        num_tokens: int64 [B], tokens of each row.
        part_ends: for each row the ends of its stored documents; used for
            ``inter_document_masking`` only.
        positions: int64 [B, S], 0 to S - 1 in each row; used unless positions are reset.
        options: masks, positions and borders to add.
    """
    tokens, labels = text[:, :-1], text[:, 1:]
    B, S = tokens.shape
    loss_mask = np.ones((B, S), np.float32)
    for row in np.flatnonzero(num_tokens <= S).tolist():
        loss_mask[row, max(0, num_tokens[row] - 1) :] = 0.0  # labels from here on are padding
    if options.eod_mask_loss:
        real = np.arange(S) < num_tokens[:, None]
        loss_mask[(tokens == options.eod) & real] = 0.0
    batch: dict[str, NDArray[Any]] = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": positions,
    }
    if options.needs_borders:
        rows = [
            _starts(tokens[row, : num_tokens[row]], part_ends[row], options) for row in range(B)
        ]
        added = [_with_borders(starts, S, options) for starts in rows]
        batch |= {key: np.stack([row[key] for row in added]) for key in added[0]}
    return batch


def _starts(
    tokens: NDArray[np.int64], part_ends: NDArray[np.int64], options: SampleOptions
) -> NDArray[np.int64]:
    """Return the positions at which documents start, without position 0."""
    if options.inter_document_masking:
        starts = np.asarray(part_ends)
    elif options.eod is None:
        return np.zeros(0, np.int64)
    else:
        starts = np.flatnonzero(tokens == options.eod) + 1
    return starts[starts > 0]


def _with_borders(
    starts: NDArray[np.int64], sequence_length: int, options: SampleOptions
) -> dict[str, NDArray[Any]]:
    """Return the positions, mask and borders of one row that depend on document starts."""
    starts = starts[starts < sequence_length]
    row: dict[str, NDArray[Any]] = {}
    if options.reset_position_ids or options.inter_document_masking:
        row["position_ids"] = count_from(starts, sequence_length)
    if options.create_attention_mask:
        hidden_before = starts if options.reset_attention_mask else starts[:0]
        row["attention_mask"] = causal_mask(hidden_before, sequence_length)
    if options.reset_attention_mask or options.inter_document_masking:
        row |= packed_borders(starts, sequence_length)
    return row


def count_from(starts: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
    """Return positions that count from 0 again at each start."""
    last_start = np.zeros(sequence_length, np.int64)
    last_start[starts] = starts
    return np.arange(sequence_length) - np.maximum.accumulate(last_start)


def causal_mask(starts: NDArray[np.int64], sequence_length: int) -> NDArray[np.bool_]:
    """Return a mask [1, S, S], True = hidden: later tokens, and tokens of other documents."""
    segment = np.zeros(sequence_length, np.int64)
    segment[starts] = 1
    segment = np.cumsum(segment)  # number of the document of each token
    position = np.arange(sequence_length)
    later = position[None, :] > position[:, None]
    return (later | (segment[None, :] != segment[:, None]))[None]


def packed_borders(starts: NDArray[np.int64], sequence_length: int) -> dict[str, NDArray[Any]]:
    """Return the document borders of a sample in the form of variable-length attention.

    Returns:
        ``cu_seqlens``, int32 [S + 1], from 0 to S and padded with S, so that samples stack;
        ``max_seqlen``, int32 scalar, tokens of the longest document.
    """
    borders = np.unique(np.concatenate([[0], starts, [sequence_length]]))
    cu_seqlens = np.full(sequence_length + 1, sequence_length, np.int32)
    cu_seqlens[: len(borders)] = borders
    return {"cu_seqlens": cu_seqlens, "max_seqlen": np.array(np.diff(borders).max(), np.int32)}
