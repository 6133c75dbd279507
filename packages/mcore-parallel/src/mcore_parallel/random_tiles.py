"""Random numbers of a matrix in tiles, each with a seed of its own, drawn by threads.

What ``rng.fill_normal_`` is made of: a rank draws the tiles that overlap its boxes.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import torch
from torch import Tensor

from mcore_parallel.launch.launcher import num_cores

# A tile of a wide matrix is 64 rows of 512. Both numbers are part of the meaning of a seed:
# other ones give other weights. Small enough that a slice of columns wastes few draws and
# that torch copies a tile without threads of its own, which it starts above 32768 elements.
TILE_ELEMENTS = 32768
TILE_COLUMNS = 512
_GROUP = 16
"""Tiles whose views are made together: every call of torch gives Python's lock away and waits
for it again, which 16 threads feel more than the drawing."""


class Buffers:
    """Memory of one thread, which each tile would map anew."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.tiles = torch.empty(_GROUP, TILE_ELEMENTS)
        self._rows = torch.empty(0)

    def rows(self, like: Tensor) -> Tensor:
        """Return memory on the CPU of a tensor's shape and dtype."""
        if self._rows.dtype != like.dtype or self._rows.numel() < like.numel():
            self._rows = torch.empty(like.numel(), dtype=like.dtype)
        return self._rows[: like.numel()].view(like.shape)


Fill = Callable[[Buffers], None]
"""Draws a row of tiles and copies what of it lies in a box."""


def run_fills(fills: list[Fill], num_threads: int = 0) -> None:
    """Call all, on several threads; the first error is raised."""
    num_threads = min(len(fills), num_threads or min(16, num_cores()))
    left = fills[::-1]

    def work() -> None:
        buffers = Buffers()
        while left:
            try:
                fill = left.pop()
            except IndexError:  # another thread took the last one
                return
            fill(buffers)

    if num_threads <= 1:
        work()
        return
    with ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(work) for _ in range(num_threads)]:
            done.result()


def plan_fills(
    view: Tensor,
    *,
    seed: int,
    name: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    std: float,
) -> list[Fill]:
    """Return what fills a box of a logical tensor: a call for each row of tiles."""
    if not len(shape) == len(offsets) == view.dim() or any(
        begin < 0 or begin + length > size
        for begin, length, size in zip(offsets, view.shape, shape, strict=True)
    ):
        raise ValueError(
            f"{name}: box {tuple(view.shape)} at {offsets} does not lie in shape {shape}"
        )
    # A vector is a matrix of one column, and so is a scalar.
    columns = (1,) * max(0, 2 - len(shape))
    shape, offsets = (*shape, *columns), (*offsets, *(0 for _ in columns))
    view = view.view(*view.shape, *columns)
    if view.numel() == 0:
        return []
    height, first = _tile_of(shape[-2:])[0], offsets[-2]
    stripes = range(first // height, -(-(first + view.shape[-2]) // height))
    fills: list[Fill] = []
    for index in product(*map(range, view.shape[:-2])):
        place = [i + o for i, o in zip(index, offsets, strict=False)]
        fill = partial(
            _fill_stripe,
            view[index],
            base=hash_words(seed, name, *place),
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
    # Rows in coordinates of the whole matrix: those of the tiles, and of them those in the box.
    top, bottom = stripe * height, min((stripe + 1) * height, shape[0])
    begin, end = max(top, offsets[0]), min(bottom, offsets[0] + view.shape[0])
    target = view[begin - offsets[0] : end - offsets[0]]
    on_cpu = view.device.type == "cpu"
    rows = target if on_cpu else buffers.rows(target)
    far = offsets[1] + view.shape[1]
    # Tiles are numbered row by row over the whole matrix, not over the box. One is drawn whole,
    # and the part of it inside the box is copied.
    number, normal = base + stripe * -(-shape[1] // width), (0.0, std)
    inner = range(-(-offsets[1] // width), far // width)
    for group in (inner[i : i + _GROUP] for i in range(0, len(inner), _GROUP)):
        size = (bottom - top) * width
        tiles = buffers.tiles[: len(group), :size].view(len(group), bottom - top, width)
        parts = tiles[:, begin - top : end - top].unbind()
        place = slice(group[0] * width - offsets[1], (group[-1] + 1) * width - offsets[1])
        targets = rows[:, place].unflatten(1, (len(group), width)).unbind(1)
        for across, tile, part, into in zip(group, tiles.unbind(), parts, targets, strict=True):
            buffers.generator.manual_seed(_mix(number + across))
            tile.normal_(*normal, generator=buffers.generator)
            into.copy_(part)
    edges = {offsets[1] // width, (far - 1) // width} - {*inner}
    for across in edges:
        left, right = across * width, min((across + 1) * width, shape[1])
        buffers.generator.manual_seed(_mix(number + across))
        tile = buffers.tiles[0, : (bottom - top) * (right - left)]
        tile = tile.view(bottom - top, right - left)
        tile.normal_(*normal, generator=buffers.generator)
        first, last = max(left, offsets[1]), min(right, far)
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
    """Return 56 bits that follow from words."""
    text = "\0".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def _mix(number: int) -> int:
    """Scramble the low 32 bits, which are all that torch's CPU generator uses of a seed.

    One to one, so that no two tiles of a matrix share a seed, and neighbours get seeds far
    apart. The finaliser of Appleby's MurmurHash3 (public domain).
    """
    number &= 0xFFFFFFFF
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16
