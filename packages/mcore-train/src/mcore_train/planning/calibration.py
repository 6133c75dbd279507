"""Measures a host's constants for ``mcore-train plan --calibrate FILE`` in about a minute.

One process measures its GPU; ``torchrun --nproc-per-node N -m mcore_train plan --calibrate
FILE`` measures collectives too. On a CPU the same code runs at tiny sizes, to try the command:
the constants are then a CPU's.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mcore_parallel.launch import launcher
from mcore_train.planning.system import (
    CUDNN_ATTENTION,
    SYSTEMS,
    System,
    system_of_device,
    write_system,
)

SECONDS = 4.0
"""Seconds of load on a GPU before a rate is measured, so that the GPU runs at its power
limit."""


def calibrate(file: Path) -> str:
    """Measure this host, write ``file`` on the first rank, and return the constants as text.

    All ranks of the host call it together; the text is empty on the others.
    """
    device = launcher.initialize("auto")
    try:
        base, system = measure(device)
    finally:
        launcher.shut_down()
    text = write_system(system, base)
    if launcher.read_environment().rank:
        return ""
    file.write_text(text, encoding="utf-8")
    return f"{file}: constants of {system.name}\n\n{text}"


def measure(device: torch.device) -> tuple[str, System]:
    """Measure rates and bandwidths of a device, and of collectives over the world.

    Returns:
        The name of the shipped constants nearest to the device, and the measured constants.
    """
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "cpu"
    base = (system_of_device(name) or SYSTEMS["h200"]).name
    size, length = (8192, 8192) if is_gpu else (256, 128)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    gemm_s = _gemm_s(device, dtype, size, SECONDS if is_gpu else 0.05)
    burst_s = _gemm_s(device, dtype, size, 0.0)
    gemm = 2 * size**3 / 1e12
    attention_s = _attention_s(device, dtype, length)
    measured = {
        "name": name.replace('"', ""),
        "source": f"measured by mcore-train plan --calibrate, torch {torch.__version__}",
        "gemm_tflops": gemm / gemm_s,
        "burst_tflops": max(gemm / burst_s, gemm / gemm_s),
        "memory_gb_s": _copy_gb_s(device, (1 << 30) if is_gpu else (1 << 22)),
        # 8 heads of 128 channels, causal, forward and backward; the ramp is the base's. A
        # system's rate is flash-attn-4's, and torch's kernel was timed.
        "attention_tflops": 7 * 8 * length**2 / 2 * 256 / attention_s / 1e12
        * (length + SYSTEMS[base].attention_ramp_tokens) / length / CUDNN_ATTENTION,
    }  # fmt: skip
    if is_gpu:
        measured["memory_gib"] = int(torch.cuda.mem_get_info(device)[1] / 2**30)
        measured["host_gb_s"] = _host_gb_s(device)
    if dist.is_initialized() and dist.get_world_size(dist.group.WORLD) > 1:
        measured |= _links(device, (1 << 28) if is_gpu else (1 << 16))
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in measured.items()}
    return base, replace(SYSTEMS[base], **rounded)  # pyrefly: ignore


def _median_s(function: Callable[[], object], device: torch.device, warm_s: float) -> float:
    """Return the median seconds of ten calls, after ``warm_s`` seconds of load."""
    begin = time.monotonic()
    function()
    while time.monotonic() - begin < warm_s:
        function()
        _wait(device)
    _wait(device)
    times = []
    for _ in range(10):
        start = time.monotonic()
        function()
        _wait(device)
        times.append(time.monotonic() - start)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gemm_s(device: torch.device, dtype: torch.dtype, size: int, warm_s: float) -> float:
    """Return the seconds of a square GEMM; with ``warm_s`` 0, on a cool GPU at full clock."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    if not warm_s and device.type == "cuda":
        time.sleep(2.0)
    return _median_s(lambda: a @ b, device, warm_s)


def _attention_s(device: torch.device, dtype: torch.dtype, length: int) -> float:
    shape = (1, 8, length, 128)
    q, k, v = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )

    def forward_and_backward() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    return _median_s(forward_and_backward, device, 1.0 if device.type == "cuda" else 0.0)


def _copy_gb_s(device: torch.device, num_bytes: int) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _median_s(lambda: target.copy_(source), device, 0.1) / 1e9


def _host_gb_s(device: torch.device) -> float:
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    return (1 << 28) / _median_s(lambda: on_device.copy_(host), device, 0.1) / 1e9


def _links(device: torch.device, num_bytes: int) -> dict[str, float]:
    """Fit latency and bandwidth of an all-gather over all ranks to two sizes."""
    world = dist.get_world_size(dist.group.WORLD)

    def seconds(size: int) -> float:
        part = torch.empty(size // world, dtype=torch.uint8, device=device)
        whole = torch.empty(size // world * world, dtype=torch.uint8, device=device)

        def gather() -> None:
            dist.all_gather_into_tensor(whole, part, group=dist.group.WORLD)

        for _ in range(20):  # a count, not a time: all ranks must gather equally often
            gather()
        return _median_s(gather, device, 0.0)

    # Each rank receives all parts but its own: seconds = latency + share * size / rate.
    share = (world - 1) / world
    small, large = num_bytes // 16, num_bytes
    few_s, many_s = seconds(small), seconds(large)
    rate = share * (large - small) / max(1e-9, many_s - few_s)
    latency = max(0.0, few_s - share * small / rate)
    return {"link_gb_s": rate / 1e9, "link_latency_us": 1e6 * latency}
