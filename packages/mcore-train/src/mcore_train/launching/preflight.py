"""The rules of a job on several hosts, checked by every host before it starts ranks.

Each host writes its facts to the attempt's log folder and reads those of the others, so that a
log folder which hosts do not share is found too. No collective and no torch: the check takes
as long as the slowest host needs to start Python.
"""

import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from mcore_base.command_line import OptionsError
from mcore_base.stores import as_path, is_store

FOLDER = "preflight"
"""Below the attempt's log folder: one file a host."""
ALIKE = (
    "torch",
    "numpy",
    "triton",
    "nvidia-nccl",
    "transformer-engine",
    "flash-attn",
    "mcore-",
)
"""Beginnings of the packages that must have one version on all hosts."""
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
        OptionsError: (a ValueError) on all hosts, with every difference and what to change.
    """
    faults = [*_own_faults(num_ranks, has_gpus), *_write_faults(save)]
    num_hosts, rank = _host_place()
    facts = {**host_facts(num_ranks), "faults": faults, "save": _folder_id(save)}
    folder = Path(logs) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"host-{rank}.json"
    other = json.loads(own.read_text())["host"] if own.exists() else facts["host"]
    if other != facts["host"]:
        raise OptionsError(
            [f"hosts {other} and {facts['host']} both have NODE_RANK {rank}: start each once."]
        )
    temporary = folder / f".host-{rank}.{os.getpid()}"
    temporary.write_text(json.dumps(facts))
    temporary.rename(own)
    found = _wait_for_hosts(folder, num_hosts, timeout_s)
    if different := [*_all_faults(found), *differences(found)]:
        raise OptionsError(different)


def host_facts(num_ranks: int) -> dict[str, Any]:
    """Collect what all hosts of a job must have in common, and this host's name."""
    return {
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "Python": platform.python_version(),
        "interpreter": sys.executable,
        "folder": str(Path.cwd()),
        "ranks a host": num_ranks,
        "hosts": os.environ.get("NNODES", ""),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", ""),
        "MASTER_PORT": os.environ.get("MASTER_PORT", ""),
        "packages": _package_versions(),
        "source": _source_digest(),
    }


def differences(facts: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return a line for each fact in which hosts differ.

    Args:
        facts: of each host by its rank, as ``host_facts`` gives them.
    """
    first = facts[min(facts)]
    lines = []
    for name in first:
        if name in ("host", "faults", "packages"):
            continue
        lines += _unlike(name, {host["host"]: host[name] for host in facts.values()})
    names = sorted({name for host in facts.values() for name in host["packages"]})
    for name in names:
        versions = {h["host"]: h["packages"].get(name, "none") for h in facts.values()}
        lines += _unlike(name, versions)
    return lines


def _unlike(name: str, by_host: Mapping[str, Any]) -> list[str]:
    """Return one line if hosts have unlike values; the rare values come first."""
    hosts: dict[str, list[str]] = {}
    for host, value in by_host.items():
        hosts.setdefault(str(value), []).append(host)
    if len(hosts) < 2:
        return []
    groups = sorted(hosts.items(), key=lambda group: len(group[1]))
    shown = "; ".join(f"{value} on {_some(names)}" for value, names in groups)
    return [f"{_MEND.get(name, name)}: {shown}."]


_MEND = {
    "source": "the mcore wheels differ in their files, install one build on all hosts",
    "save": "--save is not one folder on all hosts, put it on shared storage",
    "folder": "ranks start in different folders, give --workdir",
    "interpreter": "the interpreters differ, use one path on all hosts",
    "hosts": "NNODES differs, start one job with one worker group",
    "MASTER_ADDR": "hosts would meet at different places (MASTER_ADDR)",
    "MASTER_PORT": "hosts would meet at different places (MASTER_PORT)",
}


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _all_faults(facts: Mapping[int, Mapping[str, Any]]) -> list[str]:
    return [f"{host['host']}: {fault}" for host in facts.values() for fault in host["faults"]]


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


def _own_faults(num_ranks: int, has_gpus: bool) -> list[str]:
    if not has_gpus:
        return []
    visible = count_gpus()
    if visible == num_ranks:
        return []
    return [f"{visible} GPUs are visible and --nproc-per-node is {num_ranks}: make them equal."]


def count_gpus() -> int:
    """Count this host's GPUs as CUDA will see them, without starting CUDA."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len([p for p in Path("/dev").glob("nvidia*") if p.name[6:].isdecimal()])


def _write_faults(save: str) -> list[str]:
    """Return why the run folder cannot be written from this host."""
    if not save or is_store(as_path(save)):
        return []
    probe = Path(save) / f".preflight.{socket.gethostname()}.{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        return [f"--save {save} cannot be written: {error.strerror}."]
    return []


def _folder_id(save: str) -> str:
    """Identify a folder over hosts by a file in it, which the first host to come writes."""
    if not save or is_store(as_path(save)):
        return ""
    mark = Path(save) / ".folder_id"
    try:
        with mark.open("x") as file:
            file.write(f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}")
    except FileExistsError:
        pass
    except OSError:
        return ""  # is one of the faults already
    for _ in range(50):
        if text := mark.read_text():
            return text
        time.sleep(PACE_S)
    return ""


def _package_versions() -> dict[str, str]:
    found = {}
    for package in distributions():
        name = (package.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith(ALIKE):
            found[name] = package.version
    return found


def _source_digest() -> str:
    """Hash sizes and names of the mcore wheels' files: editable installs have no version."""
    digest = hashlib.sha256()
    here = Path(__file__).parents[1]
    for file in sorted(here.rglob("*.py")):
        digest.update(f"{file.relative_to(here)} {file.stat().st_size}\n".encode())
    return digest.hexdigest()[:12]


def _wait_for_hosts(
    folder: Path,
    num_hosts: int,
    timeout_s: float,
    now: Callable[[], float] = time.monotonic,
) -> dict[int, dict[str, Any]]:
    """Read the facts of all hosts once they are there."""
    deadline = now() + timeout_s
    while True:
        missing = [rank for rank in range(num_hosts) if not _fact_file(folder, rank).exists()]
        if not missing:
            break
        if now() > deadline:
            ranks = ", ".join(map(str, missing[:8]))
            raise ValueError(
                f"{len(missing)} of {num_hosts} hosts (NODE_RANK {ranks}) wrote nothing to "
                f"{folder} within {timeout_s:g} s: they did not start, or --log-dir is not on "
                "storage that all hosts share."
            )
        time.sleep(PACE_S)
    return {rank: json.loads(_fact_file(folder, rank).read_text()) for rank in range(num_hosts)}


def _fact_file(folder: Path, rank: int) -> Path:
    return folder / f"host-{rank}.json"
