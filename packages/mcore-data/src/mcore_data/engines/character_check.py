"""Finds texts with characters that an engine and its tokenizer may classify differently.

Byte-level BPE splits text by classes of characters (letters, marks, digits) before it merges.
Engine and tokenizer may use different versions of Unicode, and so split differently at recently
added characters. The engine leaves texts with such characters to the tokenizer.

Each character is compared when it first occurs. Both encoders get a vocabulary whose only
merges join an ASCII byte with the first or last byte of another character, so that equal ids
mean equal splits on both sides of the character, whatever the real vocabulary can merge.
"""

import json
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from mcore_data.tokenizers.hf import byte_letters

Encode = Callable[[list[str]], Iterable[Iterable[int]]]

_UNKNOWN, _SAME, _DIFFERS = 0, 1, 2
_NEIGHBOURS = "aA1. \n'"
# The character next to each class of neighbour, twice in a row, and after the mark with the
# highest combining class, where normalisation reorders every mark that it can.
_CONTEXT = "a{0}a1{0}1.{0}. {0} \n{0}\nA{0}A'{0}'{0}{0}q\u0345{0}q"
_NUM_CODES = 0x110000
_CHUNK = 1 << 16


class CharacterCheck:
    """Compares two encoders character by character, as characters occur.

    Args:
        open_pair: opens the two encoders; called at the first non-ASCII text.
        normalizes: whether the encoders apply a Unicode normal form.
    """

    def __init__(
        self, open_pair: Callable[[], tuple[Encode, Encode]], *, normalizes: bool
    ) -> None:
        self._open_pair = open_pair
        self._normalizes = normalizes
        self._pair: tuple[Encode, Encode] | None = None
        self._state = np.zeros(_NUM_CODES, np.uint8)
        self._state[:0x80] = _SAME
        self._is_open = np.ones(0x10000, bool)  # by UTF-16 unit: not known to be equal
        self._is_open[:0x80] = False

    def differing(self, texts: Sequence[str]) -> list[int]:
        """Return the indices of texts with a character on which the encoders may differ."""
        wide = [i for i, text in enumerate(texts) if not text.isascii()]
        joined = "".join([texts[i] for i in wide])
        if not self._has_open(joined):
            return []
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4")
        states = self._state[codes]
        if not states.all():
            self._compare(np.unique(codes[states == _UNKNOWN]).tolist())
            states = self._state[codes]
        differing = np.flatnonzero(states == _DIFFERS)
        ends = np.cumsum([len(texts[i]) for i in wide])
        return [wide[i] for i in np.unique(np.searchsorted(ends, differing, side="right"))]

    def _has_open(self, text: str) -> bool:
        """Whether a text may have a character not known to be equal; fast, by UTF-16 units.

        Surrogates are always open, so every character beyond U+FFFF counts as open.
        """
        for start in range(0, len(text), _CHUNK):
            units = text[start : start + _CHUNK].encode("utf-16-le", "surrogatepass")
            if self._is_open.take(np.frombuffer(units, "<u2")).any():
                return True
        return False

    def _compare(self, codes: list[int]) -> None:
        """Encode characters by both encoders, and record which characters differ."""
        if self._pair is None:
            self._pair = self._open_pair()
            if self._normalizes:
                self._compare_compositions()
        chars = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
        texts = [_CONTEXT.format(char) for char in chars]
        for char, same in zip(chars, self._encode_equally(texts), strict=True):
            is_unassigned = self._normalizes and unicodedata.category(char) == "Cn"
            self._note(char, same=same and not is_unassigned)

    def _compare_compositions(self) -> None:
        """Compare the pairs that canonical composition joins; record the second characters.

        Python's Unicode table lists the pairs. Characters missing in the table are never
        considered equal, since they may compose in unknown ways.
        """
        chars = [chr(code) for code in range(0x80, 0x33480)]
        decompositions = [unicodedata.decomposition(char) for char in chars]
        pairs = [
            "".join(chr(int(code, 16)) for code in each.split())
            for each in decompositions
            if each and each[0] != "<"
        ]
        for pair, same in zip(pairs, self._encode_equally(pairs), strict=True):
            if not same:
                self._note(pair[-1], same=False)

    def _encode_equally(self, texts: list[str]) -> list[bool]:
        assert self._pair is not None
        first, second = (encode(texts) for encode in self._pair)
        return [list(a) == list(b) for a, b in zip(first, second, strict=True)]

    def _note(self, char: str, *, same: bool) -> None:
        code = ord(char)
        if self._state[code] == _UNKNOWN:
            self._state[code] = _SAME if same else _DIFFERS
        if code < len(self._is_open):
            self._is_open[code] = self._state[code] != _SAME


def border_vocabulary(pre_tokenizer: Any, normalizer: Any) -> str:
    """Return a ``tokenizer.json`` of byte-level BPE whose ids show where a text is split."""
    letters = byte_letters()
    first_bytes, last_bytes = range(0xC2, 0xF5), range(0x80, 0xC0)
    merges = [
        *((letters[ord(left)], letters[byte]) for left in _NEIGHBOURS for byte in first_bytes),
        *((letters[byte], letters[ord(right)]) for right in _NEIGHBOURS for byte in last_bytes),
    ]
    vocab = {name: i for i, name in enumerate(chain(letters, map("".join, merges)))}
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    parts = {"version": "1.0", "added_tokens": []}
    parts |= {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model}
    return json.dumps(parts)
