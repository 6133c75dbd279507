"""Measures one rank's host, GPU, links and folders for ``mcore-train doctor``.

Each function returns plain numbers and words, so that facts of all ranks can be gathered as
JSON and judged in one place (``doctor.CHECKS``). What a host does not have is left out. GPUs
are asked by nvidia-ml-py (``pip install mcore-train[doctor]``) and the kernel's log; rates are
measured with torch. Everything together stays under a minute a host.
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
"""Rows and columns of the matrices that are multiplied."""
MESSAGE_BYTES = {"cuda": 1 << 28, "cpu": 1 << 20}
"""Of a collective and of a message between two ranks."""
WRITTEN_BYTES = 1 << 26
"""Written to the shared folder and synced, to measure its rate."""
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
"""Environment variables that are judged."""
_XID = re.compile(r"NVRM: Xid \(PCI:[0-9a-fA-F]*:?([0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\): (\d+)")


def versions() -> dict[str, str]:
    """Return the versions of packages, libraries, the kernel and glibc."""
    found = {"python": platform.python_version(), "glibc": platform.libc_ver()[1]}
    for name in WHEELS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["cuda"] = torch.version.cuda or ""
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cudnn"] = str(torch.backends.cudnn.version() or "")
    return {name: version for name, version in found.items() if version}


def locked_versions(start: Path) -> dict[str, str]:
    """Return the versions that the next ``uv.lock`` above a folder asks for; empty: none is."""
    for folder in (start, *start.parents):
        if (lock := folder / "uv.lock").is_file():
            packages = tomllib.loads(lock.read_text())["package"]
            named = [(p["name"], p["version"]) for p in packages if p["name"] in WHEELS]
            # A package with several versions depends on the Python; none of them is checked.
            alone = {name for name, _ in named if sum(n == name for n, _ in named) == 1}
            return {name: version for name, version in named if name in alone}
    return {}


def source_digest(folder: Path) -> str:
    """Hash names and sizes of a package's files: editable installs have no version."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
    return digest.hexdigest()[:12]


def environment() -> dict[str, str]:
    """Return the environment variables that are judged."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def gpu(index: int, nvml: Any) -> dict[str, Any]:
    """Ask NVML about one GPU.

    Args:
        index: as CUDA counts, which NVML shares unless CUDA_VISIBLE_DEVICES selects some.
        nvml: the module ``pynvml``, initialized.
    """
    handle = nvml.nvmlDeviceGetHandleByIndex(_physical(index))
    questions: dict[str, Callable[[], Any]] = {
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
    found = {}
    for name, ask in questions.items():
        with suppress(nvml.NVMLError):  # not every GPU answers every question
            found[name] = ask()
    return found


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
    return [(found[1].lower(), int(found[2])) for found in _XID.finditer(log)]


def kernel_log() -> str:
    """Return the kernel's ring buffer; empty where this user may not read it."""
    text = b""
    with suppress(OSError):
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while part := os.read(descriptor, 1 << 16):
                text += part
        except BlockingIOError:  # all of it was read
            pass
        finally:
            os.close(descriptor)
    return text.decode(errors="replace")


def gemm_tflops(device: torch.device, side: int = 0) -> float:
    """Return the rate of a square matrix multiplication, in bf16 on a GPU, else in float32.

    Args:
        device: where to multiply.
        side: of the matrices; 0: ``GEMM_SIDE``, large enough for the device's full rate.
    """
    side = side or GEMM_SIDE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(side, side, device=device, dtype=dtype)
    y = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / _seconds(lambda: x @ y, device) / 1e12


def bus_gbs(axis: Axis, device: torch.device) -> float:
    """Return the bus bandwidth of an all-reduce over an axis in GB/s; its ranks call together.

    The bytes of an all-reduce count 2 (n - 1) / n times, as in nccl-tests.
    """
    x = torch.zeros(MESSAGE_BYTES[device.type] // 4, device=device)
    time_s = _seconds(lambda: dist.all_reduce(x, group=axis.group), device)
    return x.nbytes * 2 * (axis.size - 1) / axis.size / time_s / 1e9


def pair_gbs(ctx: ParallelContext, distance: int, num_bytes: int = 0) -> float | None:
    """Return the rate between this rank and the one at a distance, in GB/s, both ways at once.

    Args:
        ctx: whose world is cut into pairs; all ranks call together.
        distance: between the two ranks of a pair; 1: neighbours on a host.
        num_bytes: of a message; 0: ``MESSAGE_BYTES``.

    Returns:
        The sum of both directions over two; None for a rank without a partner.
    """
    rank, device = ctx.world.rank, ctx.device
    peer = rank + distance if (rank // distance) % 2 == 0 else rank - distance
    if not 0 <= peer < ctx.world.size:
        return None
    ones = torch.ones((num_bytes or MESSAGE_BYTES[device.type]) // 4, device=device)
    into = torch.empty_like(ones)
    group = ctx.world.group

    def exchange() -> None:
        ops = [
            dist.P2POp(dist.isend, ones, peer, group=group),
            dist.P2POp(dist.irecv, into, peer, group=group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return ones.nbytes / _seconds(exchange, device) / 1e9


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of some repetitions, after two that warm up."""
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
    """Return how this host's and the master's names resolve."""
    found: dict[str, Any] = {"host": socket.gethostname()}
    # Slurm may run several hosts of a job on one machine, each of a name of its own.
    found["host"] = os.environ.get("SLURMD_NODENAME") or found["host"]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.is_file():
        found["machine"] = boot.read_text().strip()
    for key, name in (("own_address", socket.gethostname()), ("master_address", master)):
        if name:
            try:
                found[key] = socket.getaddrinfo(name, None)[0][4][0]
            except OSError as error:
                found[key] = f"error: {error}"
    return found


def can_listen() -> str:
    """Return why no TCP port can be opened on this host; empty: one can."""
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
    """Measure a folder that all hosts must share: rights, lock, rate and free space.

    Args:
        path: of the folder; made if it is missing.
        token: the same on all ranks; ``is_writer`` leaves a file of this name there, which
            ``sees_token`` looks for afterwards.
        is_writer: measure the rate too, and leave the file.
    """
    found: dict[str, Any] = {"path": path, "error": ""}
    place = Path(path)
    try:
        place.mkdir(parents=True, exist_ok=True)
        found["free_gib"] = shutil.disk_usage(place).free / 2**30
        found["kind"] = file_system(place)
        if is_writer:
            with FileLock(place / f"{token}.lock"):
                found["has_lock"] = True
            found |= _write_rate(place / f"{token}.rate")
            (place / token).write_text(token)
    except (OSError, RuntimeError) as error:
        found["error"] = str(error)
    return found


def sees_token(path: str, token: str) -> bool:
    """Whether the file that another host left in a folder is here too."""
    for _ in range(20):  # a network file system may show it a moment later
        if (Path(path) / token).is_file():
            return True
        with suppress(OSError):
            os.listdir(path)  # asks the server again
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
    """Return the kind of file system that holds a path, such as ext4, nfs4 or lustre."""
    whole, best, kind = str(path.resolve()), "", ""
    with suppress(OSError):
        for line in Path(mounts).read_text().splitlines():
            _, point, name, *_ = line.split()
            inside = whole == point or whole.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, name
    return kind


def clock_offset_s(ctx: ParallelContext, rounds: int = 5) -> float:
    """Return how far this host's clock is ahead of rank 0's; all ranks call together.

    All ranks leave a barrier nearly together and read their clocks; the median of some rounds
    is off by the barrier's latency.
    """
    offsets = []
    for _ in range(rounds if ctx.world.size > 1 else 0):
        dist.barrier(group=ctx.world.group)
        own = time.time()
        first = torch.tensor([own], dtype=torch.float64, device=ctx.device)
        dist.broadcast(first, 0, group=ctx.world.group)
        offsets.append(own - first.item())
    return sorted(offsets)[len(offsets) // 2] if offsets else 0.0
