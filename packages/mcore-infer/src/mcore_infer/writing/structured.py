"""Structured output: restricts texts to a JSON schema, a regular expression or a grammar.

llguidance (extra ``structured``) computes the allowed next tokens on the host, with a parser
and the trie of all tokens, while the device computes logits. The logits of all other tokens are
masked on the device. Because some grammars never finish compiling, a server calls
``Grammars.prepare``: a thread compiles each structure once, after a process with limits on time
and memory has compiled the structure as a trial (``grammar_trial``).
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
"""Number of compiled structures in the cache; the least recently used is dropped first."""


@runtime_checkable
class Matcher(Protocol):
    """State of one text within its structure: which tokens may follow."""

    def allowed(self) -> Int[Tensor, " W"]:
        """Return a bit mask of the allowed next tokens, 32 to a number, lowest bit first."""

    def take(self, token: int) -> bool:
        """Advance by a token; return False if the incomplete text has no next token."""

    @property
    def is_over(self) -> bool:
        """Whether no token may follow."""


class Grammars:
    """Compiles structures for one tokenizer, each once, and returns matchers for texts.

    Attributes:
        tokenizer: tokenizer of the model.
        vocab_size: vocabulary size of the model; may exceed the tokenizer's.
        ends: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int] = ()) -> None:
        """Store the arguments; the tokenizer is converted when the first structure is compiled.

        Args:
            tokenizer: tokenizer of the model.
            vocab_size: vocabulary size of the model.
            ends: tokens that end a text, in addition to the tokenizer's end of document.
        """
        eod = () if tokenizer.eod is None else (tokenizer.eod,)
        self.tokenizer, self.vocab_size, self.ends = tokenizer, vocab_size, (*eod, *ends)
        self._lock = Lock()
        self._compiled: OrderedDict[Structure, Future[_Compiled]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._trial = GrammarTrial(tokenizer, vocab_size, self.ends)

    def prepare(self, structure: Structure, *, is_tried: bool = True) -> "Future[_Compiled]":
        """Start to compile a structure in the background; may be called from any thread.

        Args:
            structure: grammar of texts.
            is_tried: whether a process with limits compiles the structure first; False on
                ranks other than 0, after the trial of rank 0.

        Returns:
            A future that is done once ``matcher`` returns immediately. Raises ``ValueError`` if
            llguidance is missing, no text matches the structure, or compiling takes too long.
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
        """Return a matcher at the start of a text; waits until the structure is compiled.

        Raises:
            ValueError: if llguidance is missing or rejects the structure, or no text matches
                it.
        """
        return _LLMatcher(self.prepare(structure, is_tried=False).result().matcher.deep_copy())

    def _compile(self, structure: Structure, is_tried: bool) -> "_Compiled":
        vocabulary = self._vocabulary
        if is_tried:  # the trial comes first, because this thread has no limits of time
            self._trial.check(structure)
        grammar = build_grammar(structure)
        begin = time.monotonic()
        matcher = vocabulary.compile(grammar, structure.kind)
        return _Compiled(matcher, time.monotonic() - begin)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return open_vocabulary(self.tokenizer, self.vocab_size, self.ends)


class _Compiled(NamedTuple):
    """A matcher of llguidance at the start of a text, which each text copies."""

    matcher: Any
    seconds: float
    """Seconds of compiling."""


class _LLMatcher:
    """A ``Matcher`` of llguidance."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> Int[Tensor, " W"]:
        return torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)

    def take(self, token: int) -> bool:
        is_taken = self._matcher.consume_token(token) and not self._matcher.is_error()
        if not is_taken:  # no token of the vocabulary may follow, or llguidance hit a limit
            error = self._matcher.get_error().partition("\n")[0]
            log.warning("a text cannot satisfy its structure: %s", error)
        return is_taken

    @property
    def is_over(self) -> bool:
        return self._matcher.is_stopped()


def allowed_tokens(
    matchers: Sequence[Matcher], vocab_size: int, device: torch.device
) -> Bool[Tensor, "R V"]:
    """Return the allowed next tokens of each text as a mask on the device, without a sync."""
    words = torch.stack([matcher.allowed() for matcher in matchers])
    if device.type == "cuda":
        words = words.pin_memory()
    words = words.to(device, non_blocking=True)
    # Bit i of word w is token 32 w + i: [R, W] -> [R, W, 32] -> [R, V].
    bits = words[:, :, None] >> torch.arange(32, device=device, dtype=torch.int32)
    return (bits & 1).flatten(1)[:, :vocab_size].bool()
