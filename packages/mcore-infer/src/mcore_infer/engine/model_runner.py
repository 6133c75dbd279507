"""Runs the model on a step: eagerly, or by replaying a CUDA graph of its size.

A forward of few tokens launches hundreds of small kernels, and launching them one by one takes
ten times as long as running them. ``Decoder`` runs steps in which every request writes: each
number of rows in ``sizes`` has a CUDA graph, and a step with fewer requests is padded with rows
that read and write the padding page.

``PromptSteps`` runs steps with tokens of prompts. A forward of a hundred tokens computes for a
few milliseconds, but launching its kernels one by one takes a millisecond a layer. Steps of few
tokens are therefore recorded by size, in the layout of decoding steps: one row for each token,
which attends to the pages of its request. In this layout every token reads all earlier keys,
whereas a chunk without a graph reads them once. Steps of many tokens, or far into long texts,
run without a graph, because they keep the device busy for longer than the host needs to launch
their kernels.
"""

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor, nn

from mcore_infer.engine.checks import has_recurrent_layers
from mcore_infer.engine.few_rows_gemm import use_few_rows_gemm
from mcore_infer.engine.paged_cache import PagedCache
from mcore_infer.engine.recording import Recorder, unrecorded_reason
from mcore_infer.engine.scheduler import Chunk, Step
from mcore_infer.engine.stages import last_stage_logits, run_stages
from mcore_infer.engine.step_layout import (
    DecodeTensors,
    StepTensors,
    on_device,
    step_tensors,
)
from mcore_models.gpt import GPT
from mcore_models.layers.block import TransformerBlock
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.residual import Residual
from mcore_models.protocol import LanguageModel

if TYPE_CHECKING:
    from mcore_infer.engine.whole_step.whole_step import WholeStep

log = logging.getLogger(__name__)

Run = Callable[[], tuple[Tensor, Tensor]]
"""Returns the hidden state and logits of a step whose inputs have been filled in."""

_RARE = 8
"""Number of steps of one size that run in a larger graph before that size is recorded.
Recording takes as long as tens of steps, and the number of rows falls quickly while a batch of
texts ends."""
_PROMPT_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of recorded prompt steps. On an H200 Llama-3-8B reads a prompt of 128, 512 or
1024 tokens in 6, 14 or 30 ms with a graph, and in 33 to 37 ms without."""
_ALWAYS_RECORDED = 256
"""Largest size that is recorded for a model of any size."""
_MOST_WORK = 1 << 38
"""Largest product of the tokens of a size and the parameters of a layer. Larger steps keep the
device busy without a graph, and their padding rows cost time. Llama-3-8B has 2 ** 28 parameters
a layer."""
_MOST_TABLE = 1 << 20
"""Largest product of the tokens of a size and the pages of a request: entries of the page table
that a step copies to the device."""
_MOST_KEYS = 1 << 19
"""Most keys that all tokens of a recorded step read together: 5 ms in Llama-3-8B."""


def decode_sizes(max_requests: int) -> list[int]:
    """Return the numbers of rows of steps: 1, 2, 4, multiples of 8 or 16, and the limit."""
    sizes = [1, 2, 4, *range(8, max_requests, 8 if max_requests <= 64 else 16)]
    return [*(s for s in sizes if s < max_requests), max_requests]


def is_rare(num_steps: int) -> bool:
    """Whether a size with this number of steps is not worth a CUDA graph yet."""
    return num_steps <= _RARE


def size_to_run(sizes: Sequence[int], recorded: Container[int], num_steps: int) -> int:
    """Return the size in which a step runs.

    Args:
        sizes: sizes into which the step fits, ascending.
        recorded: sizes with a CUDA graph.
        num_steps: number of steps so far whose smallest fitting size was the first size.
    """
    if sizes[0] in recorded or not is_rare(num_steps):
        return sizes[0]
    return next((size for size in sizes if size in recorded), sizes[0])


class Decoder:
    """Runs the model on one new token of each request, and on the proposals after it.

    Attributes:
        sizes: padded numbers of rows, ascending; a request has a row for its last token and one
            for each proposal.
        recorder: records CUDA graphs; None: steps are not recorded.
        is_recorded: whether steps replay CUDA graphs.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: PagedCache,
        max_requests: int,
        table_pages: int,
        *,
        num_drafts: int = 0,
        records_graphs: bool = True,
    ) -> None:
        """Allocate inputs on a GPU; a graph is recorded when its size is first needed.

        Args:
            model: whole or a stage, in eval mode. On a GPU its plain GEMMs become
                ``FewRowsGemm``, which differs only for few rows without gradients.
            cache: the engine's cache.
            max_requests: largest number of requests of a step.
            table_pages: largest number of pages of a request.
            num_drafts: largest number of proposals for a request in a step.
            records_graphs: whether steps are recorded where the model and the device allow it.
        """
        self.model, self.cache = model, cache
        self.sizes = decode_sizes(max_requests * (1 + num_drafts))
        self.device = next(model.parameters()).device
        can_record = records_graphs and not unrecorded_reason(model)
        self.recorder = Recorder() if can_record else None
        self.is_recorded = self.recorder is not None
        self._allocated = partial(
            DecodeTensors, num_pages=table_pages, device=self.device, num_drafts=num_drafts
        )
        self._inputs: dict[int, DecodeTensors] = {}
        if self.device.type == "cuda":
            use_few_rows_gemm(model)
            # Allocate before the first step: allocating pinned memory takes long.
            self._inputs = {size: self._allocated(size) for size in self.sizes}
        self._runs: dict[int, Run] = {}
        self._num_steps = Counter[int]()  # by the smallest size that fits

    def run(
        self, step: Step, tokens: Tensor | None = None
    ) -> tuple[Float[Tensor, "R 1 D"], Float[Tensor, "R V"]]:
        """Return hidden state and logits after each token; the next call overwrites both.

        Communicates as the model does.

        Args:
            step: every chunk is writing.
            tokens: token of each row, ``[R]``, on the device; None: the step's tokens.
        """
        num_rows = step.num_tokens
        fitting = [max(1, num_rows)]  # on a CPU no row is padding
        if self.is_recorded or self.device.type == "cuda":
            fitting = [size for size in self.sizes if size >= num_rows]
        size = fitting[0]
        if self.is_recorded:
            # A size that is still rare runs in a larger graph, padded.
            self._num_steps[size] += 1
            size = size_to_run(fitting, self._runs, self._num_steps[size])
        if size not in self._inputs:
            self._inputs[size] = self._allocated(size)
        inputs = self._inputs[size]
        if size not in self._runs:
            # Record with rows of padding only: warm-up runs would otherwise advance the
            # recurrent state of a request several times.
            inputs.fill(Step(()), self.cache.page_tokens, self.cache.padding)
            self._runs[size] = self._prepared(inputs)
        inputs.fill(step, self.cache.page_tokens, self.cache.padding, tokens)
        hidden, logits = self._runs[size]()
        return hidden[:num_rows], logits[:num_rows]

    def _prepared(self, inputs: DecodeTensors) -> Run:
        """Return a function that runs the model on the inputs, as a CUDA graph if possible."""
        # The function must not refer to this object: a reference cycle would delay the release
        # of the graphs' memory.
        forward = partial(_hidden_and_logits, self.model, self.cache, inputs)
        recorder = self.recorder if self.is_recorded else None
        if recorder is None or recorder.gave_up:
            self.is_recorded = False
            return forward
        inputs.is_recorded = True
        if not self.cache.num_bytes:
            forward()  # allocate the cache outside of the graph's memory pool
        from mcore_infer.engine.whole_step.whole_step import whole_step

        if (whole := whole_step(self.model, self.cache, inputs)) is not None:
            forward = partial(_by_kernel, whole)
        run = recorder.recorded(forward)
        self.is_recorded = inputs.is_recorded = not recorder.gave_up
        return run


def _hidden(
    model: LanguageModel, cache: PagedCache, inputs: StepTensors | DecodeTensors
) -> Tensor:
    cache.step = inputs
    chosen = nullcontext()
    if cache.adapters is not None:
        chosen = cache.adapters.chosen(inputs.adapters)
    with chosen:
        return run_stages(model, inputs.tokens, inputs.positions, cache)


def _hidden_and_logits(
    model: LanguageModel, cache: PagedCache, inputs: DecodeTensors
) -> tuple[Tensor, Tensor]:
    hidden = _hidden(model, cache, inputs)
    return hidden, last_stage_logits(model, hidden)


@contextmanager
def _computing_rows(
    model: LanguageModel, cache: PagedCache, rows: Int[Tensor, " R"]
) -> Iterator[bool]:
    """Within the context, forwards compute the last layer's MLP for the tokens ``rows`` only.

    Yields whether the model supports this: the last layer ends with an MLP, the model has no
    adapters, and this stage computes the logits. If not, forwards do not change.
    """
    if not isinstance(model, GPT) or cache.adapters is not None or model.sequence_parallel:
        yield False
        return
    last, call = [*model.blocks.values()][-1], model.call_block
    ends_with_mlp = isinstance(last, TransformerBlock) and last.ends_with_mlp
    if not ends_with_mlp or not model.stage.has_loss:
        yield False
        return

    def call_block(block: nn.Module, stream: Residual, inputs: BlockInputs) -> Residual:
        return block(stream, inputs, rows) if block is last else call(block, stream, inputs)

    model.call_block = call_block
    try:
        yield True
    finally:
        model.call_block = call


def _by_kernel(whole: "WholeStep") -> tuple[Tensor, Tensor]:
    hidden = whole.hidden()
    return hidden, last_stage_logits(whole.model, hidden)


class PromptSteps:
    """Runs steps in which at least one chunk belongs to a prompt.

    Attributes:
        sizes: numbers of tokens of recorded steps, ascending.
        recorder: records CUDA graphs; None: steps are not recorded.
        num_recorded: number of steps that replayed a CUDA graph.
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
            model: model in eval mode.
            cache: the engine's cache.
            max_tokens: largest number of tokens of a step.
            table_pages: largest number of pages of a request.
            recorder: the decoder's recorder; None: steps are not recorded.
        """
        self.model, self.cache = model, cache
        self.device = next(model.parameters()).device
        num_parameters = sum(weight.numel() for weight in model.parameters())
        # tokens * (parameters / layers) <= _MOST_WORK, and tokens * table_pages <= _MOST_TABLE.
        by_work = _MOST_WORK * model.config.num_layers // num_parameters
        large = max(
            _ALWAYS_RECORDED, min(_PROMPT_SIZES[-1], by_work, _MOST_TABLE // table_pages)
        )
        most = min(max_tokens, large)
        self.sizes = [*(size for size in _PROMPT_SIZES if size < most), most]
        self.recorder, self.num_recorded = recorder, 0
        reason = unrecorded_reason(model)
        if has_recurrent_layers(model.config):
            reason = "a recurrent layer reads the tokens of a text in order"
        if reason:
            self.recorder = None
            log.debug("steps with tokens of prompts are not recorded: %s", reason)
        self._table_pages = table_pages
        self._inputs: dict[int, DecodeTensors] = {}
        self._runs: dict[int, Callable[[], Tensor]] = {}
        self._num_steps = Counter[int]()  # by the smallest size that fits

    def run(
        self, step: Step, rows: Sequence[int] | None = None
    ) -> Float[Tensor, "T 1 D"] | Float[Tensor, "R 1 D"]:
        """Return the hidden state after each token; the next call may overwrite it.

        Communicates as the model does.

        Args:
            step: at least one chunk belongs to a prompt.
            rows: tokens of the step whose hidden states are returned; None: all. A step without
                a graph computes the last layer's MLP for these tokens only.
        """
        size = self._size(step)
        if size and size not in self._runs:
            self._record(size)
        if size in self._runs:
            self._inputs[size].fill(step, self.cache.page_tokens, self.cache.padding)
            self.num_recorded += 1
            hidden = self._runs[size]()[: step.num_tokens]
            return hidden if rows is None else hidden[on_device(rows, self.device)]
        inputs = step_tensors(step, self.cache.page_tokens, self.device)
        if rows is None:
            return _hidden(self.model, self.cache, inputs)
        # Some kernels do not support GEMMs of no rows: compute one row, and drop it below.
        index = on_device(rows or [0], self.device)
        with _computing_rows(self.model, self.cache, index) as is_cut:
            hidden = _hidden(self.model, self.cache, inputs)
        return (hidden if is_cut else hidden[index])[: len(rows)]

    def _size(self, step: Step) -> int:
        """Return the recorded size in which to run a step; 0: without a graph."""
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
            # Padded attention copies the keys of the longest text before it reads them.
            return 4 * num_tokens * self._table_pages * self.cache.page_tokens
        return num_tokens * (chunk.begin + (num_tokens + 1) // 2)

    def _record(self, size: int) -> None:
        assert self.recorder is not None
        inputs = DecodeTensors(size, self._table_pages, self.device, num_drafts=1)
        inputs.is_recorded = True
        inputs.fill(Step(()), self.cache.page_tokens, self.cache.padding)
        forward = partial(_hidden, self.model, self.cache, inputs)
        run = self.recorder.recorded(forward)
        if not self.recorder.gave_up:
            self._inputs[size], self._runs[size] = inputs, run
