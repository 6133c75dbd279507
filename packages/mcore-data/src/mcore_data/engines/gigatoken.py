"""Byte-pair encoding by gigatoken (extra ``fast``), for HF and SentencePiece files.

Gigatoken splits text by hand-written code instead of a regular expression and caches the ids of
words, which makes it about twenty times as fast as the tokenizers library on one core. It runs
on the calling thread; processes divide the work. Its cache is unbounded, so it is reopened now
and then. The tokenizer encodes texts that gigatoken would encode differently, because of their
characters or because they spell out control pieces.
"""

import json
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from mcore_data.engines.character_check import CharacterCheck, Encode, border_vocabulary
from mcore_data.engines.pipeline import gigatoken_gap
from mcore_data.engines.protocol import special_ids, surrounded
from mcore_data.tokenizers.hf import HFTokenizer
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_data.tokenizers.sentencepiece import SentencePieceTokenizer

FORGET_AFTER = 1 << 30


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
