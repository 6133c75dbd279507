"""Table of tile sizes of ``few_rows_linear``, measured on an H200; does not import Triton."""

from typing import NamedTuple

MOST_ROWS = 64
"""Most rows of the input of ``few_rows_linear``."""
SHARED_BYTES = 227 * 2**10
"""Shared memory of a program on an H100 or H200."""
NUM_COUNTERS = 4096
"""Most programs of a launch with splits; each has a counter."""


class Tile(NamedTuple):
    """Tile sizes of one program."""

    outs: int
    """Rows of the weight's memory that a program reads together."""
    step: int
    """Elements of each of these rows in one step."""
    stages: int
    """Number of steps whose loads are in flight."""
    warps: int
    splits: int = 1
    """Number of programs that share a row of the weight's memory."""

    def shared_bytes(self, num_rows: int, code: str, itemsize: int) -> int:
        """Return the shared memory of the steps in flight; inputs have ``itemsize`` bytes."""
        rows = max(8, 1 << (num_rows - 1).bit_length())
        weight_bytes = self.outs if code else self.outs * itemsize
        # e2m1: even inputs, odd inputs, and a buffer to separate them.
        num_inputs = 3 * rows if code == "e2m1" else rows
        return self.stages * self.step * (weight_bytes + num_inputs * itemsize)


_TILES = {
    ("", 8): [Tile(16, 512, 3, 1)],
    ("", 16): [Tile(64, 256, 4, 4)],
    ("", 32): [Tile(64, 256, 4, 4), Tile(64, 128, 4, 4)],
    ("e4m3", 8): [
        Tile(16, 256, 4, 1, 2),
        Tile(32, 256, 4, 2, 2),
        Tile(64, 256, 3, 2),
        Tile(64, 256, 4, 4),
        Tile(16, 256, 4, 1, 4),
    ],
    ("e4m3", 16): [
        Tile(32, 128, 4, 2, 2),
        Tile(64, 128, 4, 2, 2),
        Tile(64, 128, 4, 2),
        Tile(32, 128, 4, 2, 4),
    ],
    ("e4m3", 32): [Tile(64, 128, 4, 4, 2), Tile(64, 128, 4, 2), Tile(64, 256, 4, 2, 2)],
    ("int4", 8): [
        Tile(16, 128, 4, 1, 2),
        Tile(32, 128, 3, 2),
        Tile(16, 128, 4, 1, 4),
        Tile(32, 128, 4, 2, 4),
        Tile(16, 128, 4, 1, 8),
    ],
    ("int4", 16): [Tile(32, 128, 4, 2, 2), Tile(64, 128, 4, 2), Tile(32, 128, 4, 2, 4)],
    ("int4", 32): [Tile(64, 128, 4, 4, 2), Tile(64, 128, 3, 4), Tile(64, 128, 4, 4, 4)],
}
"""Tiles by format (int8 as e4m3, e2m1 as int4) and limit of rows, best first; the tiles of 32
rows are also used for more."""
_SMALL = Tile(32, 64, 3, 4)
"""Tile for inputs that need too much shared memory for all other tiles."""


def tiles_for(
    num_rows: int, code: str, shape: tuple[int, int], itemsize: int = 2
) -> list[Tile]:
    """Return tiles that fit, the best on average first; each was the fastest for some shape.

    Args:
        num_rows: rows of the input.
        code: see ``few_rows_linear``.
        shape: shape of the weight's memory.
        itemsize: bytes of a number of the input.
    """
    kind = {"int8": "e4m3", "e2m1": "int4"}.get(code, code)
    tiles = _TILES[kind, 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32]
    fitting = [
        tile
        for tile in tiles
        if (tile.splits == 1 or shape[0] <= tile.outs * NUM_COUNTERS)
        and tile.shared_bytes(num_rows, code, itemsize) <= SHARED_BYTES
    ]
    return fitting or [_SMALL]
