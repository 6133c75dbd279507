"""The protocol of tokenizers: encode, decode, and save to a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

MARKER = "mcore_tokenizer.json"
"""File in a saved folder with type and options, for types whose own files do not hold them."""


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, which run from 0 to vocab_size - 1."""

    @property
    def eod(self) -> int | None:
        """End-of-document id, if any."""

    @property
    def bos(self) -> int | None:
        """Beginning-of-sequence id, if any."""

    @property
    def pad(self) -> int | None:
        """Padding id, if any."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the ids that the tokenizer adds around a text.

        Args:
            text: any text.
            add_special_tokens: False leaves the added ids out.
        """

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of many texts, each as ``encode``."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""

    def token_id(self, token: str) -> int | None:
        """Return the id of one token by its name; None if the tokenizer does not have it."""

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the ids of a text."""

    def save(self, folder: str | Path) -> None:
        """Write files from which ``load_tokenizer(folder)`` builds an equal tokenizer."""
