"""WordPiece encoding with a cache of words, since a corpus repeats few words many times.

BERT's normalisation, splitting and word pieces never depend on text beyond white space, an
ASCII punctuation character or a Chinese character; the last two are words of their own. So the
ids of a text are the concatenated ids of its words. Array operations on the UTF-8 bytes find
the word borders of a batch, and ``word_cache`` holds the ids of words. New words of ASCII
letters and digits are cut into pieces here; the tokenizer encodes all other words and special
tokens.
"""

import json
import re
import string
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.engines.pipeline import words_gap
from mcore_data.engines.protocol import special_ids, surrounded
from mcore_data.engines.word_cache import MAX_WORDS, WordTable, encode_in_batches, padded
from mcore_data.tokenizers.hf import HFTokenizer
from mcore_data.tokenizers.protocol import Tokenizer

_WHITE, _WORD, _ALONE = 0, 1, 2
# First bytes of U+4000 to U+9FFF in UTF-8. Chinese characters begin at U+4E00, E4 B8 80: after
# the first byte E4 the second byte must be B8 or more.
_CHINESE = (0xE4, 0xE9)
_FIRST_SECOND_BYTE = 0xB8
_BEGINNING = 3
_WHITE_BYTE = re.compile(rb"[ \t\n\r]")


class WordEngine:
    """Encodes as a WordPiece ``HFTokenizer`` with BERT's splitting does.

    Args:
        tokenizer: the reference.
        max_words: words after which the cache is cleared (about 100 bytes per word).

    Raises:
        ValueError: if the tokenizer has a part that ``words_gap`` names.
    """

    def __init__(self, tokenizer: Tokenizer, max_words: int = MAX_WORDS) -> None:
        gap = words_gap(tokenizer)
        if gap:
            raise ValueError(
                "--engine words supports BERT's tokenizers (WordPiece, BertNormalizer, "
                f"BertPreTokenizer), and this one has {gap}. Use --engine reference."
            )
        assert isinstance(tokenizer, HFTokenizer)
        self._tokenizer = tokenizer
        parts: dict[str, Any] = json.loads(tokenizer.text)
        before, after = special_ids(tokenizer)
        self._before = np.array(before, np.uint32)
        self._after = np.array(after, np.uint32)
        self._max_words = max_words
        self._specials = _longest_of(self._tokenizer.special_names).finditer
        self._normalizer: dict[str, Any] = parts["normalizer"]
        self._pieces = _Pieces(parts["model"], lower=self._normalizer["lowercase"])
        self._table = WordTable(self._encode_words, max_words)
        self.name = "words"

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the ids of each text."""
        ids = encode_in_batches(
            [text.encode() for text in texts], self._encode_batch, _WHITE_BYTE
        )
        return surrounded(ids, self._before, self._after)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the tokenizer, without the cache."""
        return WordEngine, (self._tokenizer, self._max_words)

    def _encode_batch(self, texts: list[bytes]) -> list[NDArray[np.integer]]:
        data = b"\n%s\n" % b"\n".join(texts)
        starts, ends = self._words(data)
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        last = np.searchsorted(starts, np.cumsum(sizes + 1) + 1)  # words before the next text
        ids, before = self._table.encode(padded(data), starts, ends)
        borders = before[last].tolist()
        return [ids[low:high] for low, high in pairwise([0, *borders])]

    def _words(self, data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return starts and exclusive ends of words; ``data`` has white space at both ends."""
        kinds = np.frombuffer(data.translate(_KINDS), np.uint8)
        # With white space 0, word byte 1 and punctuation 2, a word starts at byte i if
        # kind[i] > (kind[i - 1] & 1): at punctuation, or at a word byte not after a word byte.
        starts = np.empty(len(kinds), bool)
        ends = np.empty(len(kinds), bool)
        starts[0] = ends[-1] = False
        np.greater(kinds[1:], kinds[:-1] & _WORD, out=starts[1:])
        np.greater(kinds[:-1], kinds[1:] & _WORD, out=ends[:-1])
        if self._normalizer["handle_chinese_chars"]:
            _part_chinese(np.frombuffer(data, np.uint8), kinds == _WORD, starts, ends)
        for match in self._specials(data):  # each special token is one word
            first, stop = match.span()
            starts[first:stop] = ends[first:stop] = False
            starts[first] = ends[stop - 1] = True
            starts[stop] |= kinds[stop] == _WORD
        return np.flatnonzero(starts), np.flatnonzero(ends) + 1

    def _encode_words(self, words: Sequence[bytes]) -> list[list[int]]:
        ids = [self._pieces.encode(word) if word.isalnum() else [] for word in words]
        others = [i for i, word in enumerate(words) if not word.isalnum()]
        bare = self._tokenizer.encode_batch(
            [words[i].decode() for i in others], add_special_tokens=False
        )
        for i, each in zip(others, bare, strict=True):
            ids[i] = each
        return ids


class _Pieces:
    """Greedy longest-match WordPiece for words of ASCII letters and digits.

    Args:
        model: the part ``model`` of a WordPiece ``tokenizer.json``.
        lower: whether words are converted to lower case first.
    """

    def __init__(self, model: dict[str, Any], *, lower: bool) -> None:
        prefix: str = model["continuing_subword_prefix"]
        vocab: dict[str, int] = model["vocab"]
        inner = {piece: i for piece, i in vocab.items() if piece.startswith(prefix)}
        self._first = {piece.encode(): i for piece, i in vocab.items()}
        self._next = {piece.removeprefix(prefix).encode(): i for piece, i in inner.items()}
        self._longest_first = _longest_by_beginning(self._first)
        self._longest_next = _longest_by_beginning(self._next)
        self._unknown = [vocab[model["unk_token"]]]
        self._max_letters: int = model["max_input_chars_per_word"]
        self._lower = lower

    def encode(self, word: bytes) -> list[int]:
        """Return the ids of a word's pieces; the unknown id if some rest has no piece."""
        if len(word) > self._max_letters:
            return self._unknown
        if self._lower:
            word = word.lower()
        ids: list[int] = []
        start, pieces, longest = 0, self._first, self._longest_first
        while start < len(word):
            max_bytes = longest.get(word[start : start + _BEGINNING], _BEGINNING)
            for end in range(min(len(word), start + max_bytes), start, -1):
                piece_id = pieces.get(word[start:end])
                if piece_id is not None:
                    break
            else:
                return self._unknown
            ids.append(piece_id)
            start, pieces, longest = end, self._next, self._longest_next
        return ids


def _longest_by_beginning(pieces: Iterable[bytes]) -> dict[bytes, int]:
    """Return the length of the longest piece for each first ``_BEGINNING`` bytes.

    A beginning without an entry has no piece longer than ``_BEGINNING`` bytes.
    """
    longest: dict[bytes, int] = {}
    for piece in sorted(pieces, key=len):
        longest[piece[:_BEGINNING]] = len(piece)
    return longest


def _longest_of(names: Sequence[str]) -> re.Pattern[bytes]:
    """Return a pattern of the longest name at a position, with beginnings factored out."""
    rests: dict[bytes, list[bytes]] = {}
    for name in sorted(map(str.encode, names), key=len, reverse=True):
        rests.setdefault(name[:_BEGINNING], []).append(re.escape(name[_BEGINNING:]))
    beginnings = sorted(rests, key=len, reverse=True)
    patterns = [
        b"%s(?:%s)" % (re.escape(beginning), b"|".join(rests[beginning]))
        for beginning in beginnings
    ]
    return re.compile(b"|".join(patterns) or b"(?!)")


def _kinds() -> bytes:
    """Return the kind of each byte: BERT's white space, ASCII punctuation, or word byte."""
    kinds = bytearray([_WORD]) * 256
    for byte in string.punctuation.encode():
        kinds[byte] = _ALONE
    for byte in b" \t\n\r":
        kinds[byte] = _WHITE
    return bytes(kinds)


_KINDS = _kinds()


def _part_chinese(
    data: NDArray[np.uint8],
    is_word: NDArray[np.bool_],
    starts: NDArray[np.bool_],
    ends: NDArray[np.bool_],
) -> None:
    """Mark each character of U+4E00 to U+9FFF (three bytes) as a word, in place."""
    first, last = _CHINESE
    positions = np.flatnonzero(data - np.uint8(first) <= last - first)
    if not len(positions):
        return
    positions = positions[
        (data[positions] > first) | (data[positions + 1] >= _FIRST_SECOND_BYTE)
    ]
    starts[positions] = ends[positions + 2] = True
    starts[positions + 3] |= is_word[positions + 3]
    ends[positions - 1] |= is_word[positions - 1]
