"""Incremental decoding of tokens to text.

A token may hold a part of a character, and decoders may join a token to its neighbours, so
each token is decoded with those before it, and text is returned only once it ends in whole
characters.
"""

from mcore_data.tokenizers.protocol import Tokenizer

_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns one row's tokens into pieces of text that together are its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
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
        return self.tokenizer.decode(self._ids[begin:end], skip_special_tokens=True)
