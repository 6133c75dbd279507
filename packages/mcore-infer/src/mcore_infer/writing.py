"""What one text has written so far, and whether it is over: stop words, ends, draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that a row has written and that nothing will take back."""

    row: int
    """Which prompt it belongs to: its place in the list, or an engine's request number."""
    id: int
    log_prob: float
    """That the model gave to it, before temperature and cut-off."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What was written after one prompt."""

    ids: tuple[int, ...]
    """Without the prompt and stop words; an end of document is kept."""
    log_probs: tuple[float, ...]
    """Of each id, before temperature and cut-off."""
    finish_reason: Literal["stop", "length"]
    """Whether an end of document or stop word ended it, or the number of tokens."""


class Writing:
    """What is written after one prompt.

    Attributes:
        ids: tokens so far, without stop sequences.
        log_probs: of each, as the model gave them.
        finish_reason: why it ended; None while it goes on.
    """

    def __init__(
        self, num_tokens: int, seed: int, eod: int | None, stop: Sequence[Sequence[int]]
    ) -> None:
        """Begin with nothing.

        Args:
            num_tokens: after which it ends.
            seed: of the draws.
            eod: id that ends it; None: none does.
            stop: token sequences that end it and are cut off.
        """
        self.num_tokens, self.eod = num_tokens, eod
        self.stop = [list(s) for s in stop if s]
        self.random = torch.Generator().manual_seed(seed)
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.num_released = 0
        self.finish_reason: Literal["stop", "length"] | None = None

    def draw(self) -> float:
        """Return the next random number, uniform in [0, 1)."""
        return torch.rand((), generator=self.random, dtype=torch.float64).item()

    def add(self, token: int, log_prob: float) -> list[tuple[int, float]]:
        """Take a token; return those that nothing will take back any more."""
        self.ids.append(token)
        self.log_probs.append(log_prob)
        for sequence in self.stop:
            if self.ids[-len(sequence) :] == sequence:
                del self.ids[-len(sequence) :], self.log_probs[-len(sequence) :]
                self.finish_reason = "stop"
                break
        else:
            if token == self.eod:
                self.finish_reason = "stop"
            elif len(self.ids) == self.num_tokens:
                self.finish_reason = "length"
        held = 0 if self.finish_reason else self._undecided()
        end = len(self.ids) - held
        released = list(
            zip(
                self.ids[self.num_released : end],
                self.log_probs[self.num_released : end],
                strict=True,
            )
        )
        self.num_released = max(self.num_released, end)
        return released

    def _undecided(self) -> int:
        """Tokens at the end that may be the beginning of a stop sequence."""
        longest = 0
        for sequence in self.stop:
            for length in range(1, min(len(sequence), len(self.ids) + 1)):
                if self.ids[-length:] == sequence[:length]:
                    longest = max(longest, length)
        return longest

    def result(self) -> Generation:
        """Return all that was written; only once it is over."""
        assert self.finish_reason is not None
        return Generation(tuple(self.ids), tuple(self.log_probs), self.finish_reason)
