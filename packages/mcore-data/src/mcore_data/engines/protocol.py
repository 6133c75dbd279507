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
    full = list(map(tokenizer.encode, _PLAIN))
    bare = [tokenizer.encode(text, add_special_tokens=False) for text in _PLAIN]
    pairs = list(zip(full, bare, strict=True))
    for start in range(len(full[0]) - len(bare[0]) + 1):
        before = full[0][:start]
        after = full[0][start + len(bare[0]) :]
        if all(with_ids == [*before, *ids, *after] for with_ids, ids in pairs):
            return before, after
    raise ValueError(
        "the tokenizer does not add a fixed prefix and suffix of ids to every text, which "
        "a fast engine requires. Use --engine reference."
    )


def surrounded(
    ids: list[NDArray[np.integer]], before: NDArray[np.uint32], after: NDArray[np.uint32]
) -> list[NDArray[np.integer]]:
    """Add the ids of ``special_ids`` before and after the ids of each text."""
    if not len(before) and not len(after):
        return ids
    return [np.concatenate((before, each, after)) for each in ids]
