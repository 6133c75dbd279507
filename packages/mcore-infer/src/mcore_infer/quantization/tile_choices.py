"""Which way multiplies few rows fastest, measured where it runs.

Tiles that suit one matrix are half as fast on another, and for some shapes torch's own GEMMs
win. So the first GEMM of a shape tries each way on the real weight, as memory gives it and
not the cache, and later ones take the fastest. Inside of a CUDA graph nothing is measured;
engines run every step once before they record it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcore_infer.engine.kernels.skinny_gemm_tiles import NUM_COUNTERS

_RUNS = 5
_BEYOND_CACHE = 512 * 2**20
"""Bytes that are cleared before each run: more than the cache."""
_CLEARED = 4
"""Times that they are: 0.6 ms on an H200, in which the host launches all kernels of a run."""

Way = Callable[[Tensor], Tensor]
"""Multiplies rows with a weight."""


@dataclass(eq=False)
class TileChoices:
    """The fastest ways so far, for the linears that share this object."""

    found: dict[Any, int] = field(default_factory=dict)
    """Number of the way, by what it was measured for."""
    _counters: dict[torch.device, Tensor] = field(default_factory=dict)

    def counters(self, device: torch.device) -> Tensor:
        """Return the zeros that tiles with splits count with, one GEMM after the other."""
        if device not in self._counters:
            zeros = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
            self._counters[device] = zeros
        return self._counters[device]

    def fastest(self, key: tuple[Any, ...], ways: list[Way], x: Tensor) -> Way:
        """Return the fastest of some ways for inputs like ``x``; waits for the device once.

        Args:
            key: all that the time depends on but the number of rows.
            ways: of which the first must work.
            x: rows.
        """
        key = (*key, 1 << (x.shape[0] - 1).bit_length())
        if key not in self.found:
            if torch.cuda.is_current_stream_capturing():
                return ways[0]
            times = [_milliseconds(way, x) for way in ways]
            self.found[key] = times.index(min(times))
        return ways[self.found[key]]


def _milliseconds(way: Way, x: Tensor) -> float:
    """Return the median time of a GEMM whose weight the cache does not hold."""
    from triton.runtime.errors import OutOfResources

    try:
        way(x)
    except OutOfResources:  # the tile is too large for this GPU
        return float("inf")
    scratch = torch.empty(_BEYOND_CACHE, dtype=torch.uint8, device=x.device)
    times = []
    for _ in range(_RUNS):
        for _ in range(_CLEARED):
            scratch.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        way(x)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[_RUNS // 2]
