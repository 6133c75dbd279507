"""Where a step's time goes: GPU kernels of a torch profile, sorted into a few kinds.

Kinds are found by kernel name. Times are unions of intervals over all streams, so that
overlapped work is not counted twice: ``exposed`` communication is what no other kernel
covers, and ``gap`` is when the device does nothing at all.
"""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Kernel:
    """One activity of the device, in microseconds."""

    name: str
    begin: float
    end: float
    axis: str = ""
    """Of a collective: what its group was called when it was made."""

    @property
    def interval(self) -> Interval:
        """When it ran."""
        return self.begin, self.end


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


def split_ms(kernels: list[Kernel], wall_us: float, steps: int) -> dict:
    """Split one step's time into kinds.

    Args:
        kernels: every device activity.
        wall_us: length of the profiled region.
        steps: steps in it.

    Returns:
        Milliseconds a step: one entry a kind (union of its own kernels), then
        ``exposed_communication`` as a whole and by axis, ``gap`` and ``step``.
    """
    by_kind: dict[str, list[Interval]] = defaultdict(list)
    by_axis: dict[str, list[Interval]] = defaultdict(list)
    compute = []
    for kernel in kernels:
        kind = kind_of(kernel.name)
        by_kind[kind].append(kernel.interval)
        if kind == "communication":
            by_axis[kernel.axis or "unknown"].append(kernel.interval)
        else:
            compute.append(kernel.interval)
    computing = union_us(compute)
    busy = union_us(kernel.interval for kernel in kernels)
    split = {kind: union_us(intervals) for kind, intervals in sorted(by_kind.items())}
    split |= {"exposed_communication": busy - computing, "gap": wall_us - busy, "step": wall_us}
    exposed = {a: union_us(i + compute) - computing for a, i in sorted(by_axis.items())}
    return {
        **{kind: round(us / steps / 1e3, 3) for kind, us in split.items()},
        "exposed_by_axis": {a: round(us / steps / 1e3, 3) for a, us in exposed.items()},
    }


def device_kernels(profile: torch.profiler.profile) -> list[Kernel]:
    """List the device activities of a finished profile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [
        Kernel(
            event["name"],
            event["ts"],
            event["ts"] + event["dur"],
            event.get("args", {}).get("Process Group Description", ""),
        )
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def heaviest(kernels: list[Kernel], steps: int, count: int = 25) -> list[str]:
    """Describe the kernels that take longest, one line each: ms a step, launches, name."""
    total: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        total[kernel.name].append(kernel.end - kernel.begin)
    ranked = sorted(total.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        f"{sum(times) / steps / 1e3:9.3f} ms {len(times) / steps:7.1f} x  "
        f"{kind_of(name):13s} {name[:110]}"
        for name, times in ranked
    ]
