"""Speculative decoding: several tokens a step, the same text.

A drafter proposes the next tokens, and one forward scores all of them. The engine samples each
position with that position's own random number, as without drafts, and keeps proposals up to
the first that differs from its sample: the text is the same token for token, and so is its
distribution, whatever is proposed. A fixed proposal is accepted with the probability that the
model gives to it, as by rejection sampling; a draft model samples with the same random numbers
as the model, so that both agree where their scores are close.

Reference:
    Leviathan et al. 2023, arXiv:2211.17192. Chen et al. 2023, arXiv:2302.01318. Daliri et al.
    2024, drafter-invariant speculative decoding. arXiv:2408.07978.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_infer.engine.decoding import Decoder
from mcore_infer.engine.paged_cache import PagedCache
from mcore_infer.engine.stages import agree_on_tokens, last_stage_logits, run_stages
from mcore_infer.engine.step_layout import step_tensors
from mcore_infer.engine.step_plans import Chunk, EngineConfig, Step
from mcore_infer.writing.sampling import choose
from mcore_infer.writing.sequence import RunningSequence
from mcore_models.mtp_model import MTPLanguageModel
from mcore_models.protocol import LanguageModel

_LONGEST, _SHORTEST = 4, 2
"""Tokens at the end of a text that are looked up in it."""


@dataclass(slots=True)
class SpeculationCounts:
    """What became of proposals so far."""

    steps: int = 0
    """In which some were checked, counted for each request."""
    drafted: int = 0
    """Tokens that were proposed."""
    accepted: int = 0
    """Of these, right."""


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens; all ranks of ``tp`` make the same calls."""

    def wanted(self, writings: Mapping[int, RunningSequence]) -> dict[int, Sequence[int]]:
        """Return proposals for requests that write, -1 for those that ``filled`` finds."""

    def filled(self, step: Step, writings: Mapping[int, RunningSequence], /) -> Step:
        """Return a step with every proposal known; its pages are there."""

    def follow(self, step: Step, hidden: Float[Tensor, "T 1 D"]) -> None:
        """See what the model computed.

        Args:
            step: the same, filled.
            hidden: of its tokens, the next step overwrites it.
        """

    def forget(self, request: int) -> None:
        """Drop what is known of a request that is over."""


def num_drafts_for(writing: RunningSequence, most: int) -> int:
    """Tokens to propose: none where a choice depends on the one before but for the model's."""
    if writing.needs_last_token:
        return 0
    return max(0, min(most, writing.num_tokens - len(writing.ids) - 1))


class NgramDrafter:
    """Proposes what followed the text's last tokens where they stood before.

    Reference:
        Saxena 2023, prompt lookup decoding.
    """

    def __init__(self, num_drafts: int) -> None:
        """Know of no text.

        Args:
            num_drafts: tokens to propose, at most.
        """
        self.num_drafts = num_drafts
        self._texts: dict[int, _Ngrams] = {}

    def wanted(self, writings: Mapping[int, RunningSequence]) -> dict[int, Sequence[int]]:
        """Look the ends of texts up."""
        found: dict[int, Sequence[int]] = {}
        for request, writing in writings.items():
            if most := num_drafts_for(writing, self.num_drafts):
                ngrams = self._texts.setdefault(request, _Ngrams(writing.prompt))
                known = len(ngrams.tokens) - len(writing.prompt)
                ngrams.extend(writing.ids[known:])
                found[request] = ngrams.next(most)
        return found

    def filled(self, step: Step, _writings: Mapping[int, RunningSequence], /) -> Step:
        """Return the step as it is."""
        return step

    def follow(self, step: Step, hidden: Tensor) -> None:
        """Need nothing."""

    def forget(self, request: int) -> None:
        """Drop a text."""
        self._texts.pop(request, None)


class _Ngrams:
    """A text and where its short sequences stood last, but for those at its end."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._ends[tuple(self.tokens[-size:])] = end
            self.tokens.append(token)

    def next(self, most: int) -> list[int]:
        for size in range(min(_LONGEST, len(self.tokens)), _SHORTEST - 1, -1):
            if end := self._ends.get(tuple(self.tokens[-size:])):
                return self.tokens[end : end + most]
        return []


class ModelDrafter:
    """Proposes what a smaller model would write, by the same draws.

    Its keys and values lie in pages of the same numbers, so that whatever the scheduler does
    with pages holds for both models.
    """

    def __init__(
        self,
        model: LanguageModel,
        num_drafts: int,
        *,
        cache: PagedCache,
        max_requests: int,
        table_pages: int,
    ) -> None:
        """Take no memory yet.

        Args:
            model: of the same vocabulary, whole, in eval mode, over the same ``tp``.
            num_drafts: tokens to propose.
            cache: as many pages as the model's.
            max_requests: most requests of a step.
            table_pages: most pages of a request.
        """
        self.model, self.num_drafts, self.cache = model, num_drafts, cache
        self.decoder = Decoder(model, cache, max_requests, table_pages, num_drafts=num_drafts)

    def wanted(self, writings: Mapping[int, RunningSequence]) -> dict[int, Sequence[int]]:
        """Propose for every request that can have proposals."""
        most = {r: num_drafts_for(w, self.num_drafts) for r, w in writings.items()}
        return {request: (-1,) * count for request, count in most.items() if count}

    def filled(self, step: Step, writings: Mapping[int, RunningSequence], /) -> Step:
        """Write on after each text that has proposals, one token a forward."""
        chunks = [chunk for chunk in step.chunks if chunk.num_drafts]
        if not chunks:
            return step
        texts = [writings[chunk.request] for chunk in chunks]
        tokens = None
        found: list[Tensor] = []
        for place in range(max(chunk.num_drafts for chunk in chunks)):
            # All go on to the longest: what is too much falls on pages of their own, or none.
            single = Step(tuple(_single(chunk, place) for chunk in chunks))
            logits = self.decoder.run(single, tokens)[1]
            tokens = choose_on_all_ranks(logits, texts, [place] * len(texts), self.model)
            found.append(tokens)
        return with_drafts(step, chunks, torch.stack(found, 1).tolist())

    def follow(self, step: Step, hidden: Tensor) -> None:
        """Read what the model read."""
        if all(chunk.is_writing for chunk in step.chunks):
            self.decoder.run(step)
            return
        inputs = step_tensors(step, self.cache.page_tokens, hidden.device)
        self.cache.step = inputs
        run_stages(self.model, inputs.tokens, inputs.positions, self.cache)

    def forget(self, request: int) -> None:
        """Keep nothing by request."""


def _single(chunk: Chunk, place: int) -> Chunk:
    """Return the chunk of a text's last token or of a draft behind it; the last stays last."""
    place = min(place, chunk.num_drafts)
    token = chunk.tokens[0] if not place else -1
    return replace(chunk, begin=chunk.begin + place, tokens=(token,), num_drafts=0)


def with_drafts(step: Step, chunks: Sequence[Chunk], drafts: Sequence[Sequence[int]]) -> Step:
    """Put proposals in their places.

    Args:
        step: has chunks without proposals too.
        chunks: those with.
        drafts: of each, at least as many as it has.
    """
    known = {
        chunk.request: replace(chunk, tokens=(chunk.tokens[0], *row[: chunk.num_drafts]))
        for chunk, row in zip(chunks, drafts, strict=True)
    }
    return replace(step, chunks=tuple(known.get(c.request, c) for c in step.chunks))


def choose_on_all_ranks(
    logits: Float[Tensor, "R V"],
    writings: Sequence[RunningSequence],
    places: Sequence[int] | None,
    model: LanguageModel,
) -> Int[Tensor, " R"]:
    """Choose tokens on one rank for all, see ``agreed``."""
    return agree_on_tokens(choose(logits, writings, places), model.tp, model.pp)


class MTPDrafter:
    """Proposes what the first layer that predicts further tokens says, see ``Drafter``.

    Its keys and values lie in pages of the same numbers as the model's. Hidden states of a
    shared prefix are nowhere, so prefixes are not shared.
    """

    def __init__(self, model: MTPLanguageModel, num_drafts: int, cache: PagedCache) -> None:
        """Take no memory yet.

        Args:
            model: of the engine, with such a layer.
            num_drafts: tokens to propose.
            cache: of the layer alone; as many pages as the model's.
        """
        self.model, self.num_drafts, self.cache = model, num_drafts, cache
        # By request: the position of the first row, and hidden states of its last tokens.
        self._last: dict[int, tuple[int, Float[Tensor, "L 1 D"]]] = {}

    def wanted(self, writings: Mapping[int, RunningSequence]) -> dict[int, Sequence[int]]:
        """Propose for every request that can have proposals."""
        most = {r: num_drafts_for(w, self.num_drafts) for r, w in writings.items()}
        return {request: (-1,) * count for request, count in most.items() if count}

    def filled(self, step: Step, writings: Mapping[int, RunningSequence], /) -> Step:
        """Go on from the hidden state before each text's last token."""
        chunks = [chunk for chunk in step.chunks if chunk.num_drafts]
        if not chunks:
            return step
        texts = [writings[chunk.request] for chunk in chunks]
        hidden = torch.cat([self._before(chunk) for chunk in chunks])
        tokens = None
        found: list[Tensor] = []
        for place in range(max(chunk.num_drafts for chunk in chunks)):
            single = [
                replace(
                    chunk,
                    begin=chunk.begin - 1 + min(place, chunk.num_drafts),
                    tokens=chunk.tokens[:1],
                    num_drafts=0,
                )
                for chunk in chunks
            ]
            hidden = self._run(single, hidden, tokens)
            logits = last_stage_logits(self.model, hidden)
            tokens = choose_on_all_ranks(logits, texts, [place] * len(texts), self.model)
            found.append(tokens)
        return with_drafts(step, chunks, torch.stack(found, 1).tolist())

    def follow(self, step: Step, hidden: Float[Tensor, "T 1 D"]) -> None:
        """Compute the layer's keys and values of every token that has one behind it."""
        shifted, rows, end = [], [], 0
        for chunk in step.chunks:
            own = hidden[end : end + len(chunk.tokens)]
            end += len(chunk.tokens)
            if chunk.begin:
                shifted.append(replace(chunk, begin=chunk.begin - 1, num_drafts=0))
                rows += [self._before(chunk), own[:-1]]
            elif chunk.tokens[1:]:
                shifted.append(replace(chunk, tokens=chunk.tokens[1:], num_drafts=0))
                rows.append(own[:-1])
            kept = 1 + chunk.num_drafts
            first = chunk.begin + len(chunk.tokens) - kept
            self._last[chunk.request] = first, own[-kept:].clone()
        if shifted:
            self._run(shifted, torch.cat(rows), None)

    def forget(self, request: int) -> None:
        """Drop hidden states."""
        self._last.pop(request, None)

    def _before(self, chunk: Chunk) -> Float[Tensor, "1 1 D"]:
        """Return the hidden state of the token before a chunk."""
        first, hidden = self._last[chunk.request]
        row = chunk.begin - 1 - first
        return hidden[row : row + 1]

    def _run(self, chunks: Sequence[Chunk], hidden: Tensor, tokens: Tensor | None) -> Tensor:
        inputs = step_tensors(Step(tuple(chunks)), self.cache.page_tokens, hidden.device)
        self.cache.step = inputs
        new = inputs.tokens if tokens is None else tokens[None]
        return self.model.draft_hidden(hidden, new, inputs.positions, self.cache)


def build_drafter(
    model: LanguageModel, config: EngineConfig, draft: LanguageModel | None, table_pages: int
) -> Drafter | None:
    """Return what proposes tokens to an engine of ``model``; None where nothing does.

    Args:
        model: of the engine.
        config: of the engine.
        draft: smaller model.
        table_pages: most pages of a request.
    """
    most = config.num_speculative_tokens
    if not most:
        return None
    if config.speculative_drafts == "ngram":
        return NgramDrafter(most)
    cache = PagedCache(config.num_pages, config.page_tokens)
    if isinstance(model, MTPLanguageModel) and draft is None:
        return MTPDrafter(model, most, cache)
    assert draft is not None
    sizes = {"max_requests": config.max_requests, "table_pages": table_pages}
    return ModelDrafter(draft, most, cache=cache, **sizes)
