"""What the benchmarks share: device times, quantiles, and one JSON line that is kept."""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from mcore_parallel.optional_kernels import package_versions

KERNEL_PACKAGES = (
    "triton",
    "flash-attn-4",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "transformer-engine",
    "transformer-engine-torch",
    "flash-attn",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "nvidia-nccl-cu13",
    "deep-ep",
)
"""Distributions whose kernels a result may have run; those that are installed are kept."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    parser.add_argument("--output", type=Path, default=None, help="folder for NAME.json")
    parser.add_argument("--commit", default="", help="of the source, where there is no git")


def time_steps(step: Callable[[int], object], warmup: int, steps: int) -> list[float]:
    """Return the milliseconds of each step by device events, after a warm-up.

    Steps follow each other without a pause, so that the host runs ahead as in training.
    """
    for i in range(warmup):
        step(i)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for i in range(steps):
        step(i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def quantiles(times: Sequence[float], key: str = "ms", digits: int = 3) -> dict[str, float]:
    """Return the median with p10 and p90 under ``key``, ``key_p10`` and ``key_p90``."""
    ordered = sorted(times)
    return {
        key: round(statistics.median(ordered), digits),
        f"{key}_p10": round(ordered[len(ordered) // 10], digits),
        f"{key}_p90": round(ordered[-1 - len(ordered) // 10], digits),
    }


def versions(options: argparse.Namespace) -> dict[str, object]:
    """Return what a result needs to be compared by: commit, device, versions."""
    return {
        "commit": options.commit or _commit(),
        "device": _device(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if _has_nccl() else "",
        "driver": _driver(),
        "kernel_packages": package_versions(KERNEL_PACKAGES),
        "python": platform.python_version(),
    }


def host_versions(options: argparse.Namespace) -> dict[str, object]:
    """Return the same for what runs on a processor: commit, processor, load, versions."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "commit": options.commit or _commit(),
        "processor": f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores",
        "load_average": round(os.getloadavg()[0], 1),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def spread(values: Sequence[float], key: str, digits: int = 3) -> dict[str, float]:
    """Return the median of few repeats with the least and the greatest, by name."""
    return {
        key: round(statistics.median(values), digits),
        f"{key}_min": round(min(values), digits),
        f"{key}_max": round(max(values), digits),
    }


def keep(options: argparse.Namespace, row: dict[str, object]) -> None:
    """Print a result as one JSON line and write it to the chosen folder."""
    print(json.dumps(row))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"{row['name']}.json"
        path.write_text(json.dumps(row, indent=1) + "\n")


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {os.cpu_count()} processors"


def _has_nccl() -> bool:
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


def _driver() -> str:
    path = Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.exists() else ""


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
