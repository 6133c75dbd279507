"""SentencePiece byte pairs from remembered words, where the vocabulary says what a word is.

A merge joins two neighbours to a piece of the vocabulary. Two characters that no piece holds
side by side are therefore never joined, and text may be cut between them: its ids are those
of the parts, one after the other. Models split by script and by digits when they are trained,
so the parts are short, and ``word_table.py`` has their ids. New ones are encoded by
the model itself, with its blank in front switched off.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.engines.protocol import special_ids, surrounded
from mcore_data.engines.word_cache import MAX_WORDS, WordTable, encode_in_batches, padded
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_data.tokenizers.sentencepiece import SentencePieceTokenizer

# Numbers of fields in sentencepiece_model.proto.
_TRAINER, _NORMALIZER = 2, 3
_MODEL_TYPE, _BLANKS_BEHIND, _BYTE_FALLBACK = 3, 24, 35
_CHARACTER_MAP, _BLANK_FIRST, _DROP_BLANKS, _ESCAPE_BLANKS = 2, 3, 4, 5
_BYTE_PAIRS = 2
# A message behind a message sets fields of it: here, no blank in front.
_NO_BLANK_FIRST = bytes([_NORMALIZER << 3 | 2, 2, _BLANK_FIRST << 3, 0])

_BLANK = "\u2581"
_FIRST_BLANK = re.compile(rb"[^ ] ")
# All characters beyond ASCII are taken for one, which is seen by its first and last byte.
_OTHER_FIRST, _OTHER_LAST = 0x80, 0x81
_KINDS = bytes([*range(0x80), *[_OTHER_LAST] * 0x40, *[_OTHER_FIRST] * 0x40])


class SentencePieceEngine:
    """Encodes as a ``SentencePieceTokenizer`` of byte pairs does.

    Args:
        tokenizer: the reference; its model has byte fallback and leaves text as it is but
            for a blank in front, as Llama 2's does.
        max_words: words to remember; beyond, all are forgotten and learnt again, which
            bounds memory (about 100 bytes a word).

    Raises:
        ValueError: if the model is of another kind, or has pieces with a blank in the middle.
    """

    def __init__(self, tokenizer: Tokenizer, max_words: int = MAX_WORDS) -> None:
        if not isinstance(tokenizer, SentencePieceTokenizer):
            raise ValueError("--engine words needs a SentencePiece model here.")
        from sentencepiece import SentencePieceProcessor

        self._tokenizer = tokenizer
        model = tokenizer.path.read_bytes()
        self._blank_first = _checked(model)
        self._model = SentencePieceProcessor(model_proto=model + _NO_BLANK_FIRST)
        self._is_border = _borders(_pieces(self._model))
        before, behind = special_ids(tokenizer)
        self._before = np.array(before, np.uint32)
        self._behind = np.array(behind, np.uint32)
        self._max_words = max_words
        self._table = WordTable(self._encode_words, max_words)
        self.name = "words"

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of each text."""
        first = " " if self._blank_first else ""
        lines = [(first + text).encode() if text else b"" for text in texts]
        if any(_BLANK in text for text in texts):  # spelled out, it is a blank too
            lines = [line.replace(_BLANK.encode(), b" ") for line in lines]
        ids = encode_in_batches(lines, self._encode_batch, _FIRST_BLANK)
        return surrounded(ids, self._before, self._behind)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the tokenizer; the words are learnt again."""
        return SentencePieceEngine, (self._tokenizer, self._max_words)

    def _encode_batch(self, texts: list[bytes]) -> list[NDArray[np.integer]]:
        data = b"".join(texts)
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        text_ends = np.cumsum(sizes)
        starts = self._starts(data, text_ends - sizes)
        ids, before = self._table.encode(padded(data), starts, np.append(starts[1:], len(data)))
        borders = before[np.searchsorted(starts, text_ends)].tolist()
        return [ids[low:high] for low, high in pairwise([0, *borders])]

    def _starts(self, data: bytes, text_starts: NDArray[np.int64]) -> NDArray[np.int64]:
        kinds = np.frombuffer(data.translate(_KINDS), np.uint8)
        pairs = kinds[:-1].astype(np.uint16)
        pairs <<= 8
        pairs |= kinds[1:]
        starts = np.zeros(len(data) + 1, bool)
        np.take(self._is_border, pairs, out=starts[1:-1])
        starts[text_starts] = True
        return np.flatnonzero(starts[:-1])

    def _encode_words(self, words: Sequence[bytes]) -> list[list[int]]:
        return self._model.encode([word.decode() for word in words], num_threads=1)


def _pieces(model: Any) -> Iterator[str]:
    """Pieces that merges or the text itself can make."""
    for i in range(len(model)):
        if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i)):
            yield model.id_to_piece(i)


def _borders(pieces: Iterator[str]) -> NDArray[np.bool_]:
    """Whether text may be cut between two bytes, flat, by 256 times the first kind.

    Raises:
        ValueError: if not always before a blank that is behind another character.
    """
    neighbours = {pair for piece in pieces for pair in pairwise(piece.replace(_BLANK, " "))}
    borders = np.ones((256, 256), bool)
    for left, right in neighbours:
        behind = ord(left) if left.isascii() else _OTHER_LAST
        borders[behind, ord(right) if right.isascii() else _OTHER_FIRST] = False
    borders[_OTHER_FIRST] = borders[:, _OTHER_LAST] = False  # within a character
    before_blank = np.delete(borders[: _OTHER_LAST + 1, ord(" ")], [ord(" "), _OTHER_FIRST])
    if not before_blank.all():
        raise ValueError("--engine words: the model has pieces with a blank in the middle.")
    return borders.reshape(-1)


def _checked(model: bytes) -> bool:
    """Whether a model of the kind that is done here puts a blank in front of a text.

    Raises:
        ValueError: if it is of another kind.
    """
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(model):
        if number == _TRAINER:
            trainer.update(_fields(value))
        elif number == _NORMALIZER:
            normalizer.update(_fields(value))
    fits = (
        trainer.get(_MODEL_TYPE) == _BYTE_PAIRS
        and trainer.get(_BYTE_FALLBACK, 0)
        and not trainer.get(_BLANKS_BEHIND, 0)
        and not normalizer.get(_CHARACTER_MAP, b"")
        and not normalizer.get(_DROP_BLANKS, 1)
        and normalizer.get(_ESCAPE_BLANKS, 1)
    )
    if not fits:
        raise ValueError(
            "--engine words needs a SentencePiece model of byte pairs with byte fallback, "
            "without normalisation, that keeps blanks."
        )
    return bool(normalizer.get(_BLANK_FIRST, 1))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message: a number, or bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind, -1)
        if kind == 2:
            size, at = _varint(message, at)
        if size < 0:
            raise ValueError("--engine words cannot read the SentencePiece model.")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = shift = 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | message[at] << shift, at + 1
