"""Chooses the engine that encodes a corpus: the fastest one that gives the tokenizer's ids.

The tokenizer is the reference. An engine is checked against it in three ways: its parts by
``pipeline``, probe texts by ``differing_probe``, and texts of the corpus by ``spot_check``.
``build_engine`` chooses an engine; each engine has its own file.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.models import WordPiece

from mcore_data.config import EngineName
from mcore_data.engines.protocol import Engine
from mcore_data.tokenizers.hf import HFTokenizer
from mcore_data.tokenizers.plain import ByteTokenizer, NullTokenizer
from mcore_data.tokenizers.protocol import Tokenizer

_MAX_PAIRED = 48  # special tokens of which all pairs are probed

log = logging.getLogger(__name__)

PROBES = (
    "",
    " ",
    "a",
    "The quick brown fox.",
    "it's we'LL they'd I'm 'S",
    "  two  blanks,   three\t\ttabs \n\n\nlines \r\n ends ",
    "0 12 345 6789 3.14159 1,000,000 \u0663\u0664 \u216b \u00bd",
    "def f(x):\n        return {'a': [x ** 2, -1]}  # comment\n",
    "\u00c5ngstr\u00f6m A\u030angstro\u0308m \ufb01ne \u00df\u1e9e \u0130I\u0131 \u03c3\u03c2",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \uc548\ub155 ",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\u0627\u0644\u0633\u0644\u0627\u0645 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea \u2603\ufe0f \U00020000 \U0010ffff",
    "\x00\x01\x0b\x0c\x1c\x7f\x85\xa0\xad\u200b\u2028\u2029\u3000\ufeff\ufffd",
    " \u1ad8 a\u1ad8b \u088f1 \u0c5c \ua7ce \U00010940 \U00016ea0 \u20c1. \U0001fa8e\n",
    "!!!???... --==>> @#$%^&*() <|x|> [x] </x> &amp; http://a.b/c?d=e&f",
    "supercalifragilisticexpialidocious" * 8,
    "a" * 300 + "1" * 50 + "-" * 50 + " " * 50 + "\n" * 20,
)
"""Texts on which encoders differ: white space, marks, scripts, new characters, lengths."""


class ReferenceEngine:
    """The tokenizer as an engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name = "reference"

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the ids of each text, by the tokenizer's ``encode_batch``."""
        return [np.array(ids, np.uint32) for ids in self._tokenizer.encode_batch(texts)]


class ByteEngine:
    """ByteTokenizer without a Python integer for each byte."""

    name = "bytes"

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the UTF-8 bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def build_engine(tokenizer: Tokenizer, name: EngineName = "auto") -> Engine:
    """Choose the engine of a tokenizer.

    Args:
        tokenizer: the reference.
        name: ``auto`` chooses the fast engine if it is known to implement every part of the
            tokenizer, is installed and passes the probes; else the tokenizer, and logs the
            reason. Any other name chooses that engine or fails.

    Raises:
        ValueError: if the named engine does not support the tokenizer, or gives other ids.
        ImportError: if the named engine is not installed.
    """
    if name == "reference":
        return ReferenceEngine(tokenizer)
    if name != "auto":
        return _checked(tokenizer, name)
    if isinstance(tokenizer, ByteTokenizer):
        return ByteEngine()
    if isinstance(tokenizer, NullTokenizer):
        return ReferenceEngine(tokenizer)
    is_wordpiece = isinstance(tokenizer, HFTokenizer) and isinstance(
        tokenizer.core.model, WordPiece
    )
    try:
        return _checked(tokenizer, "words" if is_wordpiece else "gigatoken")
    except (ValueError, ImportError) as error:
        reason = str(error).removesuffix(" Use --engine reference.")
        log.info("The tokenizer itself encodes, which is many times slower: %s", reason)
        return ReferenceEngine(tokenizer)


def differing_probe(engine: Engine, tokenizer: Tokenizer) -> str | None:
    """Return the first probe that engine and tokenizer encode differently, or None."""
    probes = [*PROBES, *special_probes(getattr(tokenizer, "special_names", []))]
    reference = tokenizer.encode_batch(probes)
    for text, ids, expected in zip(probes, engine.encode(probes), reference, strict=True):
        if ids.tolist() != expected:
            return text
    return None


def special_probes(names: Sequence[str]) -> list[str]:
    """Return texts with special tokens in every context that may affect an encoder.

    Each name occurs alone, at both ends, doubled, between words, digits, blanks and lines, and
    next to the following name. All pairs of names occur too; of more than ``_MAX_PAIRED`` names
    an evenly spaced selection is paired.
    """
    probes = []
    for name in names:
        probes += [name, f"{name}a {name}", f"a{name}", f" {name} ", f"  {name}  ", name * 2]
        probes += [
            f"1{name}1_{name}_.{name}.",
            f"\t{name}\t\n{name}\n",
            name.upper(),
            name[:-1],
        ]
        probes += [f"{name} {name}  {name}\u0301{name}\u4f60"]
    probes += [first + second for first, second in pairwise(names)]
    paired = names[:: -(-len(names) // _MAX_PAIRED)] if names else []
    pattern = "{0}{1} {0} {1}  {0}\n{1}  {0}"
    return probes + [pattern.format(first, second) for first in paired for second in paired]


def _checked(tokenizer: Tokenizer, name: str) -> Engine:
    """Build the named engine; raise if it encodes a probe differently than the tokenizer."""
    engine = _build(tokenizer, name)
    probe = differing_probe(engine, tokenizer)
    if probe is not None:
        raise ValueError(
            f"--engine {name} does not encode {probe!r} as the tokenizer does. Use --engine "
            "reference."
        )
    return engine


def _build(tokenizer: Tokenizer, name: str) -> Any:
    if name == "words":
        from mcore_data.engines.wordpiece import WordEngine

        return WordEngine(tokenizer)
    from mcore_data.engines.gigatoken import GigatokenEngine

    return GigatokenEngine(tokenizer)
