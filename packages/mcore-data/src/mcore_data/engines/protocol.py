"""The protocol of bulk encoding engines, and the special ids around a text."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_data.tokenizers.protocol import Tokenizer

_PLAIN = ("a", "b", "1.", "")
"""Texts that together determine the added ids, even if a text itself contains such an id."""


class Engine(Protocol):
    """Encodes texts exactly as its tokenizer does, including added special tokens."""

    @property
    def name(self) -> str:
        """Name and version, for the manifest."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the ids of each text."""


def special_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer adds before and after every text.

    Raises:
        ValueError: if the tokenizer adds other ids than a fixed prefix and suffix.
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
    """Add the ids of ``special_ids`` before and after the ids of each text."""
    if not len(before) and not len(behind):
        return ids
    return [np.concatenate((before, each, behind)) for each in ids]
