"""What one text has written so far, and whether it is over: stop words, ends, draws."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from mcore_infer.config import SamplingConfig
from mcore_infer.writing.structured import Matcher

Top = tuple[tuple[int, float], ...]
"""The likeliest tokens of one place, best first: ids and log probabilities."""


FinishReason = Literal["stop", "length", "error"]
"""``stop``: an end of document, a stop word, or the end of the structure that a text is held
to; ``length``: the number of tokens; ``error``: no token goes on with the structure."""


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that a row has written and that nothing will take back."""

    row: int
    """Which prompt it belongs to: its place in the list, or an engine's request number."""
    id: int
    log_prob: float | None
    """That the model gave to it, before penalties, temperature and cut-off; None where it was
    not requested."""
    top: Top = ()
    """The likeliest tokens of its place, where requested."""


@dataclass(frozen=True, slots=True)
class Beam:
    """A text that beam search found."""

    ids: tuple[int, ...]
    score: float
    """Sum of log probabilities over its length to the power of the length penalty."""
    has_end: bool
    """Whether its last token ends it."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What was written after one prompt."""

    ids: tuple[int, ...]
    """Without the prompt and stop words; an end of document is kept."""
    log_probs: tuple[float, ...]
    """Of each id, before penalties, temperature and cut-off; empty where not requested."""
    finish_reason: FinishReason
    """What ended it."""
    top: tuple[Top, ...] = ()
    """The likeliest tokens of each place, where requested."""
    prompt_log_probs: tuple[float, ...] = ()
    """Of the prompt's tokens behind the first, where requested."""
    prompt_top: tuple[Top, ...] = ()
    """The likeliest tokens of those places, where requested."""
    beams: tuple[Beam, ...] = ()
    """What beam search found, best first; the first is the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRules:
    """Changes to the scores of single tokens."""

    bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their scores, after penalties."""

    never_after: tuple[int, int] | None = None
    """A token, and the one that never follows it."""

    min_tokens: int = 0
    """Before so many tokens are written, none of ``ends`` is."""

    ends: tuple[int, ...] = ()
    """Tokens that end a text; read with ``min_tokens``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """Which log probabilities a request returns; the rest is not computed."""

    log_probs: bool = True
    """Of each written token."""

    num_top: int = 0
    """Likeliest tokens of each place, with theirs."""

    prompt: bool = False
    """Both for the tokens of the prompt too; its beginning is then not shared."""


class RunningSequence:
    """What is written after one prompt.

    Attributes:
        prompt: token ids.
        sampling: how tokens are chosen.
        rules: changes to single tokens' scores.
        matcher: of what the text is held to.
        changes_scores: whether penalties or rules change scores before they are cut.
        needs_last_token: whether the choice of a token depends on the ones before, but for the
            model's.
        ids: tokens so far, without stop sequences.
        finish_reason: why it ended; None while it goes on.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        *,
        num_tokens: int,
        seed: int,
        eod: int | None = None,
        stop: Sequence[Sequence[int]] = (),
        rules: TokenRules | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """Begin with nothing.

        Args:
            prompt: token ids.
            sampling: how tokens are chosen; its ``num_tokens`` is not read.
            num_tokens: after which it ends; 0: without writing, once the prompt is read.
            seed: of the draws.
            eod: id that ends it; None: none does.
            stop: token sequences that end it and are cut off.
            rules: changes to single tokens' scores.
            matcher: of what the text is held to, at its beginning; None: nothing.
        """
        self.matcher = matcher
        self.prompt, self.sampling = list(prompt), sampling
        self.rules = rules or TokenRules()
        self.changes_scores = sampling.has_penalties or self.rules != TokenRules()
        is_held = matcher is not None
        self.needs_last_token = self.changes_scores or is_held or bool(sampling.top_p_decay)
        self.num_tokens, self.eod = num_tokens, eod
        self.stop = [list(s) for s in stop if s]
        self.random = torch.Generator().manual_seed(seed)
        self._draws: list[float] = []  # known, not taken
        # Numbers in lists: an object for every token would have Python look for cycles among
        # millions of them, while the device waits.
        self.ids: list[int] = []
        self._log_probs: list[float | None] = []
        self._tops: list[Top] = []
        self.num_released = 0
        self.finish_reason: FinishReason | None = None
        self._cut = sampling.cut

    @property
    def cut(self) -> SamplingConfig:
        """Temperature and cut-off of the next token, everything else left at its default."""
        decay = self.sampling.top_p_decay
        if not decay:
            return self._cut
        top_p = self.sampling.top_p * decay ** len(self.ids)
        return replace(self._cut, top_p=max(top_p, self.sampling.top_p_bound))

    def draw(self) -> float:
        """Return the next random number, uniform in [0, 1)."""
        number = self.draw_ahead(0)
        self.forget_draws(1)
        return number

    def draw_ahead(self, place: int) -> float:
        """Return the number that ``draw`` returns after ``place`` others."""
        while len(self._draws) <= place:
            number = torch.rand((), generator=self.random, dtype=torch.float64)
            self._draws.append(number.item())
        return self._draws[place]

    def forget_draws(self, count: int) -> None:
        """Go on behind numbers that ``draw_ahead`` returned."""
        del self._draws[:count]

    def add(self, token: NewToken) -> list[NewToken]:
        """Take a token; return those that nothing will take back any more."""
        if not self.num_tokens:
            self.finish_reason = "length"
            return []
        self.ids.append(token.id)
        self._log_probs.append(token.log_prob)
        self._tops.append(token.top)
        for sequence in self.stop:
            if self._ends_with(sequence):
                self._drop(len(sequence))
                self.finish_reason = "stop"
                break
        else:
            held = self.matcher
            if held is not None and not held.take(token.id):
                self._drop(1)
                self.finish_reason = "error"
            elif token.id == self.eod or (held is not None and held.is_over):
                self.finish_reason = "stop"
            elif len(self.ids) == self.num_tokens:
                self.finish_reason = "length"
        if not self.stop and self.matcher is None:
            return [token]
        held = 0 if self.finish_reason else self._undecided()
        new = slice(self.num_released, len(self.ids) - held)
        self.num_released = max(new.start, new.stop)
        parts = zip(self.ids[new], self._log_probs[new], self._tops[new], strict=True)
        return [NewToken(token.row, *part) for part in parts]

    def _drop(self, count: int) -> None:
        for kept in (self.ids, self._log_probs, self._tops):
            del kept[-count:]

    def _ends_with(self, sequence: Sequence[int]) -> bool:
        return self.ids[-len(sequence) :] == sequence

    def _undecided(self) -> int:
        """Tokens at the end that may be the beginning of a stop sequence."""
        longest = 0
        for sequence in self.stop:
            for length in range(1, min(len(sequence), len(self.ids) + 1)):
                if self._ends_with(sequence[:length]):
                    longest = max(longest, length)
        return longest

    def result(self) -> Generation:
        """Return all that was written; only once it is over."""
        assert self.finish_reason is not None
        log_probs = tuple(number for number in self._log_probs if number is not None)
        top = tuple(self._tops) if any(self._tops) else ()
        return Generation(tuple(self.ids), log_probs, self.finish_reason, top)
