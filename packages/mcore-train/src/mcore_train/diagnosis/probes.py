"""Measures one rank's host, GPU, links and folders for ``mcore-train doctor``.

Each function returns JSON types, so that the facts of all ranks can be gathered and checked in
one place (``doctor.CHECKS``). Facts that a host does not have are left out. Facts about GPUs
come from nvidia-ml-py (``pip install mcore-train[doctor]``) and the kernel's log; rates are
measured with torch. All measurements together take less than a minute.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_base.file_lock import FileLock
from mcore_parallel.mesh import Axis, ParallelContext

GEMM_SIDE = {"cuda": 8192, "cpu": 512}
"""Rows and columns of the multiplied matrices."""
MESSAGE_BYTES = {"cuda": 1 << 28, "cpu": 1 << 20}
"""Bytes of a collective, and of a message between two ranks."""
WRITTEN_BYTES = 1 << 26
"""Bytes that are written to the shared folder to measure its rate."""
REPEATS = 5
WHEELS = (
    "mcore-base",
    "mcore-parallel",
    "mcore-moe",
    "mcore-models",
    "mcore-data",
    "mcore-ckpt",
    "mcore-infer",
    "mcore-train",
    "torch",
    "triton",
    "numpy",
    "transformer-engine",
    "flash-attn",
    "nvidia-resiliency-ext",
    "megatron-core",
    "vllm",
)
"""Packages whose versions are compared."""
VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVIDIA_PYTORCH_VERSION",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NNODES",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
)
"""Environment variables that are checked."""
_XID = re.compile(r"NVRM: Xid \(PCI:[0-9a-fA-F]*:?([0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\): (\d+)")


def versions() -> dict[str, str]:
    """Return the versions of packages, libraries, the kernel and glibc."""
    installed = {"python": platform.python_version(), "glibc": platform.libc_ver()[1]}
    for name in WHEELS:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    installed["cuda"] = torch.version.cuda or ""
    if torch.cuda.is_available():
        installed["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        installed["cudnn"] = str(torch.backends.cudnn.version() or "")
    return {name: version for name, version in installed.items() if version}


def locked_versions(start: Path) -> dict[str, str]:
    """Return the versions in the nearest ``uv.lock`` above a folder; empty without a lock."""
    for folder in (start, *start.parents):
        if (lock := folder / "uv.lock").is_file():
            packages = tomllib.loads(lock.read_text())["package"]
            locked = [(p["name"], p["version"]) for p in packages if p["name"] in WHEELS]
            # Packages with several versions, by the version of Python, are not checked.
            unique = {name for name, _ in locked if sum(n == name for n, _ in locked) == 1}
            return {name: version for name, version in locked if name in unique}
    return {}


def source_digest(folder: Path) -> str:
    """Return a hash of names and sizes of a package's files, for editable installs."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
    return digest.hexdigest()[:12]


def environment() -> dict[str, str]:
    """Return the environment variables that are checked."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def gpu(index: int, nvml: Any) -> dict[str, Any]:
    """Return NVML's values of one GPU.

    Args:
        index: CUDA's index of the GPU; mapped to NVML's index by CUDA_VISIBLE_DEVICES.
        nvml: the module ``pynvml``, initialized.
    """
    handle = nvml.nvmlDeviceGetHandleByIndex(_physical(index))
    queries: dict[str, Callable[[], Any]] = {
        "name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
        "bus": lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        "driver": lambda: _text(nvml.nvmlSystemGetDriverVersion()),
        "max_sm_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "throttle": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
            handle, nvml.NVML_TEMPERATURE_GPU
        ),
        "power_limit_w": lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000,
        "default_power_w": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000,
        "ecc_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "remapped_rows": lambda: list(nvml.nvmlDeviceGetRemappedRows(handle)),
        "used_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30,
        "nvlinks": lambda: [
            bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
            for link in range(nvml.NVML_NVLINK_MAX_LINKS)
            if _has_link(nvml, handle, link)
        ],
    }
    values = {}
    for name, query in queries.items():
        with suppress(nvml.NVMLError):  # not every GPU supports every query
            values[name] = query()
    return values


def _physical(index: int) -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = visible.split(",") if visible else []
    is_numbered = bool(numbers) and all(number.strip().isdecimal() for number in numbers)
    return int(numbers[index]) if is_numbered and index < len(numbers) else index


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _has_link(nvml: Any, handle: Any, link: int) -> bool:
    try:
        nvml.nvmlDeviceGetNvLinkState(handle, link)
    except nvml.NVMLError:
        return False
    return True


def xids(log: str) -> list[tuple[str, int]]:
    """Return bus and number of the Xid messages in a kernel's log."""
    return [(match[1].lower(), int(match[2])) for match in _XID.finditer(log)]


def kernel_log() -> str:
    """Return the kernel's ring buffer; "" if this user may not read it."""
    text = b""
    with suppress(OSError):
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while part := os.read(descriptor, 1 << 16):
                text += part
        except BlockingIOError:  # the end of the buffer
            pass
        finally:
            os.close(descriptor)
    return text.decode(errors="replace")


def gemm_tflops(device: torch.device, side: int = 0) -> float:
    """Return the rate of a square matrix multiplication, in bf16 on a GPU, else in float32.

    Args:
        device: device of the matrices.
        side: rows and columns; 0: ``GEMM_SIDE``, large enough for the device's full rate.
    """
    side = side or GEMM_SIDE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(side, side, device=device, dtype=dtype)
    y = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / _seconds(lambda: x @ y, device) / 1e12


def bus_gbs(axis: Axis, device: torch.device) -> float:
    """Return the bus bandwidth of an all-reduce over an axis, in GB/s; collective.

    The bytes of the tensor count 2 (n - 1) / n times, as in nccl-tests.
    """
    x = torch.zeros(MESSAGE_BYTES[device.type] // 4, device=device)
    time_s = _seconds(lambda: dist.all_reduce(x, group=axis.group), device)
    return x.nbytes * 2 * (axis.size - 1) / axis.size / time_s / 1e9


def pair_gbs(ctx: ParallelContext, distance: int, num_bytes: int = 0) -> float | None:
    """Return the rate of a simultaneous exchange with another rank, in GB/s; collective.

    Args:
        ctx: axes of all ranks, which are divided into pairs.
        distance: difference of the two ranks of a pair; 1: neighbours on a host.
        num_bytes: bytes of a message; 0: ``MESSAGE_BYTES``.

    Returns:
        Mean rate of both directions; None for a rank without a partner.
    """
    rank, device = ctx.world.rank, ctx.device
    peer = rank + distance if (rank // distance) % 2 == 0 else rank - distance
    if not 0 <= peer < ctx.world.size:
        return None
    sent = torch.ones((num_bytes or MESSAGE_BYTES[device.type]) // 4, device=device)
    received = torch.empty_like(sent)
    group = ctx.world.group

    def exchange() -> None:
        ops = [
            dist.P2POp(dist.isend, sent, peer, group=group),
            dist.P2POp(dist.irecv, received, peer, group=group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return sent.nbytes / _seconds(exchange, device) / 1e9


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of ``REPEATS`` calls, after two warm-up calls."""
    times = []
    for number in range(REPEATS + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            times.append(time.perf_counter() - began)
    return min(times)


def infiniband(root: Path = Path("/sys/class/infiniband")) -> list[dict[str, Any]]:
    """Return name, state and rate in Gb/s of the InfiniBand and RoCE ports of this host."""
    ports = []
    for port in sorted(root.glob("*/ports/*")):
        texts = {
            name: (port / name).read_text().strip()
            for name in ("state", "phys_state", "rate")
            if (port / name).is_file()
        }
        rate = re.match(r"([\d.]+) Gb", texts.get("rate", ""))
        ports.append(
            {
                "port": f"{port.parts[-3]}:{port.name}",
                "is_active": "ACTIVE" in texts.get("state", ""),
                "is_up": "LinkUp" in texts.get("phys_state", "LinkUp"),
                "gbps": float(rate[1]) if rate else 0.0,
            }
        )
    return ports


def names(master: str) -> dict[str, Any]:
    """Return this host's name, and the addresses of this host and of ``master``."""
    # Slurm may simulate several nodes on one machine, each with its own name.
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    values: dict[str, Any] = {"host": host}
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.is_file():
        values["machine"] = boot.read_text().strip()
    for key, name in (("own_address", socket.gethostname()), ("master_address", master)):
        if name:
            try:
                values[key] = socket.getaddrinfo(name, None)[0][4][0]
            except OSError as error:
                values[key] = f"error: {error}"
    return values


def can_listen() -> str:
    """Open a TCP port; return the error, or "" if it succeeds."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("", 0))
            listener.listen()
    except OSError as error:
        return str(error)
    return ""


def shared_memory() -> dict[str, float]:
    """Return size and free space of the file system for shared memory, in GiB."""
    if not Path("/dev/shm").is_dir():
        return {"size_gib": 0.0, "free_gib": 0.0}
    usage = shutil.disk_usage("/dev/shm")
    return {"size_gib": usage.total / 2**30, "free_gib": usage.free / 2**30}


def folder(path: str, token: str, *, is_writer: bool) -> dict[str, Any]:
    """Measure a folder that all hosts must share: permissions, lock, rate and free space.

    Args:
        path: the folder, which is created if it does not exist.
        token: name of a file, equal on all ranks. The writer creates the file, and
            ``sees_token`` looks for it on the other ranks.
        is_writer: whether to measure the rate and to create the file.
    """
    facts: dict[str, Any] = {"path": path, "error": ""}
    root = Path(path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        facts["free_gib"] = shutil.disk_usage(root).free / 2**30
        facts["kind"] = file_system(root)
        if is_writer:
            with FileLock(root / f"{token}.lock"):
                facts["has_lock"] = True
            facts |= _write_rate(root / f"{token}.rate")
            (root / token).write_text(token)
    except (OSError, RuntimeError) as error:
        facts["error"] = str(error)
    return facts


def sees_token(path: str, token: str) -> bool:
    """Whether the file that another host created in a folder is visible on this host."""
    for _ in range(20):  # a network file system may show the file with a delay
        if (Path(path) / token).is_file():
            return True
        with suppress(OSError):
            os.listdir(path)  # refreshes the client's cache
        time.sleep(0.1)
    return False


def _write_rate(path: Path) -> dict[str, float]:
    content = os.urandom(1 << 20) * (WRITTEN_BYTES >> 20)
    try:
        began = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
        time_s = time.perf_counter() - began
        began = time.perf_counter()
        with path.open("r+b", buffering=0) as file:
            for _ in range(5):
                file.write(b"x")
                os.fsync(file.fileno())
        return {
            "write_mbs": WRITTEN_BYTES / time_s / 1e6,
            "fsync_ms": (time.perf_counter() - began) * 200,
        }
    finally:
        path.unlink(missing_ok=True)


def file_system(path: Path, mounts: str = "/proc/mounts") -> str:
    """Return the type of the file system of a path, such as ext4, nfs4 or lustre."""
    resolved, longest, kind = str(path.resolve()), "", ""
    with suppress(OSError):
        for line in Path(mounts).read_text().splitlines():
            _, point, name, *_ = line.split()
            is_inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
            if is_inside and len(point) >= len(longest):
                longest, kind = point, name
    return kind


def clock_offset_s(ctx: ParallelContext, rounds: int = 5) -> float:
    """Return the difference of this host's clock to rank 0's, in seconds; collective.

    All ranks read their clocks after a barrier, so the error of the median over some rounds is
    about the barrier's latency.
    """
    offsets = []
    for _ in range(rounds if ctx.world.size > 1 else 0):
        dist.barrier(group=ctx.world.group)
        now = time.time()
        first = torch.tensor([now], dtype=torch.float64, device=ctx.device)
        dist.broadcast(first, 0, group=ctx.world.group)
        offsets.append(now - first.item())
    return sorted(offsets)[len(offsets) // 2] if offsets else 0.0
