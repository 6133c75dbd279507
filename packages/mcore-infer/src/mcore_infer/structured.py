"""Text held to a JSON schema or a regular expression: which tokens may follow.

The grammar, and the tokens that keep to it, are llguidance's (extra ``structured``): it walks
a parser and the tree of all tokens on the host, while the device computes their scores. The
scores of all others are masked on the device. Imported where a text is held to something.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mcore_data.tokenizers.hf import HFTokenizer
from mcore_data.tokenizers.protocol import Tokenizer

log = logging.getLogger(__name__)

_BLANK = r"[\x20\x0A\x0D\x09]{1,32}"
"""Blanks between the parts of JSON: enough to indent, and a model that writes nothing else goes
on. A schema's own ``x-guidance`` wins."""
_MISSING = "structured output needs llguidance: pip install 'mcore-infer[structured]'."


@dataclass(frozen=True, slots=True)
class Structure:
    """What a text must be."""

    kind: Literal["json_schema", "regex"]
    text: str
    """The schema as JSON, ``{}`` for any; or the expression, of the whole text."""


@runtime_checkable
class Matcher(Protocol):
    """How far one text has come."""

    def allowed(self) -> Int[Tensor, " W"]:
        """Return the tokens that may follow, 32 of them a number, the first the lowest bit."""

    def take(self, token: int) -> bool:
        """Go on by a token; return False where it does not keep to the structure."""

    @property
    def is_over(self) -> bool:
        """Whether no token may follow."""


class Grammars:
    """Makes matchers for the texts of one tokenizer.

    Attributes:
        tokenizer: of the model.
        vocab_size: of the model, which may have more tokens.
        ends: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int] = ()) -> None:
        """Keep the arguments; the tokenizer is read when the first matcher is made.

        Args:
            tokenizer: of the model.
            vocab_size: of the model.
            ends: tokens besides the tokenizer's end of document that end a text.
        """
        own = () if tokenizer.eod is None else (tokenizer.eod,)
        self.tokenizer, self.vocab_size, self.ends = tokenizer, vocab_size, (*own, *ends)

    def matcher(self, structure: Structure) -> Matcher:
        """Return a matcher at the beginning of a text.

        Raises:
            ValueError: if llguidance is missing, or has no grammar for the structure.
        """
        library = _library()
        if structure.kind == "regex":
            grammar = library.LLMatcher.grammar_from_regex(structure.text)
        else:
            try:
                schema = json.loads(structure.text)
            except ValueError as error:
                raise ValueError(f"the schema is no JSON: {error}.") from None
            has_own = isinstance(schema, dict) and "x-guidance" in schema
            defaults = None if has_own else {"whitespace_pattern": _BLANK}
            grammar = library.LLMatcher.grammar_from_json_schema(structure.text, defaults)
        error = library.LLMatcher.validate_grammar(grammar, self._tokens)
        if error and not error.startswith("WARNING"):
            kind = "regular expression" if structure.kind == "regex" else "JSON schema"
            raise ValueError(f"this {kind} cannot be held to: {' '.join(error.split())}")
        return _LLMatcher(library.LLMatcher(self._tokens, grammar, log_level=0))

    @cached_property
    def _tokens(self) -> Any:
        library, tokenizer = _library(), self.tokenizer
        if not self.ends:
            raise ValueError("structured output needs a tokenizer with an end of document.")
        sizes = {"n_vocab": self.vocab_size, "eos_token": list(self.ends)}
        if isinstance(tokenizer, HFTokenizer):
            return library.LLTokenizer(tokenizer.text, **sizes)
        if not isinstance(tokenizer, _KnowsBytes):
            raise ValueError(
                f"structured output does not know the bytes of a {type(tokenizer).__name__}'s "
                "tokens: use a Hugging Face or SentencePiece tokenizer."
            )
        return library.LLTokenizer(
            library.TokenizerWrapper(_TokenizerView(tokenizer, self.vocab_size, self.ends[0])),
            **sizes,
        )


@runtime_checkable
class _KnowsBytes(Protocol):
    """A tokenizer that says what each id stands for; None: no text."""

    def token_bytes(self) -> list[bytes | None]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class _TokenizerView:
    """A tokenizer as llguidance reads it: attributes of these names, and a call."""

    bos_token_id = None

    def __init__(self, tokenizer: _KnowsBytes, vocab_size: int, end: int) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, end
        found = tokenizer.token_bytes()
        found += [None] * (vocab_size - len(found))
        self.tokens = [
            f"<{i}>".encode() if known is None else known for i, known in enumerate(found)
        ]
        self.special_token_ids = [i for i, known in enumerate(found) if known is None]

    def __call__(self, text: bytes | str) -> list[int]:
        said = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(said, add_special_tokens=False)


class _LLMatcher:
    """A ``Matcher`` of llguidance."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> Int[Tensor, " W"]:
        return torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)

    def take(self, token: int) -> bool:
        is_taken = self._matcher.consume_token(token)
        if not is_taken:  # the vocabulary has nothing that may follow
            error = self._matcher.get_error().partition("\n")[0]
            log.warning("a structured text ends early: %s", error)
        return is_taken

    @property
    def is_over(self) -> bool:
        return self._matcher.is_stopped()


def allowed_tokens(
    matchers: Sequence[Matcher], vocab_size: int, device: torch.device
) -> Bool[Tensor, "R V"]:
    """Say on the device which tokens may follow each text; does not wait for it."""
    words = torch.stack([matcher.allowed() for matcher in matchers])
    if device.type == "cuda":
        words = words.pin_memory()
    words = words.to(device, non_blocking=True)
    bits = words[:, :, None] >> torch.arange(32, device=device, dtype=torch.int32)
    return (bits & 1).flatten(1)[:, :vocab_size].bool()


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError(_MISSING) from None
    return llguidance
