"""What a tokenizer is: text to token ids and back, and files to keep it in."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

MARKER = "mcore_tokenizer.json"
"""File in a saved folder that names type and options, where no file of others does."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the house needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1."""

    @property
    def eod(self) -> int | None:
        """Id that ends a document."""

    @property
    def bos(self) -> int | None:
        """Id that starts a sequence."""

    @property
    def pad(self) -> int | None:
        """Id that fills short sequences."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; ``add_special_tokens`` keeps what the tokenizer adds around it."""

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Ids of many texts."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""

    def token_id(self, token: str) -> int | None:
        """Id of one token by its name, None if there is none."""

    def fingerprint(self) -> str:
        """Hash of everything that decides which ids a text gets."""

    def save(self, folder: str | Path) -> None:
        """Write files from which ``load_tokenizer(folder)`` builds an equal tokenizer."""
