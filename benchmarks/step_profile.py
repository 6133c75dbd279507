"""Where a step's time goes: GPU kernels of a torch profile, sorted into a few kinds.

Kinds are found by kernel name. Times are unions of intervals over all streams, so that
overlapped work is not counted twice: ``exposed`` communication is what no other kernel
covers, and ``gap`` is when the device does nothing at all.
"""

import re
from collections import defaultdict
from collections.abc import Iterable

import torch

KINDS = (
    ("communication", re.compile(r"nccl|symm_mem|multimem", re.IGNORECASE)),
    (
        "attention",
        re.compile(r"fmha|flash|sdpa|cudnn_generated|attention", re.IGNORECASE),
    ),
    ("gemm", re.compile(r"gemm|nvjet|cutlass|xmma|cublas|wgmma|matmul", re.IGNORECASE)),
    ("copy", re.compile(r"memcpy|memset|copy", re.IGNORECASE)),
)
"""Tried in order; anything else is ``elementwise``."""

Interval = tuple[float, float]


def kind_of(kernel: str) -> str:
    """Sort a kernel by its name."""
    for kind, pattern in KINDS:
        if pattern.search(kernel):
            return kind
    return "elementwise"


def union_us(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals, in microseconds."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(intervals):
        if stop > end:
            total += stop - max(begin, end)
            end = stop
    return total


def split_ms(kernels: list[tuple[str, float, float]], wall_us: float, steps: int) -> dict:
    """Split one step's time into kinds.

    Args:
        kernels: name, begin and end in microseconds of every device activity.
        wall_us: length of the profiled region.
        steps: steps in it.

    Returns:
        Milliseconds a step: one entry a kind (union of its own kernels), then
        ``exposed_communication``, ``gap`` and ``step``.
    """
    by_kind: dict[str, list[Interval]] = defaultdict(list)
    for name, begin, end in kernels:
        by_kind[kind_of(name)].append((begin, end))
    busy = union_us(i for intervals in by_kind.values() for i in intervals)
    compute = union_us(
        i for kind, intervals in by_kind.items() if kind != "communication" for i in intervals
    )
    split = {kind: union_us(intervals) for kind, intervals in sorted(by_kind.items())}
    split |= {"exposed_communication": busy - compute, "gap": wall_us - busy, "step": wall_us}
    return {kind: round(us / steps / 1e3, 3) for kind, us in split.items()}


def device_kernels(profile: torch.profiler.profile) -> list[tuple[str, float, float]]:
    """List the device activities of a finished profile."""
    cuda = torch.autograd.DeviceType.CUDA
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == cuda
    ]


def heaviest(kernels: list[tuple[str, float, float]], steps: int, count: int = 25) -> list[str]:
    """Describe the kernels that take longest, one line each: ms a step, launches, name."""
    total: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in kernels:
        total[name].append(end - begin)
    ranked = sorted(total.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        f"{sum(times) / steps / 1e3:9.3f} ms {len(times) / steps:7.1f} x  "
        f"{kind_of(name):13s} {name[:110]}"
        for name, times in ranked
    ]
