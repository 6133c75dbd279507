"""Steps of one token each: fixed numbers of rows, recorded as CUDA graphs on a GPU.

A forward of few tokens is hundreds of small kernels, and starting them one by one takes ten
times as long as running them. A graph starts them all. There is one for every number of rows
in ``sizes``; fewer requests are padded with rows that use a page of their own.
"""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_infer.engine.paged_cache import PagedCache
from mcore_infer.engine.recording import Recorder, unrecorded_reason
from mcore_infer.engine.step_layout import DecodeTensors
from mcore_infer.engine.step_plans import Step
from mcore_infer.stages import last_stage_logits, run_stages
from mcore_models.protocol import LanguageModel
from mcore_parallel.optional_kernels import works
from mcore_parallel.precision.gemm import Operands, PlainGemm
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from mcore_infer.engine.whole_step import WholeStep

Run = Callable[[], tuple[Tensor, Tensor]]
"""Computes the hidden state and scores of a step's inputs."""
MOST_ROWS = 16
"""Of a step whose GEMMs the kernel multiplies, the least of tensor cores; with more torch is
as fast."""

_RARE = 8
"""Steps of a size that a larger graph runs, where there is one: recording takes as long as tens
of them, and texts that began together end together, through many sizes."""


def decode_sizes(max_requests: int) -> list[int]:
    """Return the numbers of rows: 1, 2, 4, then every eighth, up to the limit."""
    sizes = [1, 2, 4, *range(8, max_requests, 8 if max_requests <= 64 else 16)]
    return [*(s for s in sizes if s < max_requests), max_requests]


def is_rare(num_steps: int) -> bool:
    """Whether a size that so many steps had is not worth a graph yet."""
    return num_steps <= _RARE


def size_to_run(sizes: Sequence[int], recorded: Container[int], num_steps: int) -> int:
    """Choose among fitting sizes, ascending, after some steps that suited the first best."""
    if sizes[0] in recorded or not is_rare(num_steps):
        return sizes[0]
    return next((size for size in sizes if size in recorded), sizes[0])


class FewRowsGemm(PlainGemm):
    """Multiplies few rows by a kernel that reads the weight as fast as memory gives it."""

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Float[Tensor, "F D"], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return y and the input itself."""
        num_rows = x.numel() // x.shape[-1]
        if bias is None and num_rows <= MOST_ROWS and not torch.is_grad_enabled():
            is_narrow = x.dtype in (torch.bfloat16, torch.float16)
            if x.is_cuda and is_narrow and weight.dtype == x.dtype:
                from mcore_infer.engine.kernels.skinny_gemm import (
                    FEW_ROWS_KERNEL,
                    few_rows_linear,
                )

                if works(FEW_ROWS_KERNEL, x.device, x.dtype):
                    return few_rows_linear(x, weight), (x,)
        return super().forward(x, weight, bias)


def read_few_rows_fast(model: LanguageModel) -> None:
    """Replace every ``PlainGemm`` of the model's linears by a ``FewRowsGemm``, in place."""
    for module in model.modules():
        is_linear = isinstance(module, (ColumnParallelLinear, RowParallelLinear))
        if is_linear and type(module.gemm) is PlainGemm:
            module.gemm = FewRowsGemm()


class Decoder:
    """Runs the model on one new token of each request.

    Attributes:
        sizes: numbers of rows, a text's last token and its drafts each, ascending.
        recorder: of CUDA graphs; None: nothing is recorded on this device.
        is_recorded: whether steps run as it recorded them.
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
        """Allocate the inputs; graphs are recorded when their size is first needed.

        Args:
            model: whole, in eval mode. On a GPU its plain GEMMs become ``FewRowsGemm``, which
                multiplies as they do wherever gradients are on or rows are many.
            cache: of the engine.
            max_requests: most requests of a step.
            table_pages: most pages of a request.
            num_drafts: most proposals for a request in a step.
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
            read_few_rows_fast(model)
            # Now, not within a step: pinned memory takes the host a while.
            self._inputs = {size: self._allocated(size) for size in self.sizes}
        self._runs: dict[int, Run] = {}
        self._num_steps = Counter[int]()  # by the size that fits best

    def run(
        self, step: Step, tokens: Tensor | None = None
    ) -> tuple[Float[Tensor, "R 1 D"], Float[Tensor, "R V"]]:
        """Return hidden state and scores after each token; the next call overwrites them.

        Communicates as the model does.

        Args:
            step: of chunks that are writing.
            tokens: of the rows, ``[R]``, where the host does not know them yet.
        """
        num_rows = step.num_tokens
        fitting = [max(1, num_rows)]  # on a CPU no row is padding
        if self.is_recorded or self.device.type == "cuda":
            fitting = [size for size in self.sizes if size >= num_rows]
        size = fitting[0]
        if self.is_recorded:
            self._num_steps[size] += 1
            size = size_to_run(fitting, self._runs, self._num_steps[size])
        if size not in self._inputs:
            self._inputs[size] = self._allocated(size)
        inputs = self._inputs[size]
        if size not in self._runs:
            # Of padding alone: a recurrent state takes a token in only once.
            inputs.fill(Step(()), self.cache.page_tokens, self.cache.padding)
            self._runs[size] = self._prepared(inputs)
        inputs.fill(step, self.cache.page_tokens, self.cache.padding, tokens)
        hidden, logits = self._runs[size]()
        return hidden[:num_rows], logits[:num_rows]

    def _prepared(self, inputs: DecodeTensors) -> Run:
        """Return what computes the inputs, recorded where it can be."""
        # What it returns knows nothing of this object, whose memory is free once it is dropped.
        forward = partial(_forward, self.model, self.cache, inputs)
        recorder = self.recorder if self.is_recorded else None
        if recorder is None or recorder.gave_up:
            self.is_recorded = False
            return forward
        inputs.is_recorded = True
        if not self.cache.num_bytes:
            forward()  # takes it
        from mcore_infer.engine.whole_step import whole_step

        if (whole := whole_step(self.model, self.cache, inputs)) is not None:
            forward = partial(_by_kernel, whole)
        run = recorder.recorded(forward)
        self.is_recorded = inputs.is_recorded = not recorder.gave_up
        return run


def _forward(
    model: LanguageModel, cache: PagedCache, inputs: DecodeTensors
) -> tuple[Tensor, Tensor]:
    cache.step = inputs
    hidden = run_stages(model, inputs.tokens, inputs.positions, cache)
    return hidden, last_stage_logits(model, hidden)


def _by_kernel(whole: "WholeStep") -> tuple[Tensor, Tensor]:
    hidden = whole.hidden()
    return hidden, last_stage_logits(whole.model, hidden)
