"""``mcore-train profile``: GPU kernels of a torch profile, sorted into a few kinds.

The name of a kernel determines its kind. Times are unions of intervals over all streams, so
overlapped work is not counted twice: ``exposed`` communication overlaps with no other kernel,
and in a ``gap`` the device is idle.
"""

import gzip
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
    """Description of a collective's process group."""

    @property
    def interval(self) -> Interval:
        """Begin and end of the activity."""
        return self.begin, self.end


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
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
        Milliseconds per step: an entry for each kind (union of its kernels), then
        ``exposed_communication`` in total and by axis, ``gap`` and ``step``.
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
        return read_trace(path).kernels


@dataclass(frozen=True)
class Trace:
    """Device activities and host ranges of a trace of torch's profiler."""

    kernels: list[Kernel]
    ranges: dict[str, list[Interval]]
    """Ranges of the host by name: ``step N``, and the spans in it such as ``F/0``."""

    @property
    def steps(self) -> list[Interval]:
        """Whole steps."""
        found = [times[0] for name, times in self.ranges.items() if name.startswith(STEP)]
        return sorted(found)


STEP = "step "
"""Prefix of the name of a step's range."""


def read_trace(file: Path) -> Trace:
    """Read a trace of torch's profiler, ``.json`` or ``.json.gz``.

    Raises:
        ValueError: if the file is not such a trace.
    """
    open_file = gzip.open if file.suffix == ".gz" else open
    try:
        with open_file(file, "rt", encoding="utf-8") as stream:
            events = json.load(stream)["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is not a trace of torch's profiler ({error}): give a file of --profile."
        ) from None
    ranges: dict[str, list[Interval]] = defaultdict(list)
    kernels = []
    for event in events:
        if "dur" not in event:
            continue
        begin, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            axis = event.get("args", {}).get("Process Group Description", "")
            kernels.append(Kernel(event["name"], begin, end, axis))
        elif event.get("cat") == "user_annotation":
            ranges[event["name"]].append((begin, end))
    return Trace(kernels, dict(ranges))


def trace_page(trace: Trace) -> str:
    """Format the time of a step by kinds and ranges, and the longest kernels."""
    steps = trace.steps
    count = max(1, len(steps))
    lines = [f"{len(steps)} steps"]
    if trace.kernels:
        kernels = trace.kernels
        wall_us = max(k.end for k in kernels) - min(k.begin for k in kernels)
        split = split_ms(kernels, wall_us, count)
        exposed = split.pop("exposed_by_axis")
        lines.append("device, ms a step:")
        lines += [f"{ms:9.3f}  {kind.replace('_', ' ')}" for kind, ms in split.items()]
        lines += [
            f"{ms:9.3f}  exposed communication over {axis}" for axis, ms in exposed.items()
        ]
        lines += ["heaviest kernels:", *heaviest(kernels, count)]
    else:
        lines.append("no device in the trace")
    lines.append("ranges of the host, ms a step:")
    named = [(n, t) for n, t in trace.ranges.items() if not n.startswith(STEP)]
    for name, times in sorted(named, key=lambda entry: -union_us(entry[1])):
        lines.append(
            f"{union_us(times) / count / 1e3:9.3f}  {name}, {len(times) / count:.1f} x"
        )
    return "\n".join(lines)


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
