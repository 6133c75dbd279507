"""Paged cache of the engine: keys and values in pages, recurrent states in slots.

The tokens of all chunks of a step form a batch of one row. Each layer writes the keys and
values of these tokens to the rows that the plan assigns; then every chunk attends to the pages
of its request. A recurrent layer has a state for each slot, batches chunks of equal length, and
starts the first chunk of a request from a state of zeros.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mcore_infer.engine.decode_kernels import decode_kernel, latent_kernel
from mcore_infer.engine.kernels.page_rounding import round_to_pages
from mcore_infer.engine.limits import Fp8Cache, Scales
from mcore_infer.engine.plain_attention import (
    decode_on_cpu,
    padded_decode,
    wide_pages,
    write_to_pages,
)
from mcore_infer.engine.step_layout import (
    ChunkView,
    DecodeTensors,
    FreshPrompts,
    StepTensors,
    on_device,
)
from mcore_models.config import AttentionBackend
from mcore_models.kernels.attention_backends import attend, takes_borders
from mcore_models.kernels.batch_invariant import fixed_order_attention
from mcore_models.peft.stacking import StackedAdapters

log = logging.getLogger(__name__)

_MASKED_TOKENS = 256
"""Most tokens of prompts that attend in one call on a CPU, where a mask separates the
prompts."""
_PADDED = (
    "the attention of this model has no decoding kernel on this GPU: recorded steps read the "
    "pages of the longest possible text"
)

Mix = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
"""Maps a state and inputs to outputs and the new state:
``mcore_models.protocol.RecurrentState``."""


class PagedCache:
    """A ``ModelState`` (see ``mcore_models.protocol``) of pages.

    Attributes:
        num_pages: pages in memory; one more, the last, is for padding.
        page_tokens: tokens in a page.
        num_slots: recurrent states in memory; one more, the last, is for padding.
        step: inputs of the next forward.
        is_padded: whether decoding runs without a kernel, on gathered and padded keys.
        in_fixed_order: attend text by text in the order of ``kernels.batch_invariant``.
        adapters: adapters of the model, applied by request; None: no adapters.
    """

    def __init__(
        self, num_pages: int, page_tokens: int, num_slots: int = 0, fp8: Fp8Cache | None = None
    ) -> None:
        """Store the sizes; a layer allocates its memory at its first use.

        Args:
            num_pages: pages in memory.
            page_tokens: tokens in a page.
            num_slots: number of requests that run together.
            fp8: scales of keys and values in fp8; None: the cache has the model's dtype.
        """
        self.num_pages, self.page_tokens, self.num_slots = num_pages, page_tokens, num_slots
        self._fp8 = fp8
        self.step: StepTensors | DecodeTensors | None = None
        self.is_padded = self.in_fixed_order = False
        self.adapters: StackedAdapters | None = None
        self._memories: dict[int, _LayerMemory] = {}

    @property
    def length(self) -> int:
        """Number of earlier tokens of the request, if the step has one request; else 0.

        Models whose rotary positions depend on the length of the text read this number; their
        steps have one text.
        """
        return 0 if self.step is None else self.step.num_earlier

    def layer(self, number: int) -> "_PagedLayer":
        """Return the view of a layer, by its global number."""
        scales = self._fp8.of(number) if self._fp8 else None
        return _PagedLayer(self, self._memories.setdefault(number, _LayerMemory()), scales)

    @property
    def padding(self) -> tuple[int, int]:
        """Page and slot of rows without a request."""
        return self.num_pages, self.num_slots

    @property
    def num_bytes(self) -> int:
        """Allocated bytes of pages."""
        tensors = (t for layer in self._memories.values() for t in (layer.keys, layer.values))
        return sum(t.nbytes for t in tensors if t is not None)

    @property
    def num_state_bytes(self) -> int:
        """Allocated bytes of recurrent states."""
        return sum(t.nbytes for layer in self._memories.values() for t in layer.states)


@dataclass(slots=True)
class _LayerMemory:
    """The memory of one layer: keys and values, or recurrent states."""

    keys: Shaped[Tensor, "P Z G H"] | None = None
    values: Shaped[Tensor, "P Z G J"] | None = None
    states: tuple[Float[Tensor, "W ..."], ...] = ()
    """Tensors of the recurrent state, each with a row for each slot."""


class _PagedLayer:
    """One layer's part of the cache: a ``LayerState`` and a ``RecurrentState``."""

    def __init__(self, cache: PagedCache, held: _LayerMemory, scales: Scales | None) -> None:
        self.cache, self.held, self.scales = cache, held, scales

    def run(self, mix: Mix, *inputs: Shaped[Tensor, "T 1 ..."]) -> Shaped[Tensor, "T 1 ..."]:
        """Run a recurrent layer on each request's tokens and replace the request's state."""
        step = self.cache.step
        assert step is not None
        if not self.held.states:
            _, state = mix(None, *(x[:1] for x in inputs))
            # The shapes of a state are those after one token; all slots start with zeros.
            slots = self.cache.num_slots + 1
            self.held.states = tuple(x.new_zeros(slots, *x.shape[1:]) for x in state)
        if isinstance(step, DecodeTensors):
            rows = [x.transpose(0, 1) for x in inputs]  # [R, 1, ...] -> [1, R, ...]
            return self._run_from(mix, step.slots, step.positions == 0, rows).transpose(0, 1)
        # Chunks of equal length are batched: [L, R, ...] for R chunks of L tokens.
        lengths: dict[int, list[ChunkView]] = {}
        for chunk in step.chunks:
            lengths.setdefault(chunk.end - chunk.begin, []).append(chunk)
        outputs: list[Tensor] = []
        for chunks in lengths.values():
            rows = [
                torch.cat([x[chunk.begin : chunk.end] for chunk in chunks], 1) for x in inputs
            ]
            slots = on_device([chunk.slot for chunk in chunks], rows[0].device)
            is_first = on_device([not chunk.first for chunk in chunks], rows[0].device).bool()
            outputs += self._run_from(mix, slots, is_first, rows).split(1, 1)
        # Back to the order of the step.
        begins = [chunk.begin for chunks in lengths.values() for chunk in chunks]
        return torch.cat(
            [y for _, y in sorted(zip(begins, outputs, strict=True), key=itemgetter(0))]
        )

    def _run_from(
        self,
        mix: Mix,
        slots: Int[Tensor, " R"],
        is_first: Bool[Tensor, " R"],
        inputs: Sequence[Shaped[Tensor, "L R ..."]],
    ) -> Shaped[Tensor, "L R ..."]:
        """Run a batch of chunks from the states of their slots, and store the new states.

        A chunk that starts a text begins with a state of zeros.
        """
        before = (
            held[slots].masked_fill(is_first.view(-1, *[1] * (held.dim() - 1)), 0)
            for held in self.held.states
        )
        y, after = mix(tuple(before), *inputs)
        for held, new in zip(self.held.states, after, strict=True):
            held[slots] = new
        return y

    def attend(
        self,
        q: Float[Tensor, "S 1 N H"],
        k: Float[Tensor, "S 1 G H"],
        v: Float[Tensor, "S 1 G J"] | None,
        *,
        value_dim: int = 0,
        window: int = -1,
        backend: AttentionBackend = "auto",
        **scores: Any,
    ) -> Float[Tensor, "S 1 N J"]:
        """Write new keys and values to the pages, and attend to the pages of each request.

        Decoding steps use the first of these that supports the step: a kernel that also writes
        the new keys, plain torch on a CPU, the kernel of latent attention, padded attention in
        torch. Other steps compute each chunk separately, except single tokens and prompts that
        start, which are batched.
        """
        step = self.cache.step
        assert step is not None
        # One page more than num_pages: rows of padding read and write the last page.
        size = (self.cache.num_pages + 1, self.cache.page_tokens)
        dtype = k.dtype if self.scales is None else torch.uint8
        held = self.held
        if held.keys is None:
            held.keys = k.new_zeros(*size, *k.shape[2:], dtype=dtype)
        if v is not None and held.values is None:
            held.values = v.new_zeros(*size, *v.shape[2:], dtype=dtype)
        # Latent attention stores one vector a token, whose first channels are the value.
        values = held.keys[..., :value_dim] if held.values is None else held.values
        rules: dict[str, Any] = {**scores, "window": window, "kv_scales": self.scales}
        if self.cache.in_fixed_order and v is not None:
            write_to_pages((held.keys, values), (k[:, 0], v[:, 0]), step.places)
            return self._in_fixed_order(step, q, values, scores.get("scale"))
        if isinstance(step, DecodeTensors):
            decode = decode_kernel(len(q), q, k, v, scores, self.scales, self.cache.page_tokens)
            if decode is not None and v is not None:
                # With proposals, a row reads keys that other rows of its request write: write
                # all keys before the kernel starts.
                if step.have_drafts:
                    self._write(k, v, values, step.places)
                new, pages = (k[:, 0], v[:, 0]), (held.keys, values)
                where = (step.tables, step.lengths)
                return decode(q[:, 0], *new, *pages, *where, **rules)[:, None]
            if not (q.is_cuda or step.is_recorded):
                new = (k[:, 0], None if v is None else v[:, 0])
                memory = (held.keys, values)
                return decode_on_cpu(q[:, 0], new, memory, step, **rules).unsqueeze(1)
        k, v = self._write(k, v, values, step.places)
        if isinstance(step, DecodeTensors):
            latent = None if v is not None else latent_kernel(q, values, rules)
            if latent is not None:
                return latent(q[:, 0], held.keys, step.tables, step.lengths)[:, None]
            where = (held.keys, values, step.seen_tables, step.lengths)
            if q.is_cuda and not self.cache.is_padded:
                log.warning("%s.", _PADDED)
            self.cache.is_padded = True
            return padded_decode(q[:, 0], *where, **rules).unsqueeze(1)
        return self._of_chunks(step, q, k, v, values, rules, backend)

    def _write(
        self,
        k: Float[Tensor, "S 1 G H"],
        v: Float[Tensor, "S 1 G J"] | None,
        values: Shaped[Tensor, "P Z G J"],
        places: Int[Tensor, " S"],
    ) -> tuple[Float[Tensor, "S 1 G H"], Float[Tensor, "S 1 G J"] | None]:
        """Write new keys and values to the pages; return them as an fp8 cache rounds them."""
        keys = self.held.keys
        assert keys is not None
        if v is None:
            write_to_pages((keys,), (k[:, 0],), places)
        elif self.scales is None:
            write_to_pages((keys, values), (k[:, 0], v[:, 0]), places)
        else:
            news = k[:, 0], v[:, 0]
            k, v = round_to_pages(*news, keys, values, places, *self.scales)
            k, v = k[:, None], v[:, None]
        return k, v

    def _of_chunks(
        self,
        step: StepTensors,
        q: Float[Tensor, "S 1 N H"],
        k: Float[Tensor, "S 1 G H"],
        v: Float[Tensor, "S 1 G J"] | None,
        values: Shaped[Tensor, "P Z G J"],
        rules: dict[str, Any],
        backend: AttentionBackend,
    ) -> Float[Tensor, "S 1 N J"]:
        """Attend chunk by chunk; batch single tokens, and prompts that start in this step."""
        assert self.held.keys is not None
        scores = {name: rule for name, rule in rules.items() if name != "kv_scales"}
        window = scores.pop("window")
        mixed = q.new_empty(*q.shape[:-1], values.shape[-1])
        # 1. Chunks of one token, by the decoding kernel.
        singles = step.singles
        decode = None
        if singles is not None:
            rows, page_tokens = len(singles.rows), self.cache.page_tokens
            decode = decode_kernel(rows, q, k, v, scores, self.scales, page_tokens)
        if decode is not None and singles is not None and v is not None:
            at, pages = singles.rows, (self.held.keys, values, singles.tables, singles.lengths)
            mixed[at, 0] = decode(q[at, 0], k[at, 0], v[at, 0], *pages, **rules)
        if v is None and singles is not None:
            decode = latent_kernel(q, values, rules)
            if decode is not None:
                at, where = singles.rows, (singles.tables, singles.lengths)
                mixed[at, 0] = decode(q[at, 0], self.held.keys, *where)
        # 2. Prompts that start in this step, as packed documents.
        options: dict[str, Any] = {"window": window, "backend": backend, **scores}
        fresh = None if v is None else _in_one_call(step.fresh, q, backend, scores)
        if fresh is not None and v is not None:
            at = fresh.rows
            mixed[at] = attend(q[at], k[at], v[at], documents=fresh.documents, **options)
        # 3. All other chunks, each with the gathered pages of its request.
        for chunk in step.chunks:
            here = slice(chunk.begin, chunk.end)
            is_single = here.stop - here.start == 1
            if (is_single and decode is not None) or (chunk.is_fresh and fresh is not None):
                continue
            if chunk.is_fresh and v is not None:
                seen = [k[here], v[here]]  # no earlier keys: read none from pages
            else:
                memories = (self.held.keys, values)
                seen = [self._seen(memory, chunk, window) for memory in memories]
                seen = wide_pages(seen, self.scales, q.dtype)
            attended = attend(q[here], *seen, sizes_repeat=False, **options)
            if len(step.chunks) == 1:
                return attended
            mixed[here] = attended
        return mixed

    def _in_fixed_order(
        self,
        step: StepTensors | DecodeTensors,
        q: Float[Tensor, "S 1 N H"],
        values: Shaped[Tensor, "P Z G H"],
        scale: float | None,
    ) -> Float[Tensor, "S 1 N H"]:
        """Attend text by text, by the batch-invariant kernel; reads lengths on the host."""
        assert self.held.keys is not None
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        size = self.cache.page_tokens
        if isinstance(step, DecodeTensors):
            lengths = step.lengths.tolist()
            pages = [row[: -(-n // size)] for row, n in zip(step.tables, lengths, strict=True)]
            spans = [(i, i + 1, length) for i, length in enumerate(lengths)]
        else:
            pages = [chunk.pages for chunk in step.chunks]
            spans = [(c.begin, c.end, c.first + c.end - c.begin) for c in step.chunks]
        mixed = torch.empty_like(q)
        for text_pages, (begin, end, length) in zip(pages, spans, strict=True):
            memories = (self.held.keys, values)
            k, v = (memory[text_pages].flatten(0, 1)[:length] for memory in memories)
            mixed[begin:end, 0] = fixed_order_attention(q[begin:end, 0], k, v, scale)
        return mixed

    def _seen(self, memory: Tensor, chunk: ChunkView, window: int) -> Shaped[Tensor, "Z 1 G H"]:
        """Gather the keys or values of a chunk's request, without pages before its window."""
        size = self.cache.page_tokens
        # The chunk's first token sees keys from position first - window on. Pages before that
        # may belong to another request. ``end`` counts keys from the first gathered page.
        first_page = 0 if window < 0 else max(0, chunk.first - window) // size
        end = chunk.first + chunk.end - chunk.begin - first_page * size
        return memory[chunk.pages[first_page:]].flatten(0, 1)[:end].unsqueeze(1)


def _in_one_call(
    fresh: FreshPrompts | None, q: Tensor, backend: AttentionBackend, scores: Mapping[str, Any]
) -> FreshPrompts | None:
    """Return the prompts that start in a step if one call can compute their attention."""
    if fresh is None or backend != "auto" or scores.keys() - {"scale"}:
        return None
    is_small = not q.is_cuda and len(fresh.rows) <= _MASKED_TOKENS
    return fresh if is_small or takes_borders(q, 0.0, backend) else None
