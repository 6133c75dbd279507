"""Speculative decoding: proposes several tokens a step, without changing the text.

A drafter proposes the next tokens, and one forward scores all proposals. The engine samples
each position with the random number of that position, as without proposals, and accepts
proposals up to the first that differs from its sample. The text is therefore the same, token
for token, for any proposals. A fixed proposal is accepted with the probability that the model
gives to it, as in rejection sampling. A draft model samples with the same random numbers as the
model, so that both agree where their logits are close.

Reference:
    Leviathan et al. 2023, arXiv:2211.17192. Chen et al. 2023, arXiv:2302.01318. Daliri et al.
    2024, drafter-invariant speculative decoding. arXiv:2408.07978.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_infer.engine.limits import EngineConfig
from mcore_infer.engine.model_runner import Decoder
from mcore_infer.engine.paged_cache import PagedCache
from mcore_infer.engine.sampling import choose_on_all_ranks
from mcore_infer.engine.scheduler import Chunk, Step
from mcore_infer.engine.stages import last_stage_logits, run_stages
from mcore_infer.engine.step_layout import step_tensors
from mcore_infer.writing.sequence import RunningSequence
from mcore_models.building.mtp_model import MTPLanguageModel
from mcore_models.protocol import LanguageModel

_LONGEST, _SHORTEST = 4, 2
"""Longest and shortest n-gram at the end of a text that is looked up in the text."""


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of an engine's proposals since its start."""

    steps: int = 0
    """Number of verifications: one for each request and step with proposals."""
    drafted: int = 0
    """Proposed tokens."""
    accepted: int = 0
    """Accepted proposals."""


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens; all ranks of ``tp`` make the same calls."""

    def wanted(self, sequences: Mapping[int, RunningSequence]) -> dict[int, Sequence[int]]:
        """Return proposals by request, for the next plan; -1: ``filled`` computes the token."""

    def filled(self, step: Step, sequences: Mapping[int, RunningSequence], /) -> Step:
        """Return the planned step with every -1 replaced by a token."""

    def follow(self, step: Step, hidden: Float[Tensor, "T 1 D"]) -> None:
        """Update the drafter's state after a step of the model.

        Args:
            step: result of ``filled``.
            hidden: hidden states of the step's tokens; the next step overwrites them.
        """

    def forget(self, request: int) -> None:
        """Delete the state of a request that has ended."""


def num_drafts_for(sequence: RunningSequence, most: int) -> int:
    """Return the number of tokens to propose for a text, at most ``most``.

    0 if penalties or a structure make each choice depend on the previous token.
    """
    if sequence.needs_last_token:
        return 0
    return max(0, min(most, sequence.num_tokens - len(sequence.ids) - 1))


class NgramDrafter:
    """Proposes the tokens that followed an earlier occurrence of the text's last tokens.

    Reference:
        Saxena 2023, prompt lookup decoding.
    """

    def __init__(self, num_drafts: int) -> None:
        """Start without a text; propose at most ``num_drafts`` tokens a step."""
        self.num_drafts = num_drafts
        self._texts: dict[int, _Ngrams] = {}

    def wanted(self, sequences: Mapping[int, RunningSequence]) -> dict[int, Sequence[int]]:
        """Look up the last tokens of each text among its earlier tokens."""
        proposals: dict[int, Sequence[int]] = {}
        for request, sequence in sequences.items():
            if most := num_drafts_for(sequence, self.num_drafts):
                ngrams = self._texts.setdefault(request, _Ngrams(sequence.prompt))
                num_indexed = len(ngrams.tokens) - len(sequence.prompt)
                ngrams.extend(sequence.ids[num_indexed:])
                proposals[request] = ngrams.next(most)
        return proposals

    def filled(self, step: Step, _sequences: Mapping[int, RunningSequence], /) -> Step:
        """Return the step unchanged, because it has no placeholders."""
        return step

    def follow(self, step: Step, hidden: Tensor) -> None:
        """Ignore the step: proposals depend on tokens only."""

    def forget(self, request: int) -> None:
        """Delete a text."""
        self._texts.pop(request, None)


class _Ngrams:
    """A text, and for each of its n-grams the position after its last occurrence.

    The n-gram at the end of the text is not included, because no token follows it yet.
    """

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
    """Proposes the tokens of a smaller model, sampled with the same random numbers.

    The draft model's cache uses the page numbers of the model's cache, so that one plan is
    valid for both models.
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
        """Store the arguments; memory is allocated at first use.

        Args:
            model: draft model in eval mode, with the same vocabulary and ``tp``.
            num_drafts: tokens to propose.
            cache: cache of the draft model, with as many pages as the model's cache.
            max_requests: largest number of requests of a step.
            table_pages: largest number of pages of a request.
        """
        self.model, self.num_drafts, self.cache = model, num_drafts, cache
        self.decoder = Decoder(model, cache, max_requests, table_pages, num_drafts=num_drafts)

    def wanted(self, sequences: Mapping[int, RunningSequence]) -> dict[int, Sequence[int]]:
        """Return placeholders for every request that can have proposals."""
        most = {r: num_drafts_for(s, self.num_drafts) for r, s in sequences.items()}
        return {request: (-1,) * count for request, count in most.items() if count}

    def filled(self, step: Step, sequences: Mapping[int, RunningSequence], /) -> Step:
        """Run the draft model one token at a time for each text with proposals."""
        chunks = [chunk for chunk in step.chunks if chunk.num_drafts]
        if not chunks:
            return step
        texts = [sequences[chunk.request] for chunk in chunks]
        tokens = None
        proposals: list[Tensor] = []
        for offset in range(max(chunk.num_drafts for chunk in chunks)):
            # All texts continue to the longest proposal. Surplus tokens repeat the last
            # position of their text, and ``with_drafts`` cuts them off.
            single = Step(tuple(_single(chunk, offset) for chunk in chunks))
            logits = self.decoder.run(single, tokens)[1]
            tokens = choose_on_all_ranks(logits, texts, [offset] * len(texts), self.model)
            proposals.append(tokens)
        return with_drafts(step, chunks, torch.stack(proposals, 1).tolist())

    def follow(self, step: Step, hidden: Tensor) -> None:
        """Run the draft model on the step's tokens, to fill the draft model's cache."""
        if all(chunk.is_writing for chunk in step.chunks):
            self.decoder.run(step)
            return
        inputs = step_tensors(step, self.cache.page_tokens, hidden.device)
        self.cache.step = inputs
        run_stages(self.model, inputs.tokens, inputs.positions, self.cache)

    def forget(self, request: int) -> None:
        """Do nothing: no state belongs to a request."""


def _single(chunk: Chunk, offset: int) -> Chunk:
    """Return a chunk of one token: the text's last (``offset`` 0), or proposal ``offset``."""
    offset = min(offset, chunk.num_drafts)
    token = chunk.tokens[0] if not offset else -1
    return replace(chunk, begin=chunk.begin + offset, tokens=(token,), num_drafts=0)


def with_drafts(step: Step, chunks: Sequence[Chunk], drafts: Sequence[Sequence[int]]) -> Step:
    """Return the step with computed proposals in place of the placeholders.

    Args:
        step: step whose chunks with proposals have placeholders.
        chunks: the chunks with proposals.
        drafts: proposals of each of ``chunks``, at least as many as its placeholders.
    """
    filled = {
        chunk.request: replace(chunk, tokens=(chunk.tokens[0], *row[: chunk.num_drafts]))
        for chunk, row in zip(chunks, drafts, strict=True)
    }
    return replace(step, chunks=tuple(filled.get(c.request, c) for c in step.chunks))


class MTPDrafter:
    """Proposes tokens by the model's multi-token prediction layer; a ``Drafter``.

    The layer combines the hidden state of a token with the next token's embedding and predicts
    the second next token; for the following proposal, the layer's output replaces the hidden
    state (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2). The first prediction layer computes
    all proposals, because only its cache has all earlier tokens. The cache uses the model's
    page numbers. Prefixes are not shared, because the hidden states of a shared prefix are not
    stored.
    """

    def __init__(self, model: MTPLanguageModel, num_drafts: int, cache: PagedCache) -> None:
        """Store the arguments; memory is allocated at first use.

        Args:
            model: model of the engine, with a prediction layer.
            num_drafts: tokens to propose.
            cache: cache of the prediction layer, with as many pages as the model's cache.
        """
        self.model, self.num_drafts, self.cache = model, num_drafts, cache
        # By request: hidden states of its last tokens, and the position of the first of them.
        self._last: dict[int, tuple[int, Float[Tensor, "L 1 D"]]] = {}

    def wanted(self, sequences: Mapping[int, RunningSequence]) -> dict[int, Sequence[int]]:
        """Return placeholders for every request that can have proposals."""
        most = {r: num_drafts_for(s, self.num_drafts) for r, s in sequences.items()}
        return {request: (-1,) * count for request, count in most.items() if count}

    def filled(self, step: Step, sequences: Mapping[int, RunningSequence], /) -> Step:
        """Apply the layer repeatedly, from the hidden state before each text's last token."""
        chunks = [chunk for chunk in step.chunks if chunk.num_drafts]
        if not chunks:
            return step
        texts = [sequences[chunk.request] for chunk in chunks]
        hidden = torch.cat([self._before(chunk) for chunk in chunks])
        tokens = None
        proposals: list[Tensor] = []
        for offset in range(max(chunk.num_drafts for chunk in chunks)):
            # The layer's row for a token has the position of the token before it. Surplus
            # proposals repeat a position, and ``with_drafts`` cuts them off.
            single = [
                replace(
                    chunk,
                    begin=chunk.begin - 1 + min(offset, chunk.num_drafts),
                    tokens=chunk.tokens[:1],
                    num_drafts=0,
                )
                for chunk in chunks
            ]
            hidden = self._run(single, hidden, tokens)
            logits = last_stage_logits(self.model, hidden)
            tokens = choose_on_all_ranks(logits, texts, [offset] * len(texts), self.model)
            proposals.append(tokens)
        return with_drafts(step, chunks, torch.stack(proposals, 1).tolist())

    def follow(self, step: Step, hidden: Float[Tensor, "T 1 D"]) -> None:
        """Fill the layer's cache for every token whose successor is known."""
        # Pair the hidden state at position p with the token at p + 1. The pair before a chunk's
        # first token needs the stored hidden state of the previous step.
        shifted, rows, end = [], [], 0
        for chunk in step.chunks:
            part = hidden[end : end + len(chunk.tokens)]
            end += len(chunk.tokens)
            if chunk.begin:
                shifted.append(replace(chunk, begin=chunk.begin - 1, num_drafts=0))
                rows += [self._before(chunk), part[:-1]]
            elif chunk.tokens[1:]:
                shifted.append(replace(chunk, tokens=chunk.tokens[1:], num_drafts=0))
                rows.append(part[:-1])
            # The next step begins after the last accepted proposal, which is not known here.
            num_stored = 1 + chunk.num_drafts
            first = chunk.begin + len(chunk.tokens) - num_stored
            self._last[chunk.request] = first, part[-num_stored:].clone()
        if shifted:
            self._run(shifted, torch.cat(rows), None)

    def forget(self, request: int) -> None:
        """Delete a request's hidden states."""
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
    """Build the drafter of an engine; return None without speculative decoding.

    Args:
        model: model of the engine.
        config: number and source of proposals, and sizes of the cache.
        draft: draft model.
        table_pages: largest number of pages of a request.
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
