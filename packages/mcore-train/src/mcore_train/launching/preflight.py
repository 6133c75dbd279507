"""Compares the hosts of a job before ranks start, through the shared folder of its logs.

Each host measures itself (``doctor.measure_host``), writes its facts to the attempt's log
folder and waits for the facts of all other hosts. Then every host checks all facts with the
rows of ``doctor``'s table that need no ranks, so all hosts end with the same message.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mcore_base.options import OptionsError
from mcore_base.stores import as_path, is_store
from mcore_train.diagnosis import probes
from mcore_train.diagnosis.doctor import (
    DoctorConfig,
    DoctorOptions,
    Facts,
    ask_nvml,
    judge,
    measure_host,
)

log = logging.getLogger(__name__)

FOLDER = "preflight"
"""Folder in the attempt's log folder, with one file for each host."""
CHECKS = (
    "version pairs",
    "same versions",
    "uv sync",
    "container torch",
    "same program",
    "same source",
    "same folder",
    "one worker group",
    "ranks of a host",
    "GPUs of a host",
    "ECC",
    "memory rows",
    "Xid",
    "free GPU",
    "NVLink",
    "InfiniBand",
    "folder",
    "shared folder",
    "rate of the folder",
    "log folder",
    "/dev/shm",
    "ports",
    "names",
)
"""Rows of ``doctor.CHECKS`` that need only one process per host."""
PACE_S = 0.1


def check_hosts(logs: str, num_ranks: int, has_gpus: bool, save: str, timeout_s: float) -> None:
    """Compare this host with the other hosts of its job; all hosts call this at the same time.

    Args:
        logs: the attempt's log folder.
        num_ranks: number of ranks that each host starts.
        has_gpus: whether each rank needs a GPU.
        save: run folder that all hosts write to; empty: none.
        timeout_s: time to wait for the other hosts.

    Raises:
        OptionsError: (a ValueError) on all hosts, with every problem and its remedy.
    """
    num_hosts, rank = _host_rank()
    if save and is_store(as_path(save)):
        save = ""
    folder = Path(logs) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if rank:  # the first host writes its mark to the shared folders before its facts
        _wait_for_hosts(folder, [0], num_hosts, timeout_s)
    facts: Facts = {
        **measure_host("cuda" if has_gpus else "cpu"),
        "num_ranks": num_ranks,
        "gpus": [ask_nvml(index) for index in range(num_ranks)] if has_gpus else [],
        "folders": _measure_folders([save, logs], is_writer=rank == 0),
        "xids": probes.xids(probes.kernel_log()) if has_gpus else [],
    }
    file = folder / f"host-{rank}.json"
    host = facts["names"]["host"]
    other = json.loads(file.read_text())["names"]["host"] if file.exists() else host
    if other != host:
        raise OptionsError(
            [f"hosts {other} and {host} both have NODE_RANK {rank}: give each host its own."]
        )
    temporary = folder / f".host-{rank}.{os.getpid()}"
    temporary.write_text(json.dumps(facts))
    temporary.rename(file)
    hosts = _wait_for_hosts(folder, range(num_hosts), num_hosts, timeout_s)
    if rank == 0:
        _remove_marks([save, logs])
    options = DoctorOptions(save=save, log_dir=logs, device="cuda" if has_gpus else "cpu")
    results = judge(facts_of_ranks(hosts), DoctorConfig(options=options), CHECKS)
    lines = []
    for result in results:
        for problem in result.problems:
            advice = problem.advice or result.check.advice
            line = f"{result.check.name}: {problem.where}: {problem.value}. {advice}".strip()
            if result.check.is_warning:
                log.warning("%s", line)
            else:
                lines.append(line)
    if lines:
        raise OptionsError(lines)


def facts_of_ranks(hosts: Sequence[Facts]) -> list[Facts]:
    """Return the facts of each rank: those of its host, with its own GPU and rank numbers."""
    ranks: list[Facts] = []
    for host in hosts:
        for local_rank in range(host["num_ranks"]):
            gpu = {"gpu": host["gpus"][local_rank]} if host["gpus"] else {}
            ranks.append({**host, **gpu, "rank": len(ranks), "local_rank": local_rank})
    return ranks


def _host_rank() -> tuple[int, int]:
    """Return the number of hosts and this host's rank, from the environment."""
    numbers = []
    for name in ("NNODES", "NODE_RANK"):
        if not os.environ.get(name, "").isdecimal():
            raise ValueError(
                f"{name} is not set in the environment: run preflight from the host script, "
                "which sets it."
            )
        numbers.append(int(os.environ[name]))
    num_hosts, rank = numbers
    if rank >= num_hosts:
        raise ValueError(f"NODE_RANK={rank} must be below NNODES={num_hosts}.")
    return num_hosts, rank


def _mark(path: str) -> str:
    """Return the name of the file that shows whether hosts share a folder."""
    return f"preflight-{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def _measure_folders(paths: Sequence[str], *, is_writer: bool) -> list[dict[str, Any]]:
    folders = []
    for path in filter(None, paths):
        measured = probes.folder(path, _mark(path), is_writer=is_writer)
        if not measured["error"]:
            measured["is_shared"] = probes.sees_token(path, _mark(path))
        folders.append(measured)
    return folders


def _remove_marks(paths: Sequence[str]) -> None:
    for path in filter(None, paths):
        for name in (_mark(path), f"{_mark(path)}.lock"):
            (Path(path) / name).unlink(missing_ok=True)


def _wait_for_hosts(
    folder: Path,
    ranks: Sequence[int],
    num_hosts: int,
    timeout_s: float,
    now: Callable[[], float] = time.monotonic,
) -> list[Facts]:
    """Wait for the facts of some hosts; return them in the order of ``ranks``."""
    deadline = now() + timeout_s
    files = {rank: folder / f"host-{rank}.json" for rank in ranks}
    while missing := [rank for rank, file in files.items() if not file.exists()]:
        if now() > deadline:
            raise ValueError(
                f"{len(missing)} of {num_hosts} hosts (NODE_RANK "
                f"{', '.join(map(str, missing[:8]))}) wrote nothing to {folder} within "
                f"{timeout_s:g} s: they did not start, or --log-dir is not on storage that all "
                "hosts share."
            )
        time.sleep(PACE_S)
    return [json.loads(file.read_text()) for file in files.values()]
