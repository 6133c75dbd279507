"""Reads the launcher's environment, joins the world, or starts ranks on this host.

The only module that reads or writes the process environment. A program runs unchanged under
``torchrun`` (or any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT) and as a single process, which needs no process group.
"""

import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from mcore_base.entry_point import LAUNCHER

log = logging.getLogger(__name__)

FLIGHT_RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    # torch waits four times this long between a timeout and the end of the process (by default
    # that is a minute).
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000",
}
"""Environment variables of torch's flight recorder: each rank records its last collectives, and
nccl writes them to a file on a timeout."""
KERNEL_CACHES = {
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attn-4",
    "QUACK_CACHE_DIR": "quack",
}
"""Environment variables with the folders of compiled CuTe kernels, and the folders' names."""
FLIGHT_RECORDER_FILE = "TORCH_FR_DUMP_TEMP_FILE"
"""Torch's environment variable with the path of the flight recorder's files, without the rank's
number at the end."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun's agent sets for its ranks."""
REPEATED_S = 1.0
"""A second SIGINT within this time is ignored: a terminal may signal process and group."""
CUBLAS_WORKSPACES = (":4096:8", ":16:8")
"""Workspace settings under which cuBLAS gives the same bits in every run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """This process's rank and world size, from the launcher's environment variables."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """Number of ranks on this host."""
    is_launched: bool = False
    """Whether a launcher set the variables; false if plain ``python`` started the process."""
    launcher_pid: int = 0
    """Process id of the ``launch_local`` or torchrun agent that started the rank; 0: none."""


def read_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Read torchrun's variables from the environment.

    Raises:
        ValueError: if variables are missing or not valid.
    """
    env = os.environ if environ is None else environ
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    present = [name for name in names if name in env]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return RankEnvironment()
    if len(present) < len(names):
        missing = sorted(set(names) - set(present))
        raise ValueError(
            f"the environment sets {present} but not {missing}: start with torchrun, which "
            "sets all of them, or unset them to run one process."
        )
    rank, world_size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is not within WORLD_SIZE={world_size}.")
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank,
        local_world_size=(
            _integer(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world_size
        ),
        is_launched=True,
        launcher_pid=_launcher_pid(env),
    )


def _launcher_pid(env: Mapping[str, str]) -> int:
    """Return the process id of ``launch_local``, or of torchrun's agent (the parent)."""
    if LAUNCHER in env:
        return _integer(env, LAUNCHER)
    return os.getppid() if TORCHRUN in env else 0


def _integer(env: Mapping[str, str], name: str) -> int:
    if not env[name].isdecimal():
        raise ValueError(f"the environment sets {name}={env[name]!r}: it must be an integer.")
    return int(env[name])


def master_address() -> tuple[str, int]:
    """Return the host and port of the store through which ranks join the world."""
    return os.environ["MASTER_ADDR"], _integer(os.environ, "MASTER_PORT")


def has_agent_store() -> bool:
    """Whether torchrun's agent, not rank 0, serves the store at MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_count() -> int:
    """Return how often torchrun's agent has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def initialize(
    device_type: str = "auto", timeout_minutes: float = 10.0, store: dist.Store | None = None
) -> torch.device:
    """Join the world that the launcher describes and return this rank's device.

    Collectives use nccl on CUDA (and gloo for host tensors) and gloo on the CPU. Without a
    launcher there is no world to join. The first call returns once all ranks have joined; later
    calls return the same device. Afterwards a rank that ``launch_local`` or torchrun started
    exits when that launcher process is gone, since a launcher ended by SIGKILL cannot end its
    ranks.

    Args:
        device_type: ``cuda``, ``cpu``, or ``auto``: CUDA if present, else the CPU.
        timeout_minutes: minutes after which an unfinished collective ends the job.
        store: store through which ranks join; None: the store at MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: if ``cuda`` is requested and absent, or the host has fewer GPUs than ranks.
    """
    env = read_environment()
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        count = torch.cuda.device_count()
        if env.local_rank >= count:
            fewer = f"Start at most {count} ranks a host, or use" if count else "Use"
            raise ValueError(
                f"local rank {env.local_rank} has no GPU: this host shows {count}. {fewer} "
                "--device cpu."
            )
        device = torch.device("cuda", env.local_rank)
        torch.cuda.set_device(device)
        prepare_kernel_packages()
    else:
        device = torch.device("cpu")
    if env.is_launched and not dist.is_initialized():
        if env.launcher_pid:
            arguments = (env.launcher_pid, env.rank)
            threading.Thread(
                target=_exit_with_launcher, args=arguments, name="launcher", daemon=True
            ).start()
        # On a timeout nccl's own watchdog writes which collectives each rank began.
        for name, value in FLIGHT_RECORDER.items():
            os.environ.setdefault(name, value)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(minutes=timeout_minutes),
            device_id=device if device.type == "cuda" else None,
            store=store,
            rank=env.rank if store is not None else -1,  # -1: from the environment
            world_size=env.world_size if store is not None else -1,
        )
        wait_for_all()
    return device


def prepare_kernel_packages() -> None:
    """Set environment variables of kernel packages, unless the user has set them.

    - CuTe kernels get cache folders, so that a host compiles each kernel once: flash-attn-4
      caches no kernels by default. The packages name cached files by versions and sources, and
      lock them. Their default folder depends on a user name, which a user of a container may
      not have.
    - Transformer Engine does not use flash-attn-4: version 2.20 would prefer it, and attention
      of its call of 4.0.0b36 was zero on an H200 (nvidia-cutlass-dsl 4.8.1).
    """
    os.environ.setdefault("NVTE_FLASH_ATTN_V4", "0")
    folder = Path(tempfile.gettempdir()) / f"mcore-kernels-{os.getuid()}"
    with suppress(OSError):  # without the folder, each process compiles
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid == os.getuid():  # else another user could plant code
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
            for name, package in KERNEL_CACHES.items():
                os.environ.setdefault(name, str(folder / package))


def dump_flight_recorder(rank: int) -> str:
    """Write this rank's last collectives to the path in ``FLIGHT_RECORDER_FILE`` plus rank.

    ``mcore-train triage`` reads these files.

    Returns:
        Path of the file; empty if the variable is not set, or the file cannot be written.
    """
    if not (prefix := os.environ.get(FLIGHT_RECORDER_FILE, "")):
        return ""
    torch_c10d: Any = torch._C._distributed_c10d  # its stub lacks the dumps
    on_gpu = dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    dump = torch_c10d._dump_nccl_trace if on_gpu else torch_c10d._dump_fr_trace
    file = f"{prefix}{rank}"
    try:
        with open(file, "wb") as out:
            out.write(dump())
    except OSError as error:
        log.warning("the flight recorder was not written: %s", error)
        return ""
    return file


def wait_for_all(group: dist.ProcessGroup | None = None) -> None:
    """Return once every rank of a group has called this function (a barrier on the host).

    Call it after making groups: if a rank fails and leaves a gloo group while another rank
    still connects, the other rank reports a lost connection, which hides the first rank's
    error.

    Args:
        group: group with gloo; None: the world.

    Raises:
        RuntimeError: if a rank does not call within the group's timeout.
    """
    dist.all_reduce(torch.zeros(1, device="cpu"), group=group)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Return a context in which runs on equally many devices give the same bits.

    Enter the context before ``initialize``: cuBLAS and NCCL read their settings from the
    environment when they start (fixed workspaces, ring sums); existing settings are not
    changed. torch operations without a deterministic implementation raise.

    Raises:
        ValueError: if the environment sets cuBLAS workspaces that are not deterministic.
    """
    _check_workspaces(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    variables = {"CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACES[0], "NCCL_ALGO": "Ring"}
    added = [name for name in variables if name not in os.environ]
    was_enabled = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic  # its attribute is made at run time
    was_filled = memory.fill_uninitialized_memory
    os.environ.update({name: variables[name] for name in added})
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # would cost a pass over each new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled)
        memory.fill_uninitialized_memory = was_filled
        for name in added:
            del os.environ[name]


def _check_workspaces(setting: str) -> None:
    if setting and setting not in CUBLAS_WORKSPACES:
        raise ValueError(
            f"CUBLAS_WORKSPACE_CONFIG={setting} is not deterministic: unset it, or use "
            f"{' or '.join(CUBLAS_WORKSPACES)}."
        )


def world_size() -> int:
    """Number of ranks of the joined world, or of the launcher's world before joining."""
    if dist.is_initialized():
        return dist.get_world_size()
    return read_environment().world_size


def shut_down() -> None:
    """Leave the world, if this process has joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    """Return a TCP port on which no process listens now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch_local(command: Sequence[str], nproc: int, poll_s: float = 0.1) -> int:
    """Start ``nproc`` ranks of a command on this host, and wait until they end.

    When a rank fails, the others are ended, since they would wait for it. Rank 0 writes to
    this process's standard output, all ranks to its standard error. Any number of SIGTERM and
    SIGINT is forwarded to the ranks as one SIGTERM; then this function waits without limit
    (a run saves before it ends). A second SIGINT more than ``REPEATED_S`` after the first ends
    this process and the ranks. SIGUSR1 and SIGUSR2 (warnings of batch systems) and SIGHUP are
    forwarded unchanged.

    Args:
        command: program and arguments, such as ``[sys.executable, "-m", "mcore_train", ...]``.
        nproc: ranks to start.
        poll_s: seconds between checks of the ranks.

    Returns:
        0 if all ranks succeed, else the exit code of the first rank that failed.

    Raises:
        ValueError: if this process is itself a launched rank, or ``nproc`` is below 1.
    """
    if nproc < 1:
        raise ValueError(f"--nproc {nproc} must be 1 or more.")
    if read_environment().is_launched:
        raise ValueError("--nproc cannot be used under torchrun: leave one of the two out.")
    port = str(free_port())
    share = max(1, num_cores() // nproc)
    threads = os.environ.get("OMP_NUM_THREADS", str(share))
    ranks = []
    for rank in range(nproc):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            LAUNCHER: str(os.getpid()),
            "OMP_NUM_THREADS": threads,
        }
        out = None if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(list(command), env=env, stdout=out))
    try:
        with _forward_signals(ranks):
            return _wait(ranks, poll_s)
    finally:
        _end(ranks)


def is_under_uv_run() -> bool:
    """Whether ``uv run`` started this process, so that printed commands begin with it."""
    return "UV_RUN_RECURSION_DEPTH" in os.environ


def num_cores() -> int:
    """Number of cores that this process may use; on macOS all cores of the host."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def _wait(ranks: list[subprocess.Popen], poll_s: float) -> int:
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [(i, code) for i, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            index, code = failed[0]
            log.error("rank %d %s; ending the others", index, _ending(code))
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(poll_s)


def _ending(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    causes = {
        signal.SIGBUS: " (a memory-mapped file was truncated, or its drive is full)",
        signal.SIGKILL: " (killed from outside, or because the host's memory was full)",
    }
    number = signal.Signals(-code)
    return f"was ended by {number.name}{causes.get(number, '')}"


def _exit_with_launcher(launcher: int, rank: int, poll_s: float = 1.0) -> None:
    """End this process when its launcher process has ended."""
    # If this rank is no child, the launcher has ended, or a process between them started it.
    is_child = os.getppid() == launcher
    while os.getppid() == launcher if is_child else _exists(launcher):
        time.sleep(poll_s)
    log.error("rank %d ends: process %d, which started all ranks, is gone", rank, launcher)
    logging.shutdown()
    os._exit(1)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _forward_signals(ranks: list[subprocess.Popen]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    old_handlers = {}
    received_s: dict[int, float] = {}

    def forward_once(number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if number == signal.SIGINT and now_s - received_s.get(number, now_s) > REPEATED_S:
            signal.signal(number, old_handlers[number])
            signal.raise_signal(number)
        # Ctrl-C has also sent SIGINT to the ranks, and a second SIGINT would end them at once.
        # So any signal is forwarded as SIGTERM, and only the first one.
        if not received_s:
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGTERM)
        received_s.setdefault(number, now_s)

    def forward_unchanged(number: int, _frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        old_handlers[number] = signal.signal(number, forward_once)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            old_handlers[number] = signal.signal(number, forward_unchanged)
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _end(ranks: list[subprocess.Popen], grace_s: float = 10.0) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
