"""Steps that hold prompts: recorded where few tokens would wait for the host.

A forward of a hundred tokens computes for a few milliseconds, and starting its kernels one by
one takes longer, a millisecond a layer. So steps of few tokens are recorded by size, as
``decoding`` does with those in which every request writes, and in the same way: a row for each
token, which attends to the pages of its request. That reads keys once for each token, where a
chunk of its own reads them once in all, so steps of many tokens, or far into long texts, run as
they come: they keep the device busy for as long as the host needs.
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
"""Tokens of recorded steps. On an H200 the 8B reads a prompt of 128, 512 or 1024 tokens in 6,
14 or 30 ms so, and as it comes in 33 to 37."""
_ALWAYS = 256
_MOST_WORK = 1 << 38
"""Tokens of a larger size times parameters of a layer: with more the device is busy, and rows
that pad a step cost what they compute. The 8B has 2 ** 28 a layer."""
_MOST_TABLE = 1 << 20
"""Tokens of a larger size times pages of a request, which every step sends to the device."""
_MOST_KEYS = 1 << 19
"""That the tokens of a recorded step see, each one's counted: 5 ms in the 8B."""


class PromptSteps:
    """Runs the model on prompts, and on new tokens beside them.

    Attributes:
        sizes: of recorded steps, in tokens, ascending.
        recorder: None: no step is recorded.
        num_recorded: steps that ran as recorded.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: PagedCache,
        max_tokens: int,
        table_pages: int,
        recorder: Recorder | None,
    ) -> None:
        """Allocate nothing yet.

        Args:
            model: whole, in eval mode.
            cache: of the engine.
            max_tokens: of a step.
            table_pages: most pages of a request.
            recorder: of the engine; None: there is none.
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
            reason = "a recurrent state takes the tokens of a text in turn"
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
        """Return the recorded size to run a step in; 0: it runs as it comes."""
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
        """Count the keys that the tokens of a chunk read, or are padded to."""
        num_tokens = len(chunk.tokens)
        if self.cache.is_padded:
            # Gathered before they are read.
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
    """Log probabilities of one prompt's tokens behind the first."""

    def __init__(self, prompt: Sequence[int], num_top: int) -> None:
        """Begin with nothing scored.

        Args:
            prompt: token ids.
            num_top: likeliest tokens to keep for each place.
        """
        self.prompt, self.num_top = prompt, num_top
        self._log_probs = [float("nan")] * (len(prompt) - 1)
        self._top: list[Top] = [()] * (len(prompt) - 1)

    def add(self, model: LanguageModel, begin: int, hidden: Float[Tensor, "S 1 D"]) -> None:
        """Score the tokens behind those of a chunk, as far as the prompt goes.

        All-gathers the vocabulary over ``tp``, all-reduces over ``pp``. Computing a chunk again
        changes nothing.
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
        """Return a result with the prompt's scores."""
        return replace(
            result,
            prompt_log_probs=tuple(self._log_probs),
            prompt_top=tuple(self._top) if self.num_top else (),
        )
