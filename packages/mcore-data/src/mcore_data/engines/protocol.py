"""What an engine is, and what it needs of the tokenizer whose ids it gives."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_data.tokenizers.protocol import Tokenizer

_PLAIN = ("a", "b", "1.", "")
"""Texts that show together where added ids are, even if one of them has the same id."""


class Engine(Protocol):
    """Encodes texts exactly as its tokenizer does, special tokens around them included."""

    @property
    def name(self) -> str:
        """Name and version, for the manifest."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of each text."""


def special_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts before and behind every text.

    Raises:
        ValueError: if what it adds is not of that form.
    """
    wholes = list(map(tokenizer.encode, _PLAIN))
    bares = [tokenizer.encode(text, add_special_tokens=False) for text in _PLAIN]
    pairs = list(zip(wholes, bares, strict=True))
    for start in range(len(wholes[0]) - len(bares[0]) + 1):
        before = wholes[0][:start]
        behind = wholes[0][start + len(bares[0]) :]
        if all(whole == [*before, *bare, *behind] for whole, bare in pairs):
            return before, behind
    raise ValueError("the tokenizer adds more than ids before and behind a text.")


def surrounded(
    ids: list[NDArray[np.integer]], before: NDArray[np.uint32], behind: NDArray[np.uint32]
) -> list[NDArray[np.integer]]:
    """Put the ids of ``special_ids`` before and behind those of each text."""
    if not len(before) and not len(behind):
        return ids
    return [np.concatenate((before, each, behind)) for each in ids]
