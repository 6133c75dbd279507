"""Converts plans of steps to tensors: tokens, positions, and rows of keys in the cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from mcore_infer.engine.scheduler import Step
from mcore_parallel.context_parallel.packed_sequences import Documents

_TABLE_STEP = 16
"""Page tables are padded to multiples of this width."""


def on_device(
    numbers: Sequence[float] | Tensor,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Copy numbers to a device as a tensor; the host does not wait for the copy.

    The copy starts in pinned memory: a copy from other memory would wait for all queued work of
    the device.
    """
    tensor = torch.as_tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class ChunkView:
    """One chunk's tokens within the step, and the pages of its request."""

    begin: int
    """Index of the chunk's first token in the step."""
    end: int
    first: int
    """Position of the first token in its request."""
    pages: Int[Tensor, " P"]
    """Pages of the request, in order."""
    slot: int

    @property
    def is_fresh(self) -> bool:
        """Whether the chunk starts its text and has two tokens or more."""
        return not self.first and self.end > self.begin + 1


@dataclass(frozen=True, slots=True)
class SingleTokens:
    """All chunks of one token in a step, whose attention one kernel computes."""

    rows: Int[Tensor, " R"]
    """Indices of the tokens in the step."""
    tables: Int[Tensor, "R M"]
    """Pages of the tokens' requests, in order."""
    lengths: Int[Tensor, " R"]
    """Number of keys of each request, including the new key."""


@dataclass(frozen=True, slots=True)
class FreshPrompts:
    """Chunks that start their texts, so that their attention reads no cached keys."""

    rows: Int[Tensor, " T"]
    """Indices of the tokens in the step, chunk after chunk."""
    documents: Documents
    """Borders of the chunks, as documents of a packed sequence."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step on the device, with any numbers of tokens per request."""

    tokens: Int[Tensor, "1 T"]
    positions: Int[Tensor, " T"]
    places: Int[Tensor, " T"]
    """Row of each token's key in the cache: page * page_tokens + offset."""
    chunks: tuple[ChunkView, ...]
    singles: SingleTokens | None
    """None: every chunk has several tokens."""
    fresh: FreshPrompts | None
    """None: fewer than two chunks start their texts."""
    adapters: Int[Tensor, " T"] | None
    """Number of each token's adapter, -1 for none; None: no token has one."""

    @property
    def num_earlier(self) -> int:
        """Number of earlier tokens of the request, if the step has one request; else 0."""
        return self.chunks[0].first if len(self.chunks) == 1 else 0


def step_tensors(step: Step, page_tokens: int, device: torch.device) -> StepTensors:
    """Copy a plan to the device as tensors, without waiting for the copies."""
    tokens = [token for chunk in step.chunks for token in chunk.tokens]
    positions = [
        torch.arange(chunk.begin, chunk.begin + len(chunk.tokens)) for chunk in step.chunks
    ]
    # Row of each token in the cache: pages of the request are in order of positions.
    places = [
        torch.tensor(chunk.pages)[p // page_tokens] * page_tokens + p % page_tokens
        for chunk, p in zip(step.chunks, positions, strict=True)
    ]
    views, begin = [], 0
    pages = on_device([page for chunk in step.chunks for page in chunk.pages], device)
    pages_of = pages.split([len(chunk.pages) for chunk in step.chunks])
    for chunk, its_pages in zip(step.chunks, pages_of, strict=True):
        end = begin + len(chunk.tokens)
        views.append(ChunkView(begin, end, chunk.begin, its_pages, chunk.slot))
        begin = end
    return StepTensors(
        on_device(tokens, device)[None],
        on_device(torch.cat(positions), device),
        on_device(torch.cat(places), device),
        tuple(views),
        _singles(step, views, device),
        _fresh(views, device),
        on_device([c.adapter for c in step.chunks for _ in c.tokens], device)
        if _has_adapters(step)
        else None,
    )


def rows_to_choose_after(step: Step) -> list[int]:
    """Return the rows whose logits choose a token: last rows of chunks, and before drafts."""
    ends = accumulate(len(chunk.tokens) for chunk in step.chunks)
    return [
        row
        for chunk, end in zip(step.chunks, ends, strict=True)
        if chunk.wants_token
        for row in range(end - 1 - chunk.num_drafts, end)
    ]


def _singles(
    step: Step, views: Sequence[ChunkView], device: torch.device
) -> SingleTokens | None:
    alone = [
        (view.begin, chunk)
        for view, chunk in zip(views, step.chunks, strict=True)
        if len(chunk.tokens) == 1
    ]
    if not alone:
        return None
    # Multiples of _TABLE_STEP, so that the kernel is compiled for few widths.
    width = -(-max(len(chunk.pages) for _, chunk in alone) // _TABLE_STEP) * _TABLE_STEP
    pages = [
        # -1 is a page outside every window, which no kernel reads: replace it by a valid page.
        max(0, page)
        for _, chunk in alone
        for page in (*chunk.pages, *[0] * (width - len(chunk.pages)))
    ]
    return SingleTokens(
        on_device([begin for begin, _ in alone], device),
        on_device(pages, device).view(len(alone), width),
        on_device([chunk.begin + 1 for _, chunk in alone], device),
    )


def _fresh(views: Sequence[ChunkView], device: torch.device) -> FreshPrompts | None:
    fresh = [view for view in views if view.is_fresh]
    if len(fresh) < 2:
        return None
    rows = [row for view in fresh for row in range(view.begin, view.end)]
    ends = accumulate(view.end - view.begin for view in fresh)
    return FreshPrompts(on_device(rows, device), Documents([[0, *ends]]))


class KeyExtent:
    """Memory layout of a decoding step's keys, for attention in plain torch on a CPU.

    Attributes:
        longest: number of keys of the longest row.
        is_even: whether all rows have the same number of keys.
        is_in_a_row: whether the pages of all rows are consecutive in memory.
        is_mostly_padding: whether padding to the longest row multiplies the number of keys by
            four or more.
    """

    def __init__(self, tables: Int[Tensor, "R W"], lengths: Int[Tensor, " R"]) -> None:
        """Read the page tables and lengths of a step; both on a CPU."""
        self._tables, self._lengths = tables, lengths
        counts = lengths.tolist()
        self.longest = max(counts)
        self.is_even = min(counts) == self.longest
        self.is_mostly_padding = len(counts) * self.longest >= 4 * sum(counts)
        pages = tables.flatten().tolist()
        self.is_in_a_row = pages == list(range(pages[0], pages[0] + len(pages)))
        self._first_page = pages[0]

    def view(self, memory: Shaped[Tensor, "P Z G _"]) -> Shaped[Tensor, "K R G _"]:
        """Return all rows up to the longest as a view; needs ``is_in_a_row``."""
        rows, width = self._tables.shape
        # Consecutive pages make the keys of a row contiguous: key k of row r is at
        # (first_page + r * width) pages plus k tokens, for all k up to the longest row.
        of_page, of_token, *inner = memory.stride()
        return memory.as_strided(
            (self.longest, rows, *memory.shape[2:]),
            (of_token, width * of_page, *inner),
            memory.storage_offset() + self._first_page * of_page,
        )

    def gather(self, memory: Shaped[Tensor, "P Z G _"]) -> Shaped[Tensor, "K R G _"]:
        """Return all rows up to the longest: a view if pages are consecutive, else a copy."""
        if self.is_in_a_row:
            return self.view(memory)
        # [R, W, Z, G, H] -> [K, R, G, H]
        return memory[self._tables].flatten(1, 2)[:, : self.longest].transpose(0, 1)

    @cached_property
    def is_valid(self) -> Bool[Tensor, "R 1 1 K"]:
        """Whether each gathered key belongs to its row; computed once for all layers."""
        return (torch.arange(self.longest) < self._lengths[:, None])[:, None, None]

    @cached_property
    def is_padding(self) -> Bool[Tensor, "K R 1 1"]:
        """Whether each gathered key is padding of its row, in the order of gathered keys."""
        return ~self.is_valid.permute(3, 0, 1, 2)


class DecodeTensors:
    """A step of one token a row, padded to a fixed number of rows, in memory that is reused.

    Each proposal has a row with the pages of its request. Rows without a request read and write
    the padding page and slot.

    Attributes:
        tokens: ``[1, R]``.
        positions: ``[R]``.
        places: ``[R]``, see ``StepTensors``.
        lengths: number of keys of each row's request, including the new key, ``[R]``.
        slots: slot of each row's request, ``[R]``.
        have_drafts: whether several rows may belong to one request.
        tables: pages of each row's request, in order, ``[R, M]``.
        is_recorded: whether a recorded forward reads these tensors.
        num_earlier: earlier tokens of the request, if the step has one chunk; else 0.
    """

    def __init__(
        self, num_rows: int, num_pages: int, device: torch.device, *, num_drafts: int = 0
    ) -> None:
        """Allocate the rows on the device, and their copies in host memory.

        Args:
            num_rows: R.
            num_pages: M, largest number of pages of a request.
            device: device of the model.
            num_drafts: largest number of proposals of a request; the copies of as many further
                steps may be in flight.
        """
        self.have_drafts, self.is_recorded = num_drafts > 0, False
        self.num_earlier = 0
        self._most_pages = num_pages
        self._extent: KeyExtent | None = None
        # The host fills one copy while earlier ones are still being transferred.
        count = 3 + num_drafts if num_drafts else 2
        self._mirrors = [_Mirror(num_rows, num_pages, device) for _ in range(count)]
        # Also on a CPU these tensors are a copy, because a mirror compares new page tables with
        # its own earlier contents.
        self._device = self._mirrors[0].memory.to(device, copy=True)
        rows, self.tables = _rows_and_tables(self._device, num_rows, num_pages)
        self.tokens, self.positions, self.places, self.lengths, self.slots = (
            rows[0][None],
            *rows[1:5],
        )
        self._adapters, self._has_adapters = rows[5], False

    def fill(
        self,
        step: Step,
        page_tokens: int,
        padding: tuple[int, int],
        tokens: Tensor | None = None,
    ) -> None:
        """Copy a step to the device in one transfer.

        The host waits only if every host copy is still being transferred.

        Args:
            step: plan in which each token of a chunk takes a row.
            page_tokens: tokens in a page.
            padding: page and slot of rows without a request.
            tokens: token of each row, ``[R]``, on the device; None: the step's tokens.
        """
        self._most_pages = max((len(chunk.pages) for chunk in step.chunks), default=1)
        self.num_earlier = step.chunks[0].begin if len(step.chunks) == 1 else 0
        self._extent, self._has_adapters = None, _has_adapters(step)
        self._mirrors.append(self._mirrors.pop(0))  # the mirror sent longest ago
        self._mirrors[0].fill(step, page_tokens, *padding)
        self._mirrors[0].send(self._device)
        if tokens is not None:
            self.tokens[0, : len(tokens)] = tokens

    @property
    def adapters(self) -> Int[Tensor, " R"] | None:
        """Number of each row's adapter, -1: none; None: no row of this step has an adapter."""
        return self._adapters if self.is_recorded or self._has_adapters else None

    @property
    def seen_tables(self) -> Int[Tensor, "R W"]:
        """Page tables, cut to the columns that the step uses unless the step is recorded."""
        return self.tables if self.is_recorded else self.tables[:, : self._most_pages]

    @property
    def extent(self) -> KeyExtent:
        """Memory layout of the step's keys; on a CPU, computed once a step."""
        if self._extent is None:
            self._extent = KeyExtent(self.seen_tables, self.lengths)
        return self._extent


class _Mirror:
    """A step in (pinned) host memory, in the layout of ``DecodeTensors``."""

    def __init__(self, num_rows: int, num_pages: int, device: torch.device) -> None:
        self.memory = torch.zeros(
            num_rows * (6 + num_pages), dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        rows, tables = _rows_and_tables(self.memory, num_rows, num_pages)
        self.rows, self.tables = rows.numpy(), tables.numpy()
        self.pages: list[tuple[int, ...]] = [()] * num_rows  # current contents of ``tables``
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, device_memory: Tensor) -> None:
        """Copy to the device."""
        device_memory.copy_(self.memory, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def fill(self, step: Step, page_tokens: int, padding_page: int, padding_slot: int) -> None:
        """Write a step, but of the page tables only the rows that changed."""
        if self._sent is not None:
            self._sent.synchronize()
        rows = [
            (token, chunk.begin + i, chunk.pages, chunk.slot, chunk.adapter)
            for chunk in step.chunks
            for i, token in enumerate(chunk.tokens)
        ]
        num_used = len(rows)
        # Rows of the matrix: token, position, row of the key in the cache, keys of the request
        # with the new one, slot, adapter. Then padding: token 0 at position 0 of its page.
        self.rows[0, :num_used] = [row[0] for row in rows]
        self.rows[1, :num_used] = [row[1] for row in rows]
        self.rows[2, :num_used] = [
            pages[position // page_tokens] * page_tokens + position % page_tokens
            for _, position, pages, *_ in rows
        ]
        self.rows[3, :num_used] = [row[1] + 1 for row in rows]
        self.rows[4, :num_used] = [row[3] for row in rows]
        self.rows[5, :num_used] = [row[4] for row in rows]
        padding = [0, 0, padding_page * page_tokens, 1, padding_slot, -1]
        self.rows[:, num_used:] = [[number] for number in padding]
        spans = [(len(chunk.tokens), chunk.pages) for chunk in step.chunks]
        # Page tables are most of the numbers and change once in page_tokens steps. The
        # scheduler passes the same tuple while nothing changes, so identity is compared first.
        # Rows of padding have a table of the padding page.
        end = 0
        for count, pages in [*spans, (len(self.pages) - num_used, (padding_page,))]:
            begin, end = end, end + count
            current = self.pages[begin:end]
            if any(old is not pages and old != pages for old in current):
                self.pages[begin:end] = [pages] * count
                # -1 is a page outside every window, which no kernel reads: write a valid page
                # instead.
                self.tables[begin:end, : len(pages)] = [max(0, page) for page in pages]


def _rows_and_tables(
    memory: Tensor, num_rows: int, num_pages: int
) -> tuple[Int[Tensor, "6 R"], Int[Tensor, "R M"]]:
    rows, tables = memory.split([6 * num_rows, num_rows * num_pages])
    return rows.view(6, num_rows), tables.view(num_rows, num_pages)


def _has_adapters(step: Step) -> bool:
    return any(chunk.adapter >= 0 for chunk in step.chunks)
