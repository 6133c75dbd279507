"""What an engine is, and what it needs of the tokenizer whose ids it gives."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_data.tokenizers.protocol import Tokenizer


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
    bare = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    raise ValueError("the tokenizer adds more than ids before and behind a text.")


def surrounded(
    ids: list[NDArray[np.integer]], before: NDArray[np.uint32], behind: NDArray[np.uint32]
) -> list[NDArray[np.integer]]:
    """Put the ids of ``special_ids`` before and behind those of each text."""
    if not len(before) and not len(behind):
        return ids
    return [np.concatenate((before, each, behind)) for each in ids]
