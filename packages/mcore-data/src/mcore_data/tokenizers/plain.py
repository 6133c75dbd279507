"""Tokenizers without a vocabulary file: texts of numbers, and UTF-8 bytes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_data.tokenizers.protocol import MARKER


class NullTokenizer:
    """Tokenizer of texts that are token ids separated by blanks, such as ``"12 7 99"``.

    Args:
        num_ids: ids run from 0 to num_ids - 1. The end-of-document id is ``num_ids``, so
            ``vocab_size`` is one more, as in Megatron.
    """

    bos = None
    pad = None

    def __init__(self, num_ids: int) -> None:
        self.eod = num_ids
        self.vocab_size = num_ids + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the numbers of a text."""
        del add_special_tokens
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(f"NullTokenizer reads numbers only, not {text[:60]!r}.") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(
                f"ids {min(ids)} to {max(ids)} exceed the vocabulary 0 to "
                f"{self.vocab_size - 1}: raise --vocab-size."
            )
        return ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the numbers of many texts."""
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the numbers, separated by blanks."""
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i == self.eod))

    def token_id(self, token: str) -> int | None:
        """Return the number that ``token`` spells; None if it is not an id."""
        return int(token) if token.isdecimal() and int(token) < self.vocab_size else None

    def fingerprint(self) -> str:
        """Return a hash of type and size."""
        return hashlib.sha256(f"NullTokenizer {self.vocab_size}".encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write type and size."""
        fields = {"tokenizer_type": "NullTokenizer", "vocab_size": self.eod}
        _write_marker(folder, fields)


class ByteTokenizer:
    """Tokenizer whose ids are the UTF-8 bytes 0 to 255, and 256 for the end of a document."""

    vocab_size = 257
    eod = 256
    bos = None
    pad = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes of a text; a lone surrogate raises ``UnicodeEncodeError``."""
        del add_special_tokens
        return list(text.encode())

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the bytes of many texts."""
        del add_special_tokens
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of the bytes; invalid UTF-8 becomes replacement characters."""
        del skip_special_tokens
        return bytes(i for i in ids if i < self.eod).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """Return the byte of a one-byte token; None for other tokens."""
        data = token.encode()
        return data[0] if len(data) == 1 else None

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes of each id; None for an id without text."""
        return [*(bytes([i]) for i in range(256)), None]

    def fingerprint(self) -> str:
        """Return a hash of the type."""
        return hashlib.sha256(b"ByteTokenizer").hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write the type."""
        _write_marker(folder, {"tokenizer_type": "ByteTokenizer"})


def _write_marker(folder: str | Path, fields: Mapping[str, object]) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / MARKER).write_text(json.dumps(fields, indent=2) + "\n")
