"""The comparison of a job's hosts before ranks start, over the folder of its logs.

Each host measures itself (``doctor.measure_host``), writes the facts below the attempt's log
folder and waits until those of all hosts are there. Then every host judges them by the rows of
``doctor``'s table that need no ranks, so that all hosts end with the same message. Nothing but
the shared folder is needed.
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
"""Below the attempt's log folder: one file a host."""
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
"""Rows of ``doctor.CHECKS`` that one process a host can answer."""
PACE_S = 0.1


def check_hosts(logs: str, num_ranks: int, has_gpus: bool, save: str, timeout_s: float) -> None:
    """Compare this host with the others of its job; all hosts call it together.

    Args:
        logs: the attempt's log folder.
        num_ranks: ranks that each host is to start.
        has_gpus: whether each rank needs a GPU.
        save: run folder that all hosts write to; empty: none.
        timeout_s: to wait for the other hosts.

    Raises:
        OptionsError: (a ValueError) on all hosts, with every fault and what to do about it.
    """
    num_hosts, rank = _host_place()
    if save and is_store(as_path(save)):
        save = ""
    folder = Path(logs) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if rank:  # the first host leaves its mark in the shared folders before it writes
        _wait_for_hosts(folder, [0], num_hosts, timeout_s)
    facts: Facts = {
        **measure_host("cuda" if has_gpus else "cpu"),
        "num_ranks": num_ranks,
        "gpus": [ask_nvml(index) for index in range(num_ranks)] if has_gpus else [],
        "folders": _measure_folders([save, logs], is_writer=rank == 0),
        "xids": probes.xids(probes.kernel_log()) if has_gpus else [],
    }
    own_file = folder / f"host-{rank}.json"
    host = facts["names"]["host"]
    other = json.loads(own_file.read_text())["names"]["host"] if own_file.exists() else host
    if other != host:
        raise OptionsError(
            [f"hosts {other} and {host} both have NODE_RANK {rank}: start each once."]
        )
    temporary = folder / f".host-{rank}.{os.getpid()}"
    temporary.write_text(json.dumps(facts))
    temporary.rename(own_file)
    hosts = _wait_for_hosts(folder, range(num_hosts), num_hosts, timeout_s)
    if rank == 0:
        _remove_marks([save, logs])
    options = DoctorOptions(save=save, log_dir=logs, device="cuda" if has_gpus else "cpu")
    results = judge(of_ranks(hosts), DoctorConfig(options=options), CHECKS)
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


def of_ranks(hosts: Sequence[Facts]) -> list[Facts]:
    """Repeat the facts of each host for each of the ranks that it is to start."""
    ranks: list[Facts] = []
    for host in hosts:
        for local_rank in range(host["num_ranks"]):
            gpu = {"gpu": host["gpus"][local_rank]} if host["gpus"] else {}
            ranks.append({**host, **gpu, "rank": len(ranks), "local_rank": local_rank})
    return ranks


def _host_place() -> tuple[int, int]:
    """Return the number of hosts and this host's rank among them, from the environment."""
    numbers = []
    for name in ("NNODES", "NODE_RANK"):
        if not os.environ.get(name, "").isdecimal():
            raise ValueError(f"the environment does not set {name}: the host script needs it.")
        numbers.append(int(os.environ[name]))
    num_hosts, rank = numbers
    if rank >= num_hosts:
        raise ValueError(f"NODE_RANK={rank} is not within NNODES={num_hosts}.")
    return num_hosts, rank


def _mark(path: str) -> str:
    """Name the file by which hosts see that a folder is one folder."""
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
    """Read the facts of some hosts once they are there."""
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
