"""Proposals of a model's own layer that predicts further tokens.

The layer joins the hidden state of a token with the token behind it and says what follows
that; its own output then takes the place of the hidden state (DeepSeek-AI 2024,
arXiv:2412.19437, section 2.2). The first such layer is applied again for every proposal: it is
the one whose keys and values of all earlier tokens are there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_infer.engine.paged_cache import PagedCache
from mcore_infer.engine.speculative import (
    Drafter,
    ModelDrafter,
    NgramDrafter,
    decided,
    num_wanted,
    with_drafts,
)
from mcore_infer.engine.step_layout import step_tensors
from mcore_infer.engine.step_plans import Chunk, EngineConfig, Step
from mcore_infer.stages import last_stage_logits
from mcore_infer.writing import Writing
from mcore_models.building.mtp_model import MTPLanguageModel
from mcore_models.protocol import LanguageModel


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

    def wanted(self, writings: Mapping[int, Writing]) -> dict[int, Sequence[int]]:
        """Propose for every request that can have proposals."""
        most = {r: num_wanted(w, self.num_drafts) for r, w in writings.items()}
        return {request: (-1,) * count for request, count in most.items() if count}

    def filled(self, step: Step, writings: Mapping[int, Writing], /) -> Step:
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
            tokens = decided(logits, texts, [place] * len(texts), self.model)
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
