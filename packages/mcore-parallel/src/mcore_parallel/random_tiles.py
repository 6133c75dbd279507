"""Normal random numbers for boxes of a matrix, drawn in seeded tiles by several threads.

``rng.fill_normal_`` calls these functions. Each tile has its own seed, so a rank draws only the
tiles that overlap its boxes.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import torch
from torch import Tensor

from mcore_parallel.launch.launcher import num_cores

# A tile of a wide matrix has 64 rows of 512 columns. Changing either number changes the weights
# that a seed gives. Tiles are small, so that a slice of columns wastes few draws, and so that
# torch copies a tile on one thread (torch uses several threads above 32768 elements).
TILE_ELEMENTS = 32768
TILE_COLUMNS = 512
_GROUP = 16
"""Tiles whose views are made by one call. Every torch call releases and takes the GIL, for
which 16 threads contend: a call for each tile would cost more than drawing its numbers."""


class Buffers:
    """Generator and scratch memory of one thread, reused for all its tiles."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.tiles = torch.empty(_GROUP, TILE_ELEMENTS)
        self._rows = torch.empty(0)

    def rows(self, like: Tensor) -> Tensor:
        """Return CPU memory with the shape and dtype of ``like``."""
        if self._rows.dtype != like.dtype or self._rows.numel() < like.numel():
            self._rows = torch.empty(like.numel(), dtype=like.dtype)
        return self._rows[: like.numel()].view(like.shape)


Fill = Callable[[Buffers], None]
"""Draws a row of tiles and copies the part inside a box to the box."""


def run_fills(fills: list[Fill], num_threads: int = 0) -> None:
    """Call all fills on several threads; raise the first error."""
    num_threads = min(len(fills), num_threads or min(16, num_cores()))
    remaining = fills[::-1]

    def work() -> None:
        buffers = Buffers()
        while remaining:
            try:
                fill = remaining.pop()
            except IndexError:  # another thread took the last fill
                return
            fill(buffers)

    if num_threads <= 1:
        work()
        return
    with ThreadPoolExecutor(num_threads) as pool:
        for future in [pool.submit(work) for _ in range(num_threads)]:
            future.result()


def plan_fills(
    view: Tensor,
    *,
    seed: int,
    name: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    std: float,
) -> list[Fill]:
    """Return the functions that fill a box of a logical tensor, one for each row of tiles."""
    if not len(shape) == len(offsets) == view.dim() or any(
        begin < 0 or begin + length > size
        for begin, length, size in zip(offsets, view.shape, shape, strict=True)
    ):
        raise ValueError(
            f"{name}: a box of {tuple(view.shape)} at {offsets} is not inside shape {shape}"
        )
    # Vectors and scalars become matrices of one column.
    columns = (1,) * max(0, 2 - len(shape))
    shape, offsets = (*shape, *columns), (*offsets, *(0 for _ in columns))
    view = view.view(*view.shape, *columns)
    if view.numel() == 0:
        return []
    height, first = _tile_of(shape[-2:])[0], offsets[-2]
    stripes = range(first // height, -(-(first + view.shape[-2]) // height))
    fills: list[Fill] = []
    for index in product(*map(range, view.shape[:-2])):
        # ``index`` counts the box's matrices, ``matrix_index`` those of the logical tensor.
        matrix_index = [i + o for i, o in zip(index, offsets, strict=False)]
        fill = partial(
            _fill_stripe,
            view[index],
            base=hash_words(seed, name, *matrix_index),
            shape=shape[-2:],
            offsets=offsets[-2:],
            std=std,
        )
        fills += [partial(fill, stripe) for stripe in stripes]
    return fills


@torch.no_grad()
def _fill_stripe(
    view: Tensor,
    stripe: int,
    buffers: Buffers,
    *,
    base: int,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    std: float,
) -> None:
    """Fill the part of a box that lies in one row of tiles."""
    height, width = _tile_of(shape)
    # Rows in coordinates of the logical matrix: these tiles have [top, bottom), of which
    # [begin, end) are inside the box.
    top, bottom = stripe * height, min((stripe + 1) * height, shape[0])
    begin, end = max(top, offsets[0]), min(bottom, offsets[0] + view.shape[0])
    target = view[begin - offsets[0] : end - offsets[0]]
    on_cpu = view.device.type == "cpu"
    rows = target if on_cpu else buffers.rows(target)
    last_column = offsets[1] + view.shape[1]  # one past the box's last column
    # Tiles are numbered row by row over the logical matrix, not over the box. Each tile is
    # drawn in full, and its part inside the box is copied. ``number`` is the number of the
    # first tile of this row of tiles.
    number, normal = base + stripe * -(-shape[1] // width), (0.0, std)
    # Tiles whose columns are all inside the box, in groups.
    inner = range(-(-offsets[1] // width), last_column // width)
    for group in (inner[i : i + _GROUP] for i in range(0, len(inner), _GROUP)):
        size = (bottom - top) * width
        tiles = buffers.tiles[: len(group), :size].view(len(group), bottom - top, width)
        parts = tiles[:, begin - top : end - top].unbind()
        columns = slice(group[0] * width - offsets[1], (group[-1] + 1) * width - offsets[1])
        targets = rows[:, columns].unflatten(1, (len(group), width)).unbind(1)
        for across, tile, part, columns_of_box in zip(
            group, tiles.unbind(), parts, targets, strict=True
        ):
            buffers.generator.manual_seed(_mix(number + across))
            tile.normal_(*normal, generator=buffers.generator)
            columns_of_box.copy_(part)
    # Tiles at the left and right edge of the box, and narrower tiles at the matrix's edge.
    edges = {offsets[1] // width, (last_column - 1) // width} - {*inner}
    for across in edges:
        left, right = across * width, min((across + 1) * width, shape[1])
        buffers.generator.manual_seed(_mix(number + across))
        tile = buffers.tiles[0, : (bottom - top) * (right - left)]
        tile = tile.view(bottom - top, right - left)
        tile.normal_(*normal, generator=buffers.generator)
        first, last = max(left, offsets[1]), min(right, last_column)
        rows[:, first - offsets[1] : last - offsets[1]].copy_(
            tile[begin - top : end - top, first - left : last - left]
        )
    if not on_cpu:
        target.copy_(rows)


def _tile_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tile of a matrix."""
    width = min(shape[1], TILE_COLUMNS)
    return min(shape[0], TILE_ELEMENTS // width), width


def hash_words(*words: int | str) -> int:
    """Hash words to an integer of 56 bits."""
    text = "\0".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def _mix(number: int) -> int:
    """Scramble the low 32 bits of a seed; torch's CPU generator ignores the others.

    The map is one to one, so no two tiles of a matrix share a seed, and neighbouring tiles get
    very different seeds. It is the finaliser of Appleby's MurmurHash3 (public domain).
    """
    number &= 0xFFFFFFFF
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16
