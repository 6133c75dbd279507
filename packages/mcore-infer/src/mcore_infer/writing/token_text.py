"""Tokens to text: bytes and names of single tokens, and incremental decoding."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

from mcore_data.tokenizers.hf import HFTokenizer, byte_letters
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.writing.sequence import NewToken, Top


class TokenTexts:
    """Bytes and names of the tokens of one tokenizer.

    Attributes:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._names: dict[int, str] = {}  # cache of ``name``

    @cached_property
    def _known(self) -> Sequence[bytes | None]:
        if isinstance(self.tokenizer, HFTokenizer):
            return _hf_token_bytes(self.tokenizer)
        if isinstance(self.tokenizer, _HasTokenBytes):
            return self.tokenizer.token_bytes()
        return ()

    def of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; for a special token, its name."""
        known = self._known[token] if token < len(self._known) else None
        return self.tokenizer.decode([token]).encode() if known is None else known

    def name(self, token: int) -> str:
        r"""Return a token's text; ``bytes:\xe4`` for bytes that are no UTF-8, as OpenAI."""
        if token not in self._names:
            found = self.of(token)
            try:
                self._names[token] = found.decode()
            except UnicodeDecodeError:
                escaped = "".join(f"\\x{byte:02x}" for byte in found)
                self._names[token] = f"bytes:{escaped}"
        return self._names[token]

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token; 0: unknown."""
        return max((len(known) for known in self._known if known is not None), default=0)

    def fewest(self, text: str) -> int:
        """Return a lower bound of a text's number of tokens, from its length."""
        return -(-len(text) // self.longest) if self.longest else 0

    def by_name(self, top: Top) -> dict[str, float]:
        """Return log probabilities by the names of their tokens, likeliest last.

        A token with the name of a likelier one is ``token_id:`` and its number.
        """
        found: dict[str, float] = {}
        for token, value in top:
            name = self.name(token)
            found[f"token_id:{token}" if name in found else name] = value
        return dict(reversed(found.items()))


def with_drawn(token: NewToken) -> Top:
    """Return a token's likeliest alternatives, with the token itself appended if missing."""
    is_there = token.log_prob is None or any(i == token.id for i, _ in token.top)
    return token.top if is_there else (*token.top, (token.id, token.log_prob or 0.0))


@runtime_checkable
class _HasTokenBytes(Protocol):
    def token_bytes(self) -> list[bytes | None]: ...


def _hf_token_bytes(tokenizer: HFTokenizer) -> list[bytes | None]:
    """Return the bytes of every token, read from pieces as the decoder would write them."""
    decoders = _parts(json.loads(tokenizer.text).get("decoder") or {})
    kinds = {decoder.get("type") for decoder in decoders}
    letters = {letter: byte for byte, letter in enumerate(byte_letters())}
    replaced = [
        (decoder["pattern"]["String"], decoder["content"])
        for decoder in decoders
        if decoder.get("type") == "Replace" and "String" in decoder.get("pattern", {})
    ]
    if "Metaspace" in kinds:
        replaced.append(("\u2581", " "))
    added = tokenizer.core.get_added_tokens_decoder()
    found: list[bytes | None] = [None] * tokenizer.vocab_size
    for piece, i in tokenizer.core.get_vocab().items():
        if i in added:
            found[i] = added[i].content.encode()
        elif "ByteFallback" in kinds and len(piece) == 6 and piece[:3] == "<0x":
            found[i] = bytes([int(piece[3:5], 16)])
        elif "ByteLevel" in kinds and all(letter in letters for letter in piece):
            found[i] = bytes(letters[letter] for letter in piece)
        elif "WordPiece" in kinds:
            found[i] = piece.removeprefix("##").encode()
        else:
            for old, new in replaced:
                piece = piece.replace(old, new)  # noqa: PLW2901
            found[i] = piece.encode()
    return found


def _parts(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [part for inner in decoder["decoders"] for part in _parts(inner)]
    return [decoder]


_INCOMPLETE = "\ufffd"


class TextStream:
    """Decodes the tokens of one text into pieces of text as they arrive.

    A token may hold a part of a character, and decoders may join a token to its neighbours.
    Each token is therefore decoded together with those before it, and a piece is returned once
    it ends in a whole character.
    """

    def __init__(self, tokenizer: Tokenizer, kept: Mapping[int, str] | None = None) -> None:
        """Start without tokens.

        Args:
            tokenizer: decodes; special tokens have no text.
            kept: special tokens that do have a text, by id.
        """
        self.tokenizer, self._kept = tokenizer, kept or {}
        self._ids: list[int] = []
        self._context = 0  # returned tokens that are decoded again as context
        self._given = 0  # tokens whose text has been returned

    def add(self, token: int) -> str:
        """Add a token; return the text that is complete by now, possibly empty."""
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
    """Return the length of the longest suffix of a text that is a prefix of a mark."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0
