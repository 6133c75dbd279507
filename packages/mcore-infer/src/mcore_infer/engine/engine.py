"""The engine: requests come and go, and every step computes some tokens of many.

Continuous batching (Yu et al. 2022, Orca, OSDI) over paged memory (Kwon et al. 2023,
arXiv:2309.06180). What a request writes depends on its prompt, its sampling and its seed: not
on its neighbours, nor on how its prompt was cut, nor on pages that it shares or loses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Flight:
    """A step that was started and whose tokens the host has not read."""

    step: Step
    requests: list[int]
    """That get a token, by row."""
    chosen: Tensor | None = None
    """The tokens, ``[R]``, on the device."""
    found: Tensor | None = None
    """Tokens, and log probabilities where any are wanted, on their way to the host."""
    landing: torch.cuda.Event | None = None
    """When they are there."""
    top: dict[int, Top] = field(default_factory=dict)
    """The likeliest tokens, by request."""


class Engine:
    """Runs requests against one model.

    All ranks of the model's ``tp`` (and of its experts) hold one and make the same calls.

    Attributes:
        model: whole, in eval mode.
        config: limits.
        scheduler: what is waiting and running.
        cache: keys and values.
        decoder: runs the steps in which every request writes.
        runs_ahead: whether a step may start before the tokens of the one before are read; on
            a GPU the host's work then takes no time of its own.
    """

    def __init__(self, model: LanguageModel, config: EngineConfig) -> None:
        """Take no memory yet.

        Args:
            model: whole, in eval mode. On a GPU the plain GEMMs of its linears are replaced
                by ones with a kernel for few rows (``FewRowsGemm``); on a CPU it stays as it
                is.
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
        self._flight: _Flight | None = None  # a step started before its predecessor was read
        self.runs_ahead = self.device.type == "cuda"

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
        """Whether any request is waiting or running, or a step of them is."""
        return bool(self._writings) or self._flight is not None

    @torch.no_grad()
    def step(self) -> list[NewToken | tuple[int, Generation]]:
        """Compute one step.

        Communicates over ``tp`` as the model does, and all-reduces the chosen tokens.

        Returns:
            Tokens that nothing will take back (``row`` is the request), and each request that
            ended, with all that it wrote.
        """
        flight = self._flight or self._launch(self.scheduler.plan())
        self._flight = None
        if flight is None:
            return []
        if self.runs_ahead:
            self._flight = self._launch(self._plan_ahead(flight), flight.chosen)
        new = self._landed(flight)
        self.scheduler.complete(flight.step, {token.row: token.id for token in new})
        return list(self._take(new))

    def run(self) -> Iterator[NewToken | tuple[int, Generation]]:
        """Step until no request is left; requests may be added meanwhile."""
        while self.has_work:
            yield from self.step()

    def _launch(self, step: Step | None, tokens: Tensor | None = None) -> "_Flight | None":
        """Start a step; ``tokens`` are those that the step before it chooses."""
        if step is None:
            return None
        logits = self._logits(step, tokens)
        requests = [chunk.request for chunk in step.chunks if chunk.wants_token]
        if not requests:
            return _Flight(step, [])
        # One rank decides: kernels that round differently must not part the ranks' texts.
        tp = self.model.tp
        chosen = choose(logits, [self._writings[request] for request in requests])
        chosen = all_reduce(chosen if tp.rank == 0 else torch.zeros_like(chosen), tp)
        wanted = [self._scores[request] for request in requests]
        # All at once: the host waits for the device one time a step.
        found = chosen[None].double()
        if any(scores.log_probs for scores in wanted):
            found = torch.cat([found, log_probs_of(logits, chosen)[None].double()])
        flight = _Flight(step, requests, chosen, found.to("cpu", non_blocking=True))
        if found.is_cuda:
            flight.landing = torch.cuda.Event()
            flight.landing.record()
        if most := max(scores.num_top for scores in wanted):
            rows = [i for i, scores in enumerate(wanted) if scores.num_top]
            for row, best in zip(rows, top_log_probs(logits[rows], most), strict=True):
                flight.top[requests[row]] = best[: wanted[row].num_top]
        return flight

    def _plan_ahead(self, flight: "_Flight") -> Step | None:
        """Plan the step after one in flight, where no text can end or needs its last token."""
        step = flight.step
        if not flight.requests or any(chunk.tokens[1:] for chunk in step.chunks):
            return None
        for request in flight.requests:
            writing = self._writings.get(request)
            if writing is None or len(writing.tokens) + 1 >= writing.num_tokens:
                return None
            if writing.needs_last_token or self._scores[request].num_top:
                return None
        return self.scheduler.plan_ahead(step)

    def _logits(self, step: Step, tokens: Tensor | None) -> Tensor:
        """Run the model; score the tokens that chunks want, ``[R, V]``."""
        if all(chunk.wants_token and len(chunk.tokens) == 1 for chunk in step.chunks):
            return self.decoder.logits(step, tokens)
        inputs = step_tensors(step, self.config.page_tokens, self.device)
        self.cache.step = inputs
        hidden, _ = self.model(inputs.tokens, inputs.positions, self.cache)
        for chunk, view in zip(step.chunks, inputs.chunks, strict=True):
            if chunk.request in self._prompt_scores:
                own = hidden[view.begin : view.end]
                self._prompt_scores[chunk.request].add(self.model, chunk.begin, own)
        return whole_logits(self.model, hidden[inputs.last])

    def _landed(self, flight: "_Flight") -> list[NewToken]:
        """Wait for a step's tokens; return those of requests that go on."""
        if flight.found is None:
            return []
        if flight.landing is not None:
            flight.landing.synchronize()
        ids, *rest = flight.found.tolist()
        log_probs = rest[0] if rest else [None] * len(ids)
        return [
            NewToken(
                request,
                int(token),
                log_prob if self._scores[request].log_probs else None,
                flight.top.get(request, ()),
            )
            for request, token, log_prob in zip(flight.requests, ids, log_probs, strict=True)
            if request in self._writings
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
    if set(config.hybrid_override_pattern) & set("MGP"):
        return (
            "an engine's pages hold keys and values, not the state of recurrent layers (Mamba, "
            "gated delta net)"
        )
    return ""
