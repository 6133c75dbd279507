"""Byte-pair encoding by gigatoken (extra ``fast``), for HF and SentencePiece files.

Gigatoken splits text by hand-written code instead of a regular expression and caches the ids of
words, which makes it about twenty times as fast as the tokenizers library on one core. It runs
on the calling thread; processes divide the work. Its cache is unbounded, so it is reopened now
and then. The tokenizer encodes texts that gigatoken would encode differently, because of their
characters or because they spell out control pieces.
"""

import json
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from mcore_data.engines.pipeline import gigatoken_gap
from mcore_data.engines.protocol import special_ids, surrounded
from mcore_data.engines.spot_check import has_flagged
from mcore_data.tokenizers.hf import HFTokenizer, byte_letters
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_data.tokenizers.sentencepiece import SentencePieceTokenizer

FORGET_AFTER = 1 << 30

Encode = Callable[[list[str]], Iterable[Iterable[int]]]

_UNKNOWN, _SAME, _DIFFERS = 0, 1, 2
_NEIGHBOURS = "aA1. \n'"
# The character next to each class of neighbour, twice in a row, and after the mark with the
# highest combining class, where normalisation reorders every mark that it can.
_CONTEXT = "a{0}a1{0}1.{0}. {0} \n{0}\nA{0}A'{0}'{0}{0}q\u0345{0}q"
_NUM_CODES = 0x110000


class GigatokenEngine:
    """Encodes as a BPE tokenizer of Hugging Face or SentencePiece does.

    Args:
        tokenizer: an ``HFTokenizer`` with a BPE model, or a ``SentencePieceTokenizer`` whose
            model is BPE with byte fallback.
        forget_after: characters after which the cache is cleared; new text takes about 250
            bytes per thousand characters.

    Raises:
        ImportError: if gigatoken is not installed.
        ValueError: if gigatoken does not support the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, forget_after: int = FORGET_AFTER) -> None:
        self._tokenizer = tokenizer
        self._forget_after = forget_after
        self._num_characters = 0
        self._core, self._literals = _open(tokenizer)
        self._normalizer, self._pre_tokenizer = _splitting(tokenizer)
        normalizes = '"NF' in json.dumps(self._normalizer)
        self._check = CharacterCheck(self._open_pair, normalizes=normalizes)
        before, after = special_ids(self._tokenizer)
        self._before = np.array(before, np.uint32)
        self._after = np.array(after, np.uint32)
        self.name = f"gigatoken {version('gigatoken')}"

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the ids of each text."""
        if self._num_characters > self._forget_after:
            self._core = None  # free the old cache before a new one is allocated
            self._core, self._literals = _open(self._tokenizer)
            self._num_characters = 0
        self._num_characters += sum(map(len, texts))
        ids = list(map(self._core.encode, texts))
        chosen = sorted({*self._check.differing(texts), *self._with_literals(texts)})
        if chosen:
            bare = self._tokenizer.encode_batch(
                [texts[i] for i in chosen], add_special_tokens=False
            )
            for i, each in zip(chosen, bare, strict=True):
                ids[i] = np.array(each, np.uint32)
        return surrounded(ids, self._before, self._after)

    def _with_literals(self, texts: Sequence[str]) -> list[int]:
        """Return the indices of texts that spell out a control piece."""
        return [
            i for i, text in enumerate(texts) if any(name in text for name in self._literals)
        ]

    def _open_pair(self) -> tuple[Encode, Encode]:
        """Open gigatoken and the reference with a vocabulary that shows how they split."""
        import gigatoken

        if '"ByteLevel"' not in json.dumps(self._pre_tokenizer):
            bare = partial(self._tokenizer.encode_batch, add_special_tokens=False)
            return partial(map, self._core.encode), bare
        text = border_vocabulary(self._pre_tokenizer, self._normalizer)
        reference = HFTokenizer(tokenizers.Tokenizer.from_str(text))
        engine = gigatoken.Tokenizer.from_json(text).backend
        return partial(map, engine.encode), reference.encode_batch

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the tokenizer, from which the engine is rebuilt."""
        return GigatokenEngine, (self._tokenizer, self._forget_after)


def _splitting(tokenizer: Tokenizer) -> tuple[Any, Any]:
    """Return normalizer and pre-tokenizer as in ``tokenizer.json``; None if absent."""
    if not isinstance(tokenizer, HFTokenizer):
        return None, None
    normalizer, pre_tokenizer = (
        json.loads(step.__getstate__()) if step else None
        for step in (tokenizer.core.normalizer, tokenizer.core.pre_tokenizer)
    )
    return normalizer, pre_tokenizer


def _open(tokenizer: Tokenizer) -> tuple[Any, list[str]]:
    """Open gigatoken's tokenizer; return it and the texts that it treats as control pieces."""
    gap = gigatoken_gap(tokenizer)
    if gap:
        raise ValueError(
            f"--engine gigatoken is not known to do this tokenizer exactly: it has {gap}. Use "
            "--engine reference."
        )
    try:
        import gigatoken
    except ImportError:
        raise ImportError(
            "--engine gigatoken needs the extra: pip install 'mcore-data[fast]'."
        ) from None
    try:
        if isinstance(tokenizer, SentencePieceTokenizer):
            core = gigatoken.Tokenizer.from_sentencepiece(tokenizer.path).backend
            return core, tokenizer.control_names
        assert isinstance(tokenizer, HFTokenizer)
        return gigatoken.Tokenizer.from_json(tokenizer.text).backend, []
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"--engine gigatoken cannot do this tokenizer: {reason}. Use --engine reference."
        ) from error


class CharacterCheck:
    """Finds texts with characters that an engine and its tokenizer may classify differently.

    Byte-level BPE splits text by classes of characters (letters, marks, digits) before it
    merges. Engine and tokenizer may use different versions of Unicode, and so split differently
    at recently added characters. The engine leaves texts with such characters to the tokenizer.

    Each character is compared when it first occurs. Both encoders get a vocabulary whose only
    merges join an ASCII byte with the first or last byte of another character, so that equal
    ids mean equal splits on both sides of the character, whatever the real vocabulary can
    merge.

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
        if not has_flagged(joined, self._is_open):
            return []
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4")
        states = self._state[codes]
        if not states.all():
            self._compare(np.unique(codes[states == _UNKNOWN]).tolist())
            states = self._state[codes]
        differing = np.flatnonzero(states == _DIFFERS)
        ends = np.cumsum([len(texts[i]) for i in wide])
        return [wide[i] for i in np.unique(np.searchsorted(ends, differing, side="right"))]

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
