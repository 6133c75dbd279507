"""Beam search: keeps the best texts at every token.

Each beam is extended by an engine request of one token, which returns the likeliest successors.
Prefix caching shares the complete pages of the previous token's requests; tokens of the last,
incomplete page are computed again.
"""

from collections.abc import Callable, Iterator, Sequence

from mcore_infer.config import SamplingConfig
from mcore_infer.writing.sequence import (
    Beam,
    Generation,
    NewToken,
    RunningSequence,
    ScoreRequest,
    Top,
)

_ONE_TOKEN = SamplingConfig(num_tokens=1, top_k=1)


class BeamSearch:
    """The beams of one prompt, without a model.

    A text's score is the sum of its log probabilities, divided by its length to the power of
    ``length_penalty``, as in Megatron and transformers. The search ends when there are as many
    finished texts as beams, and no unfinished text has a better score at its current length.

    Attributes:
        live: unfinished texts, best first, and the sums of their log probabilities.
        over: finished texts, best first.
    """

    def __init__(self, sequence: RunningSequence) -> None:
        """Start with the empty text.

        Args:
            sequence: request with the number of beams, the length penalty, and the tokens that
                end a text.
        """
        self.width = sequence.sampling.beam_width
        self.length_penalty = sequence.sampling.length_penalty
        self.num_tokens = sequence.num_tokens
        self.ends = {token for stop in sequence.stop for token in stop} | {sequence.eod}
        self.live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        self.over: list[Beam] = []

    def take(self, tops: Sequence[Top]) -> bool:
        """Extend the beams by one token; return whether the search is over.

        Args:
            tops: the likeliest successors of each live text, twice as many as beams, so that
                enough remain if half of them end a text.
        """
        extended = [
            ((*ids, token), total + log_prob)
            for (ids, total), top in zip(self.live, tops, strict=True)
            for token, log_prob in top
        ]
        extended.sort(key=lambda text: -text[1])
        length = len(extended[0][0])
        self.live = []
        # A text that ends becomes a result only if its rank is below the number of beams.
        for rank, (ids, total) in enumerate(extended[: 2 * self.width]):
            if ids[-1] not in self.ends:
                self.live.append((ids, total))
            elif rank < self.width:
                self._end(ids, total, "stop")
        self.live = self.live[: self.width]
        is_full = len(self.over) == self.width
        best = self.live[0][1] if self.live else -float("inf")
        if is_full and self.over[-1].score >= best / length**self.length_penalty:
            return True
        if length < self.num_tokens:
            return not self.live
        for ids, total in self.live:
            self._end(ids, total, "length")
        return True

    def _end(self, ids: tuple[int, ...], total: float, reason: str) -> None:
        beam = Beam(ids, total / len(ids) ** self.length_penalty, reason == "stop")
        self.over = sorted([*self.over, beam], key=lambda beam: -beam.score)[: self.width]


class Beams:
    """The beam searches of an engine, and their requests of one token."""

    def __init__(self) -> None:
        self._searches: dict[int, tuple[Sequence[int], BeamSearch]] = {}
        self._steps: dict[int, dict[int, Top]] = {}  # search -> request -> successors
        self._searching: dict[int, int] = {}  # request -> search

    def __contains__(self, request: int) -> bool:
        """Whether a request is a step of a search."""
        return request in self._searching

    def begin(self, number: int, sequence: RunningSequence, add: Callable[..., int]) -> None:
        """Start a search; ``add`` queues its requests."""
        self._searches[number] = sequence.prompt, BeamSearch(sequence)
        self._step(number, add)

    def end(self, number: int) -> list[int]:
        """Remove a search; return its requests, which the caller aborts."""
        self._searches.pop(number, None)
        requests = list(self._steps.pop(number, {}))
        for request in requests:
            del self._searching[request]
        return requests

    def take(
        self, request: int, result: Generation, add: Callable[..., int]
    ) -> Iterator[NewToken | tuple[int, Generation]]:
        """Record the result of one request of a search.

        After the last request of a token, extends the beams and queues the next requests, or
        yields the tokens and the result of a search that is over.
        """
        number = self._searching[request]
        step = self._steps[number]
        step[request] = result.top[0]
        if not all(step.values()):
            return
        _, search = self._searches[number]
        is_over = search.take(list(step.values()))
        for finished in self._steps.pop(number):
            del self._searching[finished]
        if not is_over:
            self._step(number, add)
            return
        del self._searches[number]
        best = search.over[0]
        yield from (NewToken(number, token, None) for token in best.ids)
        reason = "stop" if best.has_end else "length"
        yield number, Generation(best.ids, (), reason, beams=tuple(search.over))

    def _step(self, number: int, add: Callable[..., int]) -> None:
        prompt, search = self._searches[number]
        scores = ScoreRequest(log_probs=False, num_top=2 * search.width)
        requests = [add([*prompt, *ids], _ONE_TOKEN, scores=scores) for ids, _ in search.live]
        self._steps[number] = dict.fromkeys(requests, ())
        self._searching |= dict.fromkeys(requests, number)
