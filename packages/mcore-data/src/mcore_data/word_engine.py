"""WordPiece from remembered words: a corpus uses few of them, again and again.

BERT's normalisation, splitting and word pieces never look over white space or a punctuation
character of ASCII, each of which is a word of its own, so the ids of a text are those of its
words, one after the other. Each distinct word is encoded once, by the tokenizer itself; a
text is then a look-up for each word and one gather. Special tokens are words too.
"""

import json
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.models import WordPiece

from mcore_data.engines import special_ids
from mcore_data.hf_tokenizer import HFTokenizer
from mcore_data.tokenizer import Tokenizer

MAX_WORDS = 400_000
_PUNCTUATION = r"!-/:-@\[-`{-~"
# Python splits at these, BERT's cleaning removes them and so joins what is around them.
_ODD = ("\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85")


class WordEngine:
    """Encodes as a WordPiece ``HFTokenizer`` with BERT's splitting does.

    Args:
        tokenizer: the reference.
        max_words: words to remember; beyond, all are forgotten and learnt again, which
            bounds memory (about 200 bytes a word).

    Raises:
        ValueError: if the tokenizer is of another kind, or has a special token with white
            space in its name, one that is found only as a word or in normalised text, or one
            that does not start with punctuation.
    """

    def __init__(self, tokenizer: Tokenizer, max_words: int = MAX_WORDS) -> None:
        self._tokenizer = _checked(tokenizer)
        before, behind = special_ids(tokenizer)
        self._before = np.array(before, np.uint32)
        self._behind = np.array(behind, np.uint32)
        self._max_words = max_words
        specials = sorted(self._tokenizer.special_names, key=len, reverse=True)
        words = [rf"[^\s{_PUNCTUATION}]+", *map(re.escape, specials), f"[{_PUNCTUATION}]"]
        self._split = re.compile("|".join(words)).findall
        self._forget()
        self.name = "words"

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of each text."""
        split = [[] if _is_odd(text) else self._split(text) for text in texts]
        numbers = self._numbers(split)
        lengths = self._lengths[numbers]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        at = np.repeat(self._starts[numbers] - (ends - lengths), lengths) + np.arange(total)
        ids = self._ids[at]
        word_ends = np.cumsum(np.fromiter(map(len, split), np.int64, len(split)))
        borders = np.concatenate(([0], ends))[word_ends]
        found = np.split(ids, borders[:-1]) if split else []
        for i, text in enumerate(texts):
            if _is_odd(text):
                found[i] = np.array(self._bare([text])[0], np.uint32)
        if len(self._before) or len(self._behind):
            return [np.concatenate((self._before, each, self._behind)) for each in found]
        return list(found)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the tokenizer; the words are learnt again."""
        return WordEngine, (self._tokenizer, self._max_words)

    def _numbers(self, split: Sequence[list[str]]) -> NDArray[np.int64]:
        """Number of each word; words not seen before are encoded."""
        if len(self._known) > self._max_words:
            self._forget()
        num_words = sum(map(len, split))
        known = self._known
        words = chain.from_iterable(split)
        numbers = np.fromiter(map(known.__getitem__, words), np.int64, num_words)
        new = known.take_new()
        if new:
            encoded = self._bare(new)
            lengths = np.fromiter(map(len, encoded), np.int64, len(new))
            ids = np.fromiter(chain.from_iterable(encoded), np.uint32, int(lengths.sum()))
            starts = len(self._ids) + np.cumsum(lengths) - lengths
            self._ids = np.concatenate((self._ids, ids))
            self._starts = np.concatenate((self._starts, starts))
            self._lengths = np.concatenate((self._lengths, lengths))
        return numbers

    def _bare(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer.encode_batch(texts, add_special_tokens=False)

    def _forget(self) -> None:
        self._known = _Numbered()
        self._ids = np.zeros(0, np.uint32)
        self._starts = np.zeros(0, np.int64)
        self._lengths = np.zeros(0, np.int64)


class _Numbered(dict[str, int]):
    """Words by number; looking up a new one gives it the next."""

    def __init__(self) -> None:
        super().__init__()
        self._new: list[str] = []

    def __missing__(self, word: str) -> int:
        self._new.append(word)
        self[word] = len(self)
        return self[word]

    def take_new(self) -> list[str]:
        """Words numbered since the last call, in order."""
        new, self._new = self._new, []
        return new


def _is_odd(text: str) -> bool:
    return any(character in text for character in _ODD)


def _is_plain(token: dict[str, Any]) -> bool:
    """Whether an added token is found wherever a text spells it, as the words are split."""
    name = token["content"]
    starts = re.match(f"[{_PUNCTUATION}]", name) is not None
    return (
        starts and len(name.split()) == 1 and not (token["single_word"] or token["normalized"])
    )


def _checked(tokenizer: Tokenizer) -> HFTokenizer:
    if isinstance(tokenizer, HFTokenizer) and isinstance(tokenizer.core.model, WordPiece):
        parts: dict[str, Any] = json.loads(tokenizer.text)
        kinds = [(parts[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer")]
        plain = all(map(_is_plain, parts["added_tokens"]))
        if kinds == ["BertNormalizer", "BertPreTokenizer"] and plain:
            return tokenizer
    raise ValueError(
        "--engine words needs a BERT tokenizer (WordPiece, BertNormalizer, BertPreTokenizer) "
        "whose special tokens start with punctuation, hold no white space and are found "
        "anywhere in a text. Use --engine reference."
    )
