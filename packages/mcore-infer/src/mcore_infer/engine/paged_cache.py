"""Keys and values in pages, recurrent state in slots: the memory of the engine.

The tokens of all chunks of a step lie one after the other in a batch of one row. Each layer
writes their keys and values to the places that the scheduler gave, then every chunk attends
to its own request's pages. A recurrent layer has a state for each slot; chunks of equal length
run side by side from those of their requests, and the first chunk of a request from none.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mcore_infer.engine.fp8_cache import from_codes, to_codes
from mcore_infer.engine.padded_attention import GATHERED_BYTES, padded_decode
from mcore_infer.engine.step_layout import ChunkView, DecodeTensors, FreshPrompts, StepTensors
from mcore_infer.engine.step_plans import Fp8Cache, Scales
from mcore_infer.host_to_device import on_device
from mcore_models.config import AttentionBackend
from mcore_models.kernels.attention_backends import attend, takes_borders
from mcore_parallel.optional_kernels import works

log = logging.getLogger(__name__)

_MASKED_TOKENS = 256
"""Of prompts that attend in one call on a CPU, at most: a mask is their borders."""
_RULES = {"scale", "chunk", "softcap", "sinks"}
"""Of scores, that the kernel of decoding knows."""
_PADDED = (
    "a recorded step reads the pages that a text may have at most: the attention of this model "
    "has no kernel of decoding here"
)

Mix = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
"""See ``mcore_models.protocol.RecurrentState``."""


class PagedCache:
    """A ``ModelState`` (see ``mcore_models.protocol``) of pages.

    Attributes:
        num_pages: pages in memory, besides one for padding, which is the last.
        page_tokens: tokens in a page.
        num_slots: recurrent states in memory, besides one for padding, which is the last.
        step: what the next forward computes.
        is_padded: whether attention of decoding has no kernel, and reads what is padded.
    """

    def __init__(
        self, num_pages: int, page_tokens: int, num_slots: int = 0, fp8: Fp8Cache | None = None
    ) -> None:
        """Take no memory yet: a layer takes its own when its first tokens come.

        Args:
            num_pages: pages in memory.
            page_tokens: tokens in a page.
            num_slots: requests that run together.
            fp8: keep keys and values in fp8; None: in the model's dtype.
        """
        self.num_pages, self.page_tokens, self.num_slots = num_pages, page_tokens, num_slots
        self._fp8 = fp8
        self.step: StepTensors | DecodeTensors | None = None
        self.is_padded = False
        self._memories: dict[int, _LayerMemory] = {}

    @property
    def length(self) -> int:
        """Tokens before the step's, where it computes one request; else 0.

        Read by models whose rotary positions depend on the length of the text, of which a step
        has one.
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
        """Memory of the pages taken so far."""
        tensors = (t for held in self._memories.values() for t in (held.keys, held.values))
        return sum(t.nbytes for t in tensors if t is not None)

    @property
    def num_state_bytes(self) -> int:
        """Memory of the recurrent states taken so far."""
        return sum(t.nbytes for held in self._memories.values() for t in held.states)


@dataclass(slots=True)
class _LayerMemory:
    """What one layer keeps: keys and values, or a state."""

    keys: Shaped[Tensor, "P Z G H"] | None = None
    values: Shaped[Tensor, "P Z G J"] | None = None
    states: tuple[Float[Tensor, "W ..."], ...] = ()
    """Of all slots."""


class _PagedLayer:
    """A view of what one layer keeps: ``LayerState``, ``RecurrentState``."""

    def __init__(self, cache: PagedCache, held: _LayerMemory, scales: Scales | None) -> None:
        self.cache, self.held, self.scales = cache, held, scales

    def run(self, mix: Mix, *inputs: Shaped[Tensor, "T 1 ..."]) -> Shaped[Tensor, "T 1 ..."]:
        """Mix each request's tokens from its own state, and replace it.

        Chunks of one length run side by side.
        """
        step = self.cache.step
        assert step is not None
        if not self.held.states:
            _, state = mix(None, *(x[:1] for x in inputs))
            slots = self.cache.num_slots + 1
            self.held.states = tuple(x.new_zeros(slots, *x.shape[1:]) for x in state)
        if isinstance(step, DecodeTensors):
            rows = [x.transpose(0, 1) for x in inputs]  # [R, 1, ...] -> [1, R, ...]
            return self._run_from(mix, step.slots, step.positions == 0, rows).transpose(0, 1)
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
        """Mix tokens of several requests side by side; a first token has none before it."""
        before = (
            held[slots].masked_fill(is_first.view(-1, *[1] * (held.dim() - 1)), 0)
            for held in self.held.states
        )
        y, behind = mix(tuple(before), *inputs)
        for held, new in zip(self.held.states, behind, strict=True):
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
        """Write the new keys and values to their places; each token attends to its request."""
        step = self.cache.step
        assert step is not None
        size = (self.cache.num_pages + 1, self.cache.page_tokens)
        dtype = k.dtype if self.scales is None else torch.uint8
        held = self.held
        if held.keys is None:
            held.keys = k.new_zeros(*size, *k.shape[2:], dtype=dtype)
        if v is not None and held.values is None:
            held.values = v.new_zeros(*size, *v.shape[2:], dtype=dtype)
        values = held.keys[..., :value_dim] if held.values is None else held.values
        rules: dict[str, Any] = {**scores, "window": window, "kv_scales": self.scales}
        if isinstance(step, DecodeTensors):
            decode = self._kernel(len(q), q, k, v, scores)
            if decode is not None and v is not None:
                if step.have_drafts:  # of one request: a row reads what another writes
                    memories = (held.keys, values)
                    write_to_pages(memories, (k[:, 0], v[:, 0]), step.places, self.scales)
                new, pages = (k[:, 0], v[:, 0]), (held.keys, values)
                where = (step.tables, step.lengths)
                return decode(q[:, 0], *new, *pages, *where, **rules)[:, None]
            if not (q.is_cuda or step.is_recorded):
                new = (k[:, 0], None if v is None else v[:, 0])
                memory = (held.keys, values)
                return _decode_on_cpu(q[:, 0], new, memory, step, **rules).unsqueeze(1)
        news, memories = ((k,), (held.keys,)) if v is None else ((k, v), (held.keys, values))
        write_to_pages(memories, [new[:, 0] for new in news], step.places, self.scales)
        if isinstance(step, DecodeTensors):
            latent = None if v is not None else self._latent_kernel(q, values, rules)
            if latent is not None:
                return latent(q[:, 0], held.keys, step.tables, step.lengths)[:, None]
            where = (held.keys, values, step.seen_tables, step.lengths)
            if q.is_cuda and not self.cache.is_padded:
                log.warning("%s.", _PADDED)
            self.cache.is_padded = True
            return padded_decode(q[:, 0], *where, **rules).unsqueeze(1)
        return self._of_chunks(step, q, k, v, values, rules, backend)

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
        """Let each chunk attend to its request's pages: those of one token side by side."""
        assert self.held.keys is not None
        scores = {name: rule for name, rule in rules.items() if name != "kv_scales"}
        window = scores.pop("window")
        mixed = q.new_empty(*q.shape[:-1], values.shape[-1])
        singles = step.singles
        decode = None
        if singles is not None:
            decode = self._kernel(len(singles.rows), q, k, v, scores)
        if decode is not None and singles is not None and v is not None:
            at, pages = singles.rows, (self.held.keys, values, singles.tables, singles.lengths)
            mixed[at, 0] = decode(q[at, 0], k[at, 0], v[at, 0], *pages, **rules)
        if v is None and singles is not None:
            decode = self._latent_kernel(q, values, rules)
            if decode is not None:
                at, where = singles.rows, (singles.tables, singles.lengths)
                mixed[at, 0] = decode(q[at, 0], self.held.keys, *where)
        options: dict[str, Any] = {"window": window, "backend": backend, **scores}
        fresh = None if v is None else _in_one_call(step.fresh, q, backend, scores)
        if fresh is not None and v is not None:
            at = fresh.rows
            own = rounded_to_codes((k[at], v[at]), self.scales)
            mixed[at] = attend(q[at], *own, documents=fresh.documents, **options)
        for chunk in step.chunks:
            here = slice(chunk.begin, chunk.end)
            is_single = here.stop - here.start == 1
            if (is_single and decode is not None) or (chunk.is_fresh and fresh is not None):
                continue
            seen = [self._seen(memory, chunk, window) for memory in (self.held.keys, values)]
            seen = wide_pages(seen, self.scales, q.dtype)
            mixed[here] = attend(q[here], *seen, sizes_repeat=False, **options)
        return mixed

    def _kernel(
        self, num_rows: int, q: Tensor, k: Tensor, v: Tensor | None, scores: Mapping[str, Any]
    ) -> Callable[..., Tensor] | None:
        """Return the kernel of decoding where one works; it writes to the pages itself."""
        if v is None or v.shape[-1] != q.shape[-1] or scores.keys() - _RULES:
            return None
        if not q.is_cuda or q.dtype == torch.float64:
            return None
        if self.scales is not None and q.shape[-1] % 4:  # it reads four codes at a time
            return None
        from mcore_infer.engine.kernels import paged_attention

        sizes = q.dtype, q.shape[-1], q.shape[-2] // k.shape[-2], self.scales is not None
        kind = *sizes, tuple(sorted(scores))
        programs = num_rows * k.shape[-2]
        is_for_many = paged_attention.takes_many(programs, self.cache.page_tokens, *kind)
        if is_for_many and works(paged_attention.DECODE_MANY_KERNEL, q.device, *kind):
            from mcore_infer.engine.kernels.paged_attention_many import decode_many

            return decode_many
        has_kernel = works(paged_attention.DECODE_KERNEL, q.device, *kind)
        return paged_attention.paged_decode if has_kernel else None

    def _latent_kernel(
        self, q: Tensor, values: Tensor, rules: Mapping[str, Any]
    ) -> Callable[..., Tensor] | None:
        """Return the kernel of latent decoding where one works; keys are in the pages."""
        is_plain = rules.keys() == {"window", "kv_scales"} and rules["window"] < 0
        if not q.is_cuda or q.dtype == torch.float64 or not is_plain:
            return None
        from mcore_infer.engine.kernels.latent_attention import LATENT_KERNEL, latent_decode

        kind = q.dtype, *q.shape[-2:], values.shape[-1]
        if not works(LATENT_KERNEL, q.device, *kind):
            return None
        return partial(latent_decode, value_dim=values.shape[-1])

    def _seen(self, memory: Tensor, chunk: ChunkView, window: int) -> Shaped[Tensor, "Z 1 G H"]:
        """Gather what a chunk sees. Pages before every window may be another request's."""
        size = self.cache.page_tokens
        first_page = 0 if window < 0 else max(0, chunk.first - window) // size
        end = chunk.first + chunk.end - chunk.begin - first_page * size
        return memory[chunk.pages[first_page:]].flatten(0, 1)[:end].unsqueeze(1)


def _in_one_call(
    fresh: FreshPrompts | None, q: Tensor, backend: AttentionBackend, scores: Mapping[str, Any]
) -> FreshPrompts | None:
    """Return the prompts of a step that attend in one call, as packed documents."""
    if fresh is None or backend != "auto" or scores.keys() - {"scale"}:
        return None
    is_small = not q.is_cuda and len(fresh.rows) <= _MASKED_TOKENS
    return fresh if is_small or takes_borders(q, 0.0, backend) else None


def write_to_pages(
    memories: Sequence[Shaped[Tensor, "P Z G _"]],
    news: Sequence[Float[Tensor, "T G _"]],
    places: Int[Tensor, " T"],
    kv_scales: Scales | None = None,
) -> None:
    """Write new keys and values to their places: page times tokens of a page, plus offset."""
    scales = kv_scales or (None,) * len(news)
    for memory, new, scale in zip(memories, news, scales, strict=True):
        memory.flatten(0, 1)[places] = new if scale is None else to_codes(new, scale)


def wide_pages(
    memories: Sequence[Shaped[Tensor, "..."]], kv_scales: Scales | None, dtype: torch.dtype
) -> list[Float[Tensor, "..."]]:
    """Return the keys and values that parts of the pages hold."""
    if kv_scales is None:
        return list(memories)
    pairs = zip(memories, kv_scales, strict=True)
    return [from_codes(memory, scale, dtype) for memory, scale in pairs]


def rounded_to_codes(
    news: tuple[Float[Tensor, "..."], Float[Tensor, "..."]], kv_scales: Scales | None
) -> tuple[Float[Tensor, "..."], ...]:
    """Return new keys and values as the pages would hold them."""
    if kv_scales is None:
        return news
    pairs = zip(news, kv_scales, strict=True)
    return tuple(from_codes(to_codes(new, scale), scale, new.dtype) for new, scale in pairs)


def _decode_on_cpu(
    q: Float[Tensor, "R N H"],
    new: tuple[Float[Tensor, "R G H"], Float[Tensor, "R G J"] | None],
    memory: tuple[Shaped[Tensor, "P Z G H"], Shaped[Tensor, "P Z G J"]],
    step: DecodeTensors,
    *,
    window: int = -1,
    kv_scales: Scales | None = None,
    **scores: Any,
) -> Float[Tensor, "R N J"]:
    """Write a new key and value of each request, and let its one query attend to all.

    In one call where rows are alike, else one request after the other.

    Args:
        q: queries; R requests.
        new: the last key and value of each; no value where it is a part of the key.
        memory: keys and values in pages; changed.
        step: where both are.
        window: earlier keys that a query sees besides its own; -1: all.
        kv_scales: multiply codes of an fp8 cache; None: the cache has the dtype of ``q``.
        scores: see ``attend``.
    """
    extent, size = step.extent, memory[0].shape[1]
    # Pages before every window may be another request's.
    begin = 0 if window < 0 else max(0, extent.longest - 1 - window) // size * size
    if extent.is_even and extent.is_in_a_row and kv_scales is None:
        # Views of whole rows, whose last token is that of the new key and of the query.
        seen = [extent.view(pages) for pages in memory]  # [K, R, G, .]
        for view, last in zip(seen, new, strict=True):
            if last is not None:
                view[-1] = last
        if begin:
            seen = [view[begin:] for view in seen]
        return attend(q[None], *seen, window=window, **scores)[0]
    written = [x for x in new if x is not None]
    write_to_pages(memory[: len(written)], written, step.places, kv_scales)
    where = *memory, step.seen_tables, step.lengths
    options: dict[str, Any] = {"window": window, "kv_scales": kv_scales, **scores}
    token_bytes = sum(pages.stride(1) * pages.element_size() for pages in memory)
    if extent.is_mostly_padding or len(q) * extent.longest * token_bytes > GATHERED_BYTES:
        return reference_decode(q, *where, **options)
    is_plain = window < 0 and not scores.keys() - {"scale"}
    if not extent.is_even and not is_plain:
        return padded_decode(q, *where, **options)
    gathered = [extent.gather(pages)[begin:] for pages in memory]
    k, v = wide_pages(gathered, kv_scales, q.dtype)  # [K, R, G, .]
    if extent.is_even:
        return attend(q[None], k, v, window=window, **scores)[0]
    # Keys behind a row's end may be another request's NaN, which a mask does not hide.
    k, v = (x.masked_fill(extent.is_foreign, 0) for x in (k, v))
    return F.scaled_dot_product_attention(
        q[:, :, None],  # [R, N, 1, H]
        k.permute(1, 2, 0, 3),  # [K, R, G, H] -> [R, G, K, H]
        v.permute(1, 2, 0, 3),
        attn_mask=extent.is_own,
        enable_gqa=q.shape[1] != k.shape[2],
        **scores,
    )[:, :, 0]


def reference_decode(
    q: Float[Tensor, "R N H"],
    keys: Shaped[Tensor, "P Z G H"],
    values: Shaped[Tensor, "P Z G J"],
    tables: Int[Tensor, "R M"],
    lengths: Int[Tensor, " R"],
    *,
    window: int = -1,
    kv_scales: Scales | None = None,
    **scores: Any,
) -> Float[Tensor, "R N J"]:
    """Let one query of each request attend to its keys, one request after the other.

    The reference of ``padded_decode``, and with ``write_to_pages`` of ``paged_decode``; takes
    any arguments of ``attend``; waits for the device.
    """
    size, rows = keys.shape[1], []
    for query, pages, length in zip(q, tables, lengths.tolist(), strict=True):
        first_page = 0 if window < 0 else max(0, length - 1 - window) // size
        held = pages[first_page : -(-length // size)]
        end = length - first_page * size
        seen = [memory[held].flatten(0, 1)[:end].unsqueeze(1) for memory in (keys, values)]
        k, v = wide_pages(seen, kv_scales, q.dtype)
        rows.append(attend(query[None, None], k, v, window=window, **scores)[0, 0])
    return torch.stack(rows)
