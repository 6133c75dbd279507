"""Keys and values in pages: the memory of the engine, and a step's view of it.

The tokens of all chunks of a step lie one after the other in a batch of one row. Each layer
writes their keys and values to the places that the scheduler gave, then every chunk attends
to its own request's pages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_infer.engine.scheduler import Chunk, Step
from mcore_models.config import AttentionBackend
from mcore_models.kernels.attention_backends import attend
from mcore_parallel.optional_kernels import works


@dataclass(frozen=True, slots=True)
class ChunkView:
    """Where one chunk's tokens and their request's keys are."""

    begin: int
    """First token in the row of the step."""
    end: int
    first: int
    """Position of that token in its request."""
    pages: Int[Tensor, " P"]
    """Of the request, in order."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step on the device."""

    tokens: Int[Tensor, "1 T"]
    positions: Int[Tensor, " T"]
    places: Int[Tensor, " T"]
    """Where each token's key goes: page times tokens of a page, plus offset."""
    last: Int[Tensor, " R"]
    """Of the chunks that want a token: their last one, in the row."""
    chunks: tuple[ChunkView, ...]


def step_tensors(step: Step, page_tokens: int, device: torch.device) -> StepTensors:
    """Lay a step out for the model; copies to the device without waiting for it."""
    tokens = [token for chunk in step.chunks for token in chunk.tokens]
    positions = [p for chunk in step.chunks for p in _positions(chunk)]
    places = [
        chunk.pages[p // page_tokens] * page_tokens + p % page_tokens
        for chunk in step.chunks
        for p in _positions(chunk)
    ]
    last, views, begin = [], [], 0
    pages = _on([page for chunk in step.chunks for page in chunk.pages], device)
    pages_of = pages.split([len(chunk.pages) for chunk in step.chunks])
    for chunk, its_pages in zip(step.chunks, pages_of, strict=True):
        end = begin + len(chunk.tokens)
        views.append(ChunkView(begin, end, chunk.begin, its_pages))
        if chunk.wants_token:
            last.append(end - 1)
        begin = end
    return StepTensors(
        _on(tokens, device)[None],
        _on(positions, device),
        _on(places, device),
        _on(last, device),
        tuple(views),
    )


class DecodeTensors:
    """A step of one token each, padded to a fixed number of rows; memory that is kept.

    Rows without a request write to the padding page and read it.

    Attributes:
        tokens: ``[1, R]``.
        positions: ``[R]``.
        places: ``[R]``, see ``StepTensors``.
        lengths: keys of each request, the new one included, ``[R]``.
        tables: pages of each request, in order, ``[R, M]``.
    """

    def __init__(self, num_rows: int, num_pages: int, device: torch.device) -> None:
        """Allocate rows without requests; fill them with ``fill``.

        Args:
            num_rows: R.
            num_pages: M, most pages of a request.
            device: where the model is.
        """
        # A step may be laid out while the one before is on its way to the device.
        self._mirrors = [_Mirror(num_rows, num_pages, device) for _ in range(2)]
        self._device = self._mirrors[0].memory.to(device)
        rows, self.tables = _rows_and_tables(self._device, num_rows, num_pages)
        self.tokens, self.positions, self.places, self.lengths = rows[0][None], *rows[1:]

    def fill(
        self, step: Step, page_tokens: int, padding_page: int, tokens: Tensor | None = None
    ) -> None:
        """Copy a step in, in one transfer that the host does not wait for.

        The step before the last must be over: its tokens are known.

        Args:
            step: of one token each.
            page_tokens: tokens in a page.
            padding_page: page of rows without a request.
            tokens: of the chunks, ``[R]``, where the host does not know them yet.
        """
        self._mirrors.reverse()
        self._mirrors[0].fill(step, page_tokens, padding_page)
        self._device.copy_(self._mirrors[0].memory, non_blocking=True)
        if tokens is not None:
            self.tokens[0, : len(tokens)] = tokens


class _Mirror:
    """A step in the host's memory, laid out as on the device."""

    def __init__(self, num_rows: int, num_pages: int, device: torch.device) -> None:
        self.memory = torch.zeros(
            num_rows * (4 + num_pages), dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        rows, tables = _rows_and_tables(self.memory, num_rows, num_pages)
        self.rows, self.tables = rows.numpy(), tables.numpy()
        self.pages: list[tuple[int, ...]] = [()] * num_rows  # as in the tables

    def fill(self, step: Step, page_tokens: int, padding_page: int) -> None:
        """Lay a step out; of the tables only what changed."""
        num_used = len(step.chunks)
        begins = [chunk.begin for chunk in step.chunks]
        self.rows[0, :num_used] = [chunk.tokens[0] for chunk in step.chunks]
        self.rows[1, :num_used] = begins
        self.rows[2, :num_used] = [
            chunk.pages[-1] * page_tokens + chunk.begin % page_tokens for chunk in step.chunks
        ]
        self.rows[3, :num_used] = [begin + 1 for begin in begins]
        self.rows[:, num_used:] = [[0], [0], [padding_page * page_tokens], [1]]
        held = [chunk.pages for chunk in step.chunks]
        for row, pages in enumerate([*held, *[(padding_page,)] * (len(self.pages) - num_used)]):
            if self.pages[row] != pages:
                self.pages[row] = pages
                # -1: out of every window.
                self.tables[row, : len(pages)] = [max(0, page) for page in pages]


def _rows_and_tables(
    memory: Tensor, num_rows: int, num_pages: int
) -> tuple[Int[Tensor, "4 R"], Int[Tensor, "R M"]]:
    rows, tables = memory.split([4 * num_rows, num_rows * num_pages])
    return rows.view(4, num_rows), tables.view(num_rows, num_pages)


class PagedCache:
    """A ``ModelState`` (see ``mcore_models.protocol``) of pages.

    Attributes:
        num_pages: pages in memory, besides one for padding, which is the last.
        page_tokens: tokens in a page.
        step: what the next forward computes.
        waits_for_device: whether a step of decoding has waited, and so cannot be recorded.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        """Take no memory yet: a layer takes its own when its first tokens come.

        Args:
            num_pages: pages in memory.
            page_tokens: tokens in a page.
        """
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.step: StepTensors | DecodeTensors | None = None
        self.waits_for_device = False
        self._layers: dict[int, _PagedLayer] = {}

    @property
    def length(self) -> int:
        """Zero: the requests of a step stand at positions of their own."""
        return 0

    def layer(self, number: int) -> "_PagedLayer":
        """Return the view of a layer, by its global number."""
        if number not in self._layers:
            self._layers[number] = _PagedLayer(self)
        return self._layers[number]

    @property
    def num_bytes(self) -> int:
        """Memory taken so far."""
        tensors = (t for layer in self._layers.values() for t in (layer.keys, layer.values))
        return sum(t.nbytes for t in tensors if t is not None)


class _PagedLayer:
    """The keys and values of one layer, a ``LayerState``."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.keys: Float[Tensor, "P Z G H"] | None = None
        self.values: Float[Tensor, "P Z G J"] | None = None

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
        if self.keys is None:
            self.keys = k.new_zeros(*size, *k.shape[2:])
        if v is not None and self.values is None:
            self.values = v.new_zeros(*size, *v.shape[2:])
        values = self.keys[..., :value_dim] if self.values is None else self.values
        if isinstance(step, DecodeTensors):
            decode = self._kernel(q, k, v, scores)
            if decode is not None and v is not None:
                new, pages = (k[:, 0], v[:, 0]), (self.keys, values)
                where = (step.tables, step.lengths)
                return decode(q[:, 0], *new, *pages, *where, window=window, **scores)[:, None]
        news, memories = ((k,), (self.keys,)) if v is None else ((k, v), (self.keys, values))
        write_to_pages(memories, [new[:, 0] for new in news], step.places)
        if isinstance(step, DecodeTensors):
            self.cache.waits_for_device = True
            where = (self.keys, values, step.tables, step.lengths)
            return reference_decode(q[:, 0], *where, window=window, **scores).unsqueeze(1)
        mixed = []
        for chunk in step.chunks:
            own = q[chunk.begin : chunk.end]
            seen = [self._seen(memory, chunk, window) for memory in (self.keys, values)]
            mixed.append(attend(own, *seen, window=window, backend=backend, **scores))
        return torch.cat(mixed)

    def _kernel(
        self, q: Tensor, k: Tensor, v: Tensor | None, scores: Mapping[str, Any]
    ) -> Callable[..., Tensor] | None:
        """Return the kernel of decoding where it works; it writes to the pages itself."""
        if v is None or v.shape[-1] != q.shape[-1] or scores.keys() - {"scale"}:
            return None
        if not q.is_cuda or q.dtype == torch.float64:
            return None
        from mcore_infer.engine.kernels import DECODE_KERNEL, paged_decode

        kind = q.dtype, q.shape[-1], q.shape[-2] // k.shape[-2]
        return paged_decode if works(DECODE_KERNEL, q.device, *kind) else None

    def _seen(self, memory: Tensor, chunk: ChunkView, window: int) -> Float[Tensor, "Z 1 G H"]:
        """Gather what a chunk sees. Pages before every window may be another request's."""
        size = self.cache.page_tokens
        first_page = 0 if window < 0 else max(0, chunk.first - window) // size
        end = chunk.first + chunk.end - chunk.begin - first_page * size
        return memory[chunk.pages[first_page:]].flatten(0, 1)[:end].unsqueeze(1)


def write_to_pages(
    memories: Sequence[Float[Tensor, "P Z G _"]],
    news: Sequence[Float[Tensor, "T G _"]],
    places: Int[Tensor, " T"],
) -> None:
    """Write new keys and values to their places: page times tokens of a page, plus offset."""
    for memory, new in zip(memories, news, strict=True):
        memory.flatten(0, 1)[places] = new


def reference_decode(
    q: Float[Tensor, "R N H"],
    keys: Float[Tensor, "P Z G H"],
    values: Float[Tensor, "P Z G J"],
    tables: Int[Tensor, "R M"],
    lengths: Int[Tensor, " R"],
    *,
    window: int = -1,
    **scores: Any,
) -> Float[Tensor, "R N J"]:
    """Let one query of each request attend to its keys, one request after the other.

    With ``write_to_pages`` the reference of ``kernels.paged_decode``; takes any arguments of
    ``attend``; waits for the device.
    """
    size, rows = keys.shape[1], []
    for query, pages, length in zip(q, tables, lengths.tolist(), strict=True):
        first_page = 0 if window < 0 else max(0, length - 1 - window) // size
        held = pages[first_page : -(-length // size)]
        end = length - first_page * size
        k, v = (memory[held].flatten(0, 1)[:end].unsqueeze(1) for memory in (keys, values))
        rows.append(attend(query[None, None], k, v, window=window, **scores)[0, 0])
    return torch.stack(rows)


def _positions(chunk: Chunk) -> range:
    return range(chunk.begin, chunk.begin + len(chunk.tokens))


def _on(numbers: list[int] | list[list[int]], device: torch.device) -> Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int64)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
