"""Incremental decoding of tokens to text.

A token may hold a part of a character, and decoders may join a token to its neighbours, so
each token is decoded with those before it, and text is returned only once it ends in whole
characters.
"""

from collections.abc import Mapping
from itertools import groupby

from mcore_data.tokenizers.protocol import Tokenizer

_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns one row's tokens into pieces of text that together are its text."""

    def __init__(self, tokenizer: Tokenizer, kept: Mapping[int, str] | None = None) -> None:
        """Begin without a token.

        Args:
            tokenizer: decodes; special tokens have no text.
            kept: those that have: their names.
        """
        self.tokenizer, self._kept = tokenizer, kept or {}
        self._ids: list[int] = []
        self._context = 0  # returned tokens that are decoded again as context
        self._given = 0  # tokens whose text was returned

    def add(self, token: int) -> str:
        """Take a token; return the text that is certain by now, possibly none."""
        self._ids.append(token)
        piece = self._new_text()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._advance()
        return piece

    def rest(self) -> str:
        """Return the remaining text after the last token."""
        piece = self._new_text()
        self._advance()
        return piece

    def _new_text(self) -> str:
        known = self._decode(self._context, self._given)
        return self._decode(self._context, len(self._ids))[len(known) :]

    def _advance(self) -> None:
        self._context, self._given = self._given, len(self._ids)

    def _decode(self, begin: int, end: int) -> str:
        ids = self._ids[begin:end]
        if self._kept.keys().isdisjoint(ids):
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        parts = []
        for is_kept, run in groupby(ids, key=self._kept.__contains__):
            if is_kept:
                parts += [self._kept[token] for token in run]
            else:
                parts.append(self.tokenizer.decode(list(run), skip_special_tokens=True))
        return "".join(parts)


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text with which a mark begins."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0
