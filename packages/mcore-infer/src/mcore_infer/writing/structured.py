"""Text held to a JSON schema, a regular expression or a grammar: which tokens may follow.

The grammar, and the tokens that keep to it, are llguidance's (extra ``structured``): it walks
a parser and the tree of all tokens on the host, while the device computes their scores. The
scores of all others are masked on the device. Imported where a text is held to something.

Compiling takes from a millisecond to for ever, so a server calls ``Grammars.prepare``: a thread
compiles each structure once, after a process with limits tried it (``grammar_trial``).
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.writing.grammar_trial import GrammarTrial
from mcore_infer.writing.grammars import Structure, Vocabulary, build_grammar, open_vocabulary

log = logging.getLogger(__name__)

_NUM_KEPT = 64
"""Compiled structures that are kept, the least recently used goes first."""


@runtime_checkable
class Matcher(Protocol):
    """How far one text has come."""

    def allowed(self) -> Int[Tensor, " W"]:
        """Return the tokens that may follow, 32 of them a number, the first the lowest bit."""

    def take(self, token: int) -> bool:
        """Go on by a token; return False where the structure ends there, unfinished."""

    @property
    def is_over(self) -> bool:
        """Whether no token may follow."""


class Grammars:
    """Makes matchers for the texts of one tokenizer; compiles each structure once.

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
        self._lock = Lock()
        self._compiled: OrderedDict[Structure, Future[_Compiled]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._trial = GrammarTrial(tokenizer, vocab_size, self.ends)

    def prepare(self, structure: Structure, *, is_tried: bool = True) -> "Future[_Compiled]":
        """Begin to compile a structure in a thread; from any thread.

        Args:
            structure: what texts are to be held to.
            is_tried: whether a process with limits compiles it first; not on ranks that follow
                one which did that.

        Returns:
            Done once ``matcher`` returns at once. It raises ``ValueError`` where llguidance is
            missing, where no text keeps to the structure, or where its grammar takes too long.
        """
        with self._lock:
            if structure not in self._compiled:
                job = self._thread.submit(self._compile, structure, is_tried)
                self._compiled[structure] = job
                if len(self._compiled) > _NUM_KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(structure)
            return self._compiled[structure]

    def matcher(self, structure: Structure) -> "Matcher":
        """Return a matcher at the beginning of a text; waits while the structure is compiled.

        Raises:
            ValueError: if llguidance is missing, or has no grammar for the structure, or no
                text begins as the structure asks.
        """
        return _LLMatcher(self.prepare(structure, is_tried=False).result().matcher.deep_copy())

    def _compile(self, structure: Structure, is_tried: bool) -> "_Compiled":
        vocabulary = self._vocabulary
        grammar = build_grammar(structure)
        if is_tried:
            self._trial.check(structure)
        begin = time.monotonic()
        matcher = vocabulary.compile(grammar, structure.kind)
        return _Compiled(matcher, time.monotonic() - begin)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return open_vocabulary(self.tokenizer, self.vocab_size, self.ends)


class _Compiled(NamedTuple):
    """A matcher of llguidance at the beginning of a text, to be copied."""

    matcher: Any
    seconds: float
    """That it took to compile."""


class _LLMatcher:
    """A ``Matcher`` of llguidance."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> Int[Tensor, " W"]:
        return torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)

    def take(self, token: int) -> bool:
        is_taken = self._matcher.consume_token(token) and not self._matcher.is_error()
        if not is_taken:  # nothing of the vocabulary may follow, or a limit was reached
            error = self._matcher.get_error().partition("\n")[0]
            log.warning("a text cannot keep to its structure: %s", error)
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
