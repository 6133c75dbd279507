"""Steps that hold prompts, and the log probabilities of prompts.

A forward of a hundred tokens computes for a few milliseconds, but launching its kernels one by
one takes a millisecond a layer. Steps of few tokens are therefore recorded by size, in the
layout of decoding steps: one row for each token, which attends to the pages of its request. In
this layout every token reads all keys before it; a chunk that runs without a graph reads them
once. Steps of many tokens, or far into long texts, run without a graph: they keep the device
busy for longer than the host needs to launch them.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_infer.engine.checks import has_recurrent_layers
from mcore_infer.engine.decoding import is_rare, size_to_run
from mcore_infer.engine.host_to_device import on_device
from mcore_infer.engine.paged_cache import PagedCache
from mcore_infer.engine.recording import Recorder, unrecorded_reason
from mcore_infer.engine.stages import from_last_stage, last_stage_logits, run_stages
from mcore_infer.engine.step_layout import DecodeTensors, step_tensors
from mcore_infer.engine.step_plans import Chunk, Step
from mcore_infer.writing.sampling import token_log_probs, top_log_probs, top_tokens
from mcore_infer.writing.sequence import Generation, Top
from mcore_models.protocol import LanguageModel

log = logging.getLogger(__name__)

_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of recorded steps. On an H200 Llama-3-8B reads a prompt of 128, 512 or 1024 tokens in
6, 14 or 30 ms with a graph, and in 33 to 37 ms without."""
_ALWAYS = 256
_MOST_WORK = 1 << 38
"""Most tokens of a size times parameters of a layer. Beyond it the device is busy without a
graph, and padding rows cost time. Llama-3-8B has 2 ** 28 parameters a layer."""
_MOST_TABLE = 1 << 20
"""Most tokens of a size times pages of a request: the table that a step copies to the
device."""
_MOST_KEYS = 1 << 19
"""Most keys that the tokens of a recorded step read in all: 5 ms in Llama-3-8B."""


class PromptSteps:
    """Runs steps in which at least one chunk belongs to a prompt.

    Attributes:
        sizes: of recorded steps, in tokens, ascending.
        recorder: None: no step is recorded.
        num_recorded: steps that replayed a CUDA graph.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: PagedCache,
        max_tokens: int,
        table_pages: int,
        recorder: Recorder | None,
    ) -> None:
        """Choose the recorded sizes; allocates nothing.

        Args:
            model: whole, in eval mode.
            cache: of the engine.
            max_tokens: of a step.
            table_pages: most pages of a request.
            recorder: of the engine; None: steps are not recorded.
        """
        self.model, self.cache = model, cache
        self.device = next(model.parameters()).device
        num_parameters = sum(weight.numel() for weight in model.parameters())
        by_work = _MOST_WORK * model.config.num_layers // num_parameters
        large = max(_ALWAYS, min(_SIZES[-1], by_work, _MOST_TABLE // table_pages))
        most = min(max_tokens, large)
        self.sizes = [*(size for size in _SIZES if size < most), most]
        self.recorder, self.num_recorded = recorder, 0
        reason = unrecorded_reason(model)
        if has_recurrent_layers(model.config):
            reason = "a recurrent layer reads the tokens of a text in order"
        if reason:
            self.recorder = None
            log.debug("steps that hold prompts are not recorded: %s", reason)
        self._table_pages = table_pages
        self._inputs: dict[int, DecodeTensors] = {}
        self._runs: dict[int, Callable[[], Tensor]] = {}
        self._num_steps = Counter[int]()  # by the size that fits best

    def run(self, step: Step) -> Float[Tensor, "T 1 D"]:
        """Return the hidden state after each token; the next call may overwrite it.

        Communicates as the model does.
        """
        size = self._size(step)
        if size and size not in self._runs:
            self._record(size)
        if size not in self._runs:
            inputs = step_tensors(step, self.cache.page_tokens, self.device)
            self.cache.step = inputs
            return run_stages(self.model, inputs.tokens, inputs.positions, self.cache)
        self._inputs[size].fill(step, self.cache.page_tokens, self.cache.padding)
        self.num_recorded += 1
        return self._runs[size]()[: step.num_tokens]

    def _size(self, step: Step) -> int:
        """Return the recorded size to run a step in; 0: it runs without a graph."""
        fitting = [size for size in self.sizes if size >= step.num_tokens]
        if self.recorder is None or self.recorder.gave_up or not fitting:
            return 0
        if sum(map(self._keys, step.chunks)) > _MOST_KEYS:
            return 0
        self._num_steps[fitting[0]] += 1
        count = self._num_steps[fitting[0]]
        size = size_to_run(fitting, self._runs, count)
        return size if size in self._runs or not is_rare(count) else 0

    def _keys(self, chunk: Chunk) -> int:
        """Count the keys that the tokens of a chunk read, padding included."""
        num_tokens = len(chunk.tokens)
        if self.cache.is_padded:
            # Padded attention also copies the keys before it reads them.
            return 4 * num_tokens * self._table_pages * self.cache.page_tokens
        return num_tokens * (chunk.begin + (num_tokens + 1) // 2)

    def _record(self, size: int) -> None:
        assert self.recorder is not None
        inputs = DecodeTensors(size, self._table_pages, self.device, num_drafts=1)
        inputs.is_recorded = True
        inputs.fill(Step(()), self.cache.page_tokens, self.cache.padding)
        forward = partial(_forward, self.model, self.cache, inputs)
        run = self.recorder.recorded(forward)
        if not self.recorder.gave_up:
            self._inputs[size], self._runs[size] = inputs, run


def _forward(model: LanguageModel, cache: PagedCache, inputs: DecodeTensors) -> torch.Tensor:
    cache.step = inputs
    return run_stages(model, inputs.tokens, inputs.positions, cache)


_ROWS = 256


class PromptScores:
    """Collects the log probabilities of one prompt's tokens after the first.

    The logits of a chunk are computed a few rows at a time: those of a whole prompt would be
    one number for each token and each entry of the vocabulary.
    """

    def __init__(self, prompt: Sequence[int], num_top: int) -> None:
        """Mark every token as not scored yet.

        Args:
            prompt: token ids.
            num_top: likeliest tokens to keep for each place.
        """
        self.prompt, self.num_top = prompt, num_top
        self._log_probs = [float("nan")] * (len(prompt) - 1)
        self._top: list[Top] = [()] * (len(prompt) - 1)

    def add(self, model: LanguageModel, begin: int, hidden: Float[Tensor, "S 1 D"]) -> None:
        """Score the prompt's tokens that follow each token of a chunk.

        All-gathers the vocabulary over ``tp``, all-reduces over ``pp``. A chunk that is
        computed again after a preemption gets the same scores.

        Args:
            model: of the engine.
            begin: position of the chunk's first token.
            hidden: of the chunk's tokens.
        """
        end = min(begin + len(hidden), len(self.prompt) - 1)
        for first in range(begin, end, _ROWS):
            last = min(first + _ROWS, end)
            logits = last_stage_logits(model, hidden[first - begin : last - begin])
            following = on_device(self.prompt[first + 1 : last + 1], logits.device)
            found = from_last_stage(token_log_probs(logits, following), model.pp)
            self._log_probs[first:last] = found.tolist()
            if self.num_top:
                best = from_last_stage(top_log_probs(logits, self.num_top), model.pp)
                self._top[first:last] = top_tokens(best)

    def added_to(self, result: Generation) -> Generation:
        """Return a copy of a result with the prompt's scores."""
        return replace(
            result,
            prompt_log_probs=tuple(self._log_probs),
            prompt_top=tuple(self._top) if self.num_top else (),
        )
