"""The engine: requests come and go, and every step computes some tokens of many.

Continuous batching (Yu et al. 2022, Orca, OSDI) over paged memory (Kwon et al. 2023,
arXiv:2309.06180). What a request writes depends on its prompt, its sampling and its seed: not
on its neighbours, nor on how its prompt was cut, nor on pages that it shares or loses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_infer.config import SamplingConfig
from mcore_infer.engine.decoding import Decoder, whole_logits
from mcore_infer.engine.paged import PagedCache, step_tensors
from mcore_infer.engine.pages import PagePool
from mcore_infer.engine.prompt_scores import PromptScores
from mcore_infer.engine.scheduler import Scheduler, SchedulerConfig, Step
from mcore_infer.sampling import choose, log_probs_of, top_log_probs
from mcore_infer.writing import (
    Generation,
    NewToken,
    ScoreRequest,
    TokenRules,
    Top,
    Writing,
)
from mcore_models.config import TransformerConfig, window
from mcore_models.protocol import LanguageModel
from mcore_parallel.collectives import all_reduce

_BY_LENGTH = ("dynamic", "longrope")
"""Ways to stretch rotary positions that depend on how long a text is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(SchedulerConfig):
    """Limits of an engine and the size of its cache."""

    num_pages: int = 256
    """Pages of the key/value cache."""

    page_tokens: int = 64
    """Tokens in a page."""


class Engine:
    """Runs requests against one model.

    All ranks of the model's ``tp`` (and of its experts) hold one and make the same calls.

    Attributes:
        model: whole, in eval mode.
        config: limits.
        scheduler: what is waiting and running.
        cache: keys and values.
        decoder: runs the steps in which every request writes.
    """

    def __init__(self, model: LanguageModel, config: EngineConfig) -> None:
        """Take no memory yet.

        Args:
            model: whole, in eval mode.
            config: limits.

        Raises:
            ValueError: if the model is in training mode, or an engine cannot run it.
        """
        if model.training:
            raise ValueError("generation needs a model in eval mode: call model.eval() first.")
        if reason := engine_refusal(model.config):
            raise ValueError(f"{reason}: write with generate().")
        self.model, self.config = model, config
        self.device = next(model.parameters()).device
        windows = [window(model.config, layer) for layer in range(model.config.num_layers)]
        self.cache = PagedCache(config.num_pages, config.page_tokens)
        self.scheduler = Scheduler(
            config,
            PagePool(config.num_pages, config.page_tokens),
            window=-1 if min(windows) < 0 else max(windows),
        )
        self.decoder = Decoder(
            model,
            self.cache,
            config.max_requests,
            -(-config.max_sequence_tokens // config.page_tokens),
        )
        self._writings: dict[int, Writing] = {}
        self._scores: dict[int, ScoreRequest] = {}
        self._prompt_scores: dict[int, PromptScores] = {}
        self._num_requests = 0

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        *,
        num_tokens: int = -1,
        seed: int = 1234,
        eod: int | None = None,
        stop: Sequence[Sequence[int]] = (),
        rules: TokenRules | None = None,
        scores: ScoreRequest | None = None,
    ) -> int:
        """Queue a request; no communication.

        Args:
            prompt: token ids, at least one.
            sampling: how tokens are chosen, and how many.
            num_tokens: how many, in place of ``sampling``'s; 0: the prompt is only scored.
            seed: of the draws.
            eod: id that ends the text; None: none does.
            stop: token sequences that end it and are cut off.
            rules: changes to single tokens' scores.
            scores: log probabilities to compute; None: of the written tokens.

        Returns:
            The number of the request.

        Raises:
            ValueError: if it could never run.
        """
        request, scores = self._num_requests, scores or ScoreRequest()
        writing = Writing(
            prompt,
            sampling,
            num_tokens=sampling.num_tokens if num_tokens < 0 else num_tokens,
            seed=seed,
            eod=eod,
            stop=stop,
            rules=rules,
        )
        self._check(writing, scores)
        self.scheduler.add(request, prompt, writing.num_tokens, shares_prefix=not scores.prompt)
        self._writings[request] = writing
        self._scores[request] = scores
        if scores.prompt:
            self._prompt_scores[request] = PromptScores(writing.prompt, scores.num_top)
        self._num_requests += 1
        return request

    def _check(self, writing: Writing, scores: ScoreRequest) -> None:
        """Refuse what the model cannot compute, before a step does."""
        limit, vocab_size = self.model.config.max_position_embeddings, self.model.vocab_size
        length = len(writing.prompt)
        if limit and length + writing.num_tokens > limit:
            raise ValueError(
                f"the maximum context length was exceeded: {length} tokens of prompt and "
                f"{writing.num_tokens} to write are more than the {limit} positions of the "
                "model. Shorten the prompt or write fewer."
            )
        rules = writing.rules
        ids = [*writing.prompt, *(i for i, _ in rules.bias), *(rules.never_after or ())]
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(
                f"token ids {min(ids)} to {max(ids)} leave the vocabulary, 0 to "
                f"{vocab_size - 1}."
            )
        if writing.sampling.top_k > vocab_size or scores.num_top > vocab_size:
            raise ValueError(
                f"--top-k {writing.sampling.top_k} or {scores.num_top} log probabilities a "
                f"token exceed the vocabulary of {vocab_size} tokens."
            )

    def abort(self, request: int) -> None:
        """Forget a request, wherever it is; one that is over is none."""
        if self._writings.pop(request, None) is not None:
            del self._scores[request]
            self._prompt_scores.pop(request, None)
            self.scheduler.finish(request)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._writings)

    @torch.no_grad()
    def step(self) -> list[NewToken | tuple[int, Generation]]:
        """Compute one step.

        Communicates over ``tp`` as the model does, and all-reduces the chosen tokens.

        Returns:
            Tokens that nothing will take back (``row`` is the request), and each request that
            ended, with all that it wrote.
        """
        step = self.scheduler.plan()
        if step is None:
            return []
        logits = self._logits(step)
        wanting = [chunk.request for chunk in step.chunks if chunk.wants_token]
        if not wanting:
            self.scheduler.complete(step, {})
            return []
        # One rank decides: kernels that round differently must not part the ranks' texts.
        tp = self.model.tp
        chosen = choose(logits, [self._writings[request] for request in wanting])
        chosen = all_reduce(chosen if tp.rank == 0 else torch.zeros_like(chosen), tp)
        new = self._with_scores(wanting, chosen, logits)
        self.scheduler.complete(step, {token.row: token.id for token in new})
        return list(self._take(new))

    def run(self) -> Iterator[NewToken | tuple[int, Generation]]:
        """Step until no request is left; requests may be added meanwhile."""
        while self.has_work:
            yield from self.step()

    def _logits(self, step: Step) -> Tensor:
        """Run the model; score the tokens that chunks want, ``[R, V]``."""
        if all(chunk.wants_token and len(chunk.tokens) == 1 for chunk in step.chunks):
            return self.decoder.logits(step)
        inputs = step_tensors(step, self.config.page_tokens, self.device)
        self.cache.step = inputs
        hidden, _ = self.model(inputs.tokens, inputs.positions, self.cache)
        for chunk, view in zip(step.chunks, inputs.chunks, strict=True):
            if chunk.request in self._prompt_scores:
                own = hidden[view.begin : view.end]
                self._prompt_scores[chunk.request].add(self.model, chunk.begin, own)
        return whole_logits(self.model, hidden[inputs.last])

    def _with_scores(
        self, requests: Sequence[int], chosen: Tensor, logits: Tensor
    ) -> list[NewToken]:
        """Bring the chosen tokens to the host, with the log probabilities that are wanted."""
        wanted = [self._scores[request] for request in requests]
        log_probs: Sequence[float | None] = [None] * len(requests)
        if any(scores.log_probs for scores in wanted):
            # Both at once: the host waits for the device one time a step.
            both = torch.stack([chosen.double(), log_probs_of(logits, chosen).double()])
            ids, log_probs = both.tolist()
        else:
            ids = chosen.tolist()
        top: list[Top] = [()] * len(requests)
        if most := max(scores.num_top for scores in wanted):
            rows = [i for i, scores in enumerate(wanted) if scores.num_top]
            for row, found in zip(rows, top_log_probs(logits[rows], most), strict=True):
                top[row] = found[: wanted[row].num_top]
        return [
            NewToken(request, int(token), log_prob if scores.log_probs else None, its_top)
            for request, token, log_prob, its_top, scores in zip(
                requests, ids, log_probs, top, wanted, strict=True
            )
        ]

    def _take(self, new: Sequence[NewToken]) -> Iterator[NewToken | tuple[int, Generation]]:
        for token in new:
            request = token.row
            writing = self._writings[request]
            yield from writing.add(token)
            if writing.finish_reason:
                result = writing.result()
                if request in self._prompt_scores:
                    result = self._prompt_scores[request].added_to(result)
                self.abort(request)
                yield request, result


def engine_refusal(config: TransformerConfig) -> str:
    """Return why an engine cannot run a model; empty: it can."""
    if config.rope_type in _BY_LENGTH:
        return (
            f"--rope-type {config.rope_type} turns by the length of a text, and an engine "
            "computes texts of several lengths together"
        )
    if set(config.hybrid_override_pattern) & set("MG"):
        return (
            "an engine's pages hold keys and values, not the state of recurrent layers (Mamba, "
            "gated delta net)"
        )
    return ""
