"""The engine: requests come and go, and every step computes some tokens of many.

Continuous batching (Yu et al. 2022, Orca, OSDI) over paged memory (Kwon et al. 2023,
arXiv:2309.06180). What a request writes depends on its prompt, its sampling and its seed: not
on its neighbours, nor on how its prompt was cut, nor on pages that it shares or loses.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_infer.config import SamplingConfig
from mcore_infer.engine.decoding import Decoder, last_logits
from mcore_infer.engine.paged import PagedCache, step_tensors
from mcore_infer.engine.pages import PagePool
from mcore_infer.engine.scheduler import Scheduler, SchedulerConfig, Step
from mcore_infer.sampling import log_probs_of, sample
from mcore_infer.writing import Generation, NewToken, Writing
from mcore_models.config import window
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
        if model.config.rope_type in _BY_LENGTH:
            raise ValueError(
                f"--rope-type {model.config.rope_type} turns by the length of a text, and an "
                "engine computes texts of several lengths together: write with generate()."
            )
        if "M" in model.config.hybrid_override_pattern:
            raise ValueError(
                "an engine's pages hold keys and values, not the state of Mamba layers: write "
                "with generate()."
            )
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
        self._samplings: dict[int, SamplingConfig] = {}
        self._num_requests = 0

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        *,
        seed: int = 1234,
        eod: int | None = None,
        stop: Sequence[Sequence[int]] = (),
    ) -> int:
        """Queue a request; no communication.

        Args:
            prompt: token ids, at least one.
            sampling: how tokens are chosen, and how many.
            seed: of the draws.
            eod: id that ends the text; None: none does.
            stop: token sequences that end it and are cut off.

        Returns:
            The number of the request.

        Raises:
            ValueError: if it could never run.
        """
        request = self._num_requests
        limit = self.model.config.max_position_embeddings
        if limit and len(prompt) + sampling.num_tokens > limit:
            raise ValueError(
                f"the maximum context length was exceeded: {len(prompt)} tokens of prompt and "
                f"{sampling.num_tokens} to write are more than the {limit} positions of the "
                "model. Shorten the prompt or write fewer."
            )
        self.scheduler.add(request, prompt, sampling.num_tokens)
        self._writings[request] = Writing(sampling.num_tokens, seed, eod, stop)
        self._samplings[request] = sampling
        self._num_requests += 1
        return request

    def abort(self, request: int) -> None:
        """Forget a request, wherever it is; one that is over is none."""
        if self._writings.pop(request, None) is not None:
            del self._samplings[request]
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
        chosen = self._choose(logits, wanting)
        # Both at once: the host waits for the device one time a step.
        both = torch.stack([chosen.double(), log_probs_of(logits, chosen).double()])
        ids, log_probs = both.tolist()
        new = dict(zip(wanting, map(int, ids), strict=True))
        self.scheduler.complete(step, new)
        return list(self._take(new, log_probs))

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
        model = self.model
        return last_logits(model, inputs.tokens, inputs.positions, self.cache, inputs.last)

    def _choose(self, logits: Tensor, requests: Sequence[int]) -> Tensor:
        """Sample a token a row; rows of equal sampling go together."""
        # The likeliest token needs no draw, and a draw costs the host as much as a kernel.
        numbers = [
            0.0 if self._samplings[r].top_k == 1 else self._writings[r].draw() for r in requests
        ]
        draws = torch.tensor(numbers, dtype=torch.float64).to(self.device)
        rows_of: dict[SamplingConfig, list[int]] = {}
        for row, request in enumerate(requests):
            rows_of.setdefault(self._samplings[request], []).append(row)
        if len(rows_of) == 1:
            chosen = sample(logits, next(iter(rows_of)), draws)
        else:
            chosen = torch.empty(len(requests), dtype=torch.int64, device=self.device)
            for sampling, rows in rows_of.items():
                index = torch.tensor(rows, device=self.device)
                chosen[index] = sample(logits[index], sampling, draws[index])
        # One rank decides: kernels that round differently must not part the ranks' texts.
        tp = self.model.tp
        return all_reduce(chosen if tp.rank == 0 else torch.zeros_like(chosen), tp)

    def _take(
        self, new: dict[int, int], log_probs: Iterable[float]
    ) -> Iterator[NewToken | tuple[int, Generation]]:
        for (request, token), log_prob in zip(new.items(), log_probs, strict=True):
            writing = self._writings[request]
            for released, its_log_prob in writing.add(token, log_prob):
                yield NewToken(request, released, its_log_prob)
            if writing.finish_reason:
                self.abort(request)
                yield request, writing.result()
