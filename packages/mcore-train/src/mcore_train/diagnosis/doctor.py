"""``mcore-train doctor``: checks whether a cluster is healthy, before a run starts.

Every rank measures facts (``probes``), which are gathered on all ranks as JSON. Each row of the
table ``CHECKS`` compares them with expected values and has advice for deviations. A check whose
facts are missing, such as NVLink without a GPU, is reported as skipped.
"""

import json
import os
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_base.options import Options, option
from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.launch import launcher
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_train.diagnosis import probes
from mcore_train.reporting.hardware import peak_flops

Facts = dict[str, Any]
"""Measurements of one rank."""

GEMM_SHARE = 0.55
"""Smallest share of the data sheet's bf16 rate that a GEMM of 8192 must reach."""
NVLINK_GBS = {
    "H100": 450,
    "H200": 450,
    "H800": 200,
    "H20": 450,
    "GH200": 450,
    "A100": 300,
    "A800": 200,
    "B200": 900,
    "B300": 900,
}
"""NVLink of a GPU in one direction, GB/s, from the data sheets (SXM)."""
LINK_SHARE = 0.4
"""Smallest share of a link's rate that a collective of 256 MiB must reach."""
OUTLIER_SHARE = 0.1
"""An outlier is below the median by this share, and outside of the spread of the others."""
MAD_SCALE = 1.4826
"""Standard deviation of normal values, divided by their median absolute deviation."""
WRITE_MBS, FSYNC_MS = 100.0, 100.0
"""Smallest write rate and largest time of an fsync of a shared folder."""
SHM_GIB = 1.0
"""Smallest free shared memory for a rank's data workers and NCCL."""
CLOCK_S = 2.0
"""Largest difference between hosts' clocks with which logs can still be ordered."""
IDLE_GIB = 2.0
"""Largest used memory of an idle GPU; more means that another process uses the GPU."""
LOCAL_KINDS = ("tmpfs", "overlay", "ext4", "xfs", "btrfs", "ramfs", "zfs")
"""File systems that are local to one host."""
_THROTTLES = {
    0x8: "power brake",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power",
}
"""NVML's throttle reasons that mean a fault of power or cooling, by bit."""
_FATAL_XIDS = {48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}

_NVRX = "nvidia-resiliency-ext"
BAD_PAIRS = (
    ("torch", "<2.11", "", "", "mcore needs torch 2.11 or newer: uv sync --locked."),
    ("cuda", ">=13", "driver", "<580", "CUDA 13 needs driver 580: update the driver."),
    (
        "cuda",
        ">=12,<13",
        "driver",
        "<525.60",
        "CUDA 12 needs driver 525.60: update the driver.",
    ),
    ("nccl", ">=2.28.3,<2.28.9", _NVRX, ">=0.4", "In-process restart needs NCCL 2.28.9."),
    (_NVRX, ">=0.7", "python", "<3.12", f"Use {_NVRX} 0.6.0, or Python 3.12."),
    (_NVRX, ">=0.5", "glibc", "<2.39", f"Use {_NVRX} 0.4.1, or an image with glibc 2.39."),
    ("megatron-core", ">=0.17", "python", "<3.12", "Use megatron-core 0.16.1, or Python 3.12."),
    ("vllm", ">=0.27", "torch", "<2.14", "Use vllm 0.26.0 with torch 2.11."),
)
"""Incompatible pairs: package, versions, other package, its versions, and advice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions(Options):
    """Requirements of the planned run on the cluster."""

    save: str = ""
    """Run folder, which all hosts must share; empty: no folder is measured."""
    log_dir: str = ""
    """Folder of the ranks' logs, which all hosts must share."""
    checkpoint_gib: float = option(0.0, minimum=0)
    """Size of one checkpoint; --save must have space for two."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure; auto: CUDA if present."""
    timeout_minutes: float = 2.0
    """Time to wait for a rank in a collective."""
    nproc: int = option(0, minimum=0)
    """Ranks to start on this host; 0: the ranks that torchrun or Slurm started, else one."""
    json: bool = False
    """Print one JSON object instead of the page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """Check hosts, GPUs, links and folders before a run; under torchrun or Slurm all hosts."""

    options: DoctorOptions = field(default_factory=DoctorOptions)
    parallelism: ParallelConfig = field(default_factory=ParallelConfig)
    data_parallelism: DataParallelConfig = field(default_factory=DataParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)


@dataclass(frozen=True, slots=True)
class Problem:
    """One measurement that differs from its expectation."""

    where: str
    """Host, rank or GPU."""
    value: str
    """Measured value."""
    advice: str = ""
    """Advice that depends on the measured value; it replaces the check's."""


Judge = Callable[[Sequence[Facts], DoctorConfig], Iterable[Problem] | None]
"""Returns problems, or None if required facts are missing."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table of checks."""

    name: str
    measured: str
    expected: str
    advice: str
    judge: Judge
    is_warning: bool = False
    """Whether a run works despite a problem."""


# -- Checks. Each function takes the facts of all ranks and yields problems.


def _by_host(facts: Sequence[Facts]) -> Mapping[str, list[Facts]]:
    hosts: dict[str, list[Facts]] = defaultdict(list)
    for rank_facts in facts:
        hosts[rank_facts["names"]["host"]].append(rank_facts)
    return hosts


def _where(rank_facts: Facts) -> str:
    return f"rank {rank_facts['rank']} on {rank_facts['names']['host']}"


def satisfies(version: str, ranges: str) -> bool:
    """Whether a version, such as 2.28.3+cu13, is within ranges such as ``>=2.28.3,<2.28.9``."""
    if not version:
        return False

    def numbers(text: str) -> list[int]:
        match = re.match(r"[\d.]+", text)
        parts = [int(part) for part in match[0].split(".") if part] if match else []
        return parts + [0] * (4 - len(parts))

    for part in filter(None, ranges.split(",")):
        operator, limit = (">=", part[2:]) if part.startswith(">=") else ("<", part[1:])
        if (numbers(version) >= numbers(limit)) != (operator == ">="):
            return False
    return True


def _bad_pairs(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem]:
    for host, ranks in _by_host(facts).items():
        installed = {**ranks[0]["versions"], **_only(ranks[0].get("gpu", {}), "driver")}
        for name, spec, other, other_spec, advice in BAD_PAIRS:
            pairs = [(name, spec)] + ([(other, other_spec)] if other else [])
            if all(satisfies(installed.get(n, ""), ranges) for n, ranges in pairs):
                value = " with ".join(f"{n} {installed[n]}" for n, _ in pairs)
                yield Problem(host, value, advice)


def _only(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _different_versions(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem]:
    names = sorted({name for rank in facts for name in rank["versions"]})
    for name in names:
        values = {_where(rank): rank["versions"].get(name, "none") for rank in facts}
        yield from _different(name, values)


def _different(what: str, values: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the ranks whose value differs from the most common value."""
    usual = Counter(values.values()).most_common(1)[0][0]
    others: dict[str, list[str]] = defaultdict(list)
    for where, value in values.items():
        if value != usual:
            others[value].append(where)
    for value, ranks in others.items():
        yield Problem(_list_some(ranks), f"{what} {value}, elsewhere {usual}")


def _list_some(names: Sequence[str], limit: int = 4) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _unsynced(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem] | None:
    if not any(rank["locked"] for rank in facts):
        return None
    return (
        Problem(host, f"{name} {has}, uv.lock has {version}")
        for host, ranks in _by_host(facts).items()
        for name, version in ranks[0]["locked"].items()
        if (has := ranks[0]["versions"].get(name))
        and has.split("+")[0] != version.split("+")[0]
    )


def _replaced_torch(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem] | None:
    if not any("NVIDIA_PYTORCH_VERSION" in rank["environment"] for rank in facts):
        return None
    return (
        Problem(
            host,
            f"torch {torch_version} in a container of NVIDIA's "
            f"{ranks[0]['environment'].get('NVIDIA_PYTORCH_VERSION')}",
        )
        for host, ranks in _by_host(facts).items()
        if "nv" not in (torch_version := ranks[0]["versions"].get("torch", ""))
    )


def _missing_gpus(facts: Sequence[Facts], config: DoctorConfig) -> Iterator[Problem]:
    for host, ranks in _by_host(facts).items():
        if ranks[0]["device"] == "cuda" and len(ranks) != ranks[0]["num_gpus"]:
            yield Problem(host, f"{len(ranks)} ranks and {ranks[0]['num_gpus']} GPUs")
    if config.options.device == "auto" and len({rank["device"] for rank in facts}) > 1:
        without = [_where(rank) for rank in facts if rank["device"] == "cpu"]
        yield Problem(_list_some(without), "no GPU, and other ranks have one")


def _with_gpus(facts: Sequence[Facts], name: str) -> list[Facts] | None:
    """Return the ranks whose GPU reported a value; None if no GPU did."""
    return [rank for rank in facts if name in rank.get("gpu", {})] or None


def _gpu_check(name: str, problem: Callable[[Facts], str]) -> Judge:
    """Build a check of one NVML value per rank; ``problem`` returns "" for a good value."""

    def judge(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem] | None:
        ranks = _with_gpus(facts, name)
        if ranks is None:
            return None
        return (
            Problem(f"{_where(rank)}, GPU {rank['gpu'].get('bus', rank['local_rank'])}", value)
            for rank in ranks
            if (value := problem(rank["gpu"]))
        )

    return judge


def _throttled(gpu: Facts) -> str:
    reasons = [name for bit, name in _THROTTLES.items() if gpu["throttle"] & bit]
    return f"clock lowered: {', '.join(reasons)}" if reasons else ""


def _remapped(gpu: Facts) -> str:
    _, uncorrectable, is_pending, has_failed, *_ = [*gpu["remapped_rows"], 0, 0, 0, 0]
    if has_failed:
        return "a memory row could not be replaced"
    return f"{uncorrectable} memory rows wait for a reset" if is_pending else ""


def _xids(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem] | None:
    if not any("xids" in rank for rank in facts):
        return None
    return (
        Problem(host, f"Xid {number} of GPU {bus}")
        for host, ranks in _by_host(facts).items()
        for bus, number in dict.fromkeys(map(tuple, ranks[0].get("xids", ())))
        if number in _FATAL_XIDS
    )


def _slow_gemm(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem] | None:
    gpus = [(rank, peak_flops(rank["gpu_name"]) / 1e12) for rank in facts if "gpu_name" in rank]
    gpus = [(rank, peak) for rank, peak in gpus if peak]
    if not gpus:
        return None
    return (
        Problem(_where(rank), f"{rank['gemm_tflops']:.0f} of {peak:.0f} TFLOP/s")
        for rank, peak in gpus
        if rank["gemm_tflops"] < GEMM_SHARE * peak
    )


def outliers(values: Mapping[str, float]) -> list[str]:
    """Return the names whose value is far below the median of all values.

    An outlier is below the median by more than five standard deviations, estimated from the
    median absolute deviation, and by more than a tenth of the median. Fewer than four values
    have no outlier.
    """
    if len(values) < 4:
        return []
    middle = statistics.median(values.values())
    spread = MAD_SCALE * statistics.median(abs(v - middle) for v in values.values())
    limit = middle - max(5 * spread, OUTLIER_SHARE * middle)
    return [name for name, value in values.items() if value < limit]


def _outlier_check(name: str, unit: str) -> Judge:
    def judge(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem] | None:
        values = {_where(rank): rank[name] for rank in facts if rank.get(name) is not None}
        if len(values) < 4:
            return None
        middle = statistics.median(values.values())
        return (
            Problem(where, f"{values[where]:.3g} {unit}, the median is {middle:.3g}")
            for where in outliers(values)
        )

    return judge


def link_gbs(facts: Sequence[Facts], ranks: Iterable[int]) -> float | None:
    """Return the rate of the links between ranks, in GB/s; None: not known.

    Within a host this is the rate of NVLink, between hosts a GPU's share of the InfiniBand
    ports.
    """
    members = [rank for rank in facts if rank["rank"] in set(ranks)]
    hosts = {rank["names"]["host"] for rank in members}
    if len(hosts) == 1:
        words = members[0].get("gpu_name", "").replace("-", " ").split()
        return next((float(NVLINK_GBS[word]) for word in words if word in NVLINK_GBS), None)
    shares = []
    for host in hosts:
        host_ranks = _by_host(facts)[host]
        gbps = sum(p["gbps"] for p in host_ranks[0].get("infiniband", ()) if p["is_active"])
        shares.append(gbps / 8 / len(host_ranks))  # bits to bytes, for one rank
    return min(shares) if shares and min(shares) else None


def _slow_axes(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem] | None:
    measured = []
    for rank in facts:
        for axis, (rate, ranks) in rank.get("bus_gbs", {}).items():
            if rank["rank"] == ranks[0] and (link := link_gbs(facts, ranks)) is not None:
                measured.append((axis, rate, ranks, link))
    if not measured:
        return None
    return (
        Problem(
            f"{axis} (ranks {', '.join(map(str, ranks[:8]))})",
            f"{rate:.0f} GB/s of {link:.0f}",
        )
        for axis, rate, ranks, link in measured
        if rate < LINK_SHARE * link
    )


def _ports_down(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem] | None:
    hosts = {host: ranks[0]["infiniband"] for host, ranks in _by_host(facts).items()}
    if not any(hosts.values()):
        return None
    usual = statistics.median(len(ports) for ports in hosts.values())
    problems = [
        Problem(host, f"port {port['port']} is down")
        for host, ports in hosts.items()
        for port in ports
        if not (port["is_active"] and port["is_up"])
    ]
    rates = Counter(p["gbps"] for ports in hosts.values() for p in ports if p["is_active"])
    fast = rates.most_common(1)[0][0] if rates else 0.0
    problems += [
        Problem(
            host, f"port {port['port']} runs at {port['gbps']:.0f} Gb/s, others at {fast:.0f}"
        )
        for host, ports in hosts.items()
        for port in ports
        if port["is_active"] and port["gbps"] < fast
    ]
    problems += [
        Problem(host, f"{len(ports)} ports, others have {usual:.0f}")
        for host, ports in hosts.items()
        if len(ports) < usual
    ]
    return iter(problems)


def _folder_check(problem: Callable[[Facts, DoctorConfig], str]) -> Judge:
    """Build a check of each host's folders; ``problem`` returns "" for a good folder."""

    def judge(facts: Sequence[Facts], config: DoctorConfig) -> Iterator[Problem] | None:
        if not any(rank["folders"] for rank in facts):
            return None
        return (
            Problem(f"{host}: {measured['path']}", value)
            for host, ranks in _by_host(facts).items()
            for measured in ranks[0]["folders"]
            if (value := problem(measured, config))
        )

    return judge


def _unshared(measured: Facts, _: DoctorConfig) -> str:
    return "" if measured.get("is_shared", True) else "rank 0's file is not visible"


def _slow_folder(measured: Facts, _: DoctorConfig) -> str:
    slow = []
    if measured.get("write_mbs", WRITE_MBS) < WRITE_MBS:
        slow.append(f"writes {measured['write_mbs']:.0f} MB/s")
    if measured.get("fsync_ms", 0.0) > FSYNC_MS:
        slow.append(f"a sync takes {measured['fsync_ms']:.0f} ms")
    return ", ".join(slow)


def _no_room(measured: Facts, config: DoctorConfig) -> str:
    needed = 2 * config.options.checkpoint_gib
    if measured["path"] != config.options.save or measured.get("free_gib", needed) >= needed:
        return ""
    return f"{measured['free_gib']:.1f} GiB free, two checkpoints need {needed:.1f}"


def _local_logs(facts: Sequence[Facts], config: DoctorConfig) -> Iterator[Problem] | None:
    if not config.options.log_dir or len(_by_host(facts)) < 2:
        return None
    return (
        Problem(f"{host}: {measured['path']}", f"is on {measured['kind']}, a local file system")
        for host, ranks in _by_host(facts).items()
        for measured in ranks[0]["folders"]
        if measured["path"] == config.options.log_dir and measured.get("kind") in LOCAL_KINDS
    )


def _small_shm(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem]:
    for host, ranks in _by_host(facts).items():
        free = ranks[0]["shm"]["free_gib"]
        if free < SHM_GIB * len(ranks):
            yield Problem(host, f"{free:.2f} GiB free for {len(ranks)} ranks")


def _no_port(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem]:
    for host, ranks in _by_host(facts).items():
        if ranks[0]["listen_error"]:
            yield Problem(host, ranks[0]["listen_error"])


def _bad_names(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem]:
    hosts = _by_host(facts)
    for host, ranks in hosts.items():
        names = ranks[0]["names"]
        for key in ("own_address", "master_address"):
            if str(names.get(key, "")).startswith("error"):
                yield Problem(host, f"{key.replace('_', ' ')}: {names[key]}")
        master = str(names.get("master_address", ""))
        machines = {each[0]["names"].get("machine", host) for host, each in hosts.items()}
        if len(machines) > 1 and (master.startswith("127.") or master == "::1"):
            yield Problem(host, f"MASTER_ADDR is {master}, a loopback address")


def _clocks(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem] | None:
    if len(_by_host(facts)) < 2:
        return None
    return (
        Problem(host, f"{ranks[0]['clock_offset_s']:+.1f} s against rank 0")
        for host, ranks in _by_host(facts).items()
        if abs(ranks[0]["clock_offset_s"]) > CLOCK_S
    )


def expected_connections(config: DoctorConfig, capability: tuple[int, int] | None) -> str:
    """Return the value of CUDA_DEVICE_MAX_CONNECTIONS that a layout needs.

    Args:
        config: the layout.
        capability: compute capability of the GPU, (9, 0) for Hopper; None: no GPU.

    Returns:
        ``1``, ``32``, ``not 1``, or "" if the value has no effect.
    """
    layout = config.parallelism
    if capability is None:
        return ""
    if config.pipeline.overlap_moe_expert_parallel_comm:
        return "32"
    if config.data_parallelism.sharding == "optim_grads_params":
        return "not 1"
    splits = max(layout.tensor_model_parallel_size, layout.context_parallel_size)
    return "1" if capability < (10, 0) and splits > 1 else ""


def _connections(facts: Sequence[Facts], config: DoctorConfig) -> Iterator[Problem] | None:
    gpu_ranks = [rank for rank in facts if rank.get("capability")]
    if not gpu_ranks:
        return None
    return (
        Problem(host, f"{value or 'unset'}, this layout needs {needed}", advice)
        for host, ranks in _by_host(gpu_ranks).items()
        if (needed := expected_connections(config, tuple(ranks[0]["capability"])))
        for value in [ranks[0]["environment"].get("CUDA_DEVICE_MAX_CONNECTIONS", "")]
        if (value == "1" if needed == "not 1" else value != needed)
        for advice in [
            "Unset CUDA_DEVICE_MAX_CONNECTIONS."
            if needed == "not 1"
            else f"export CUDA_DEVICE_MAX_CONNECTIONS={needed}"
        ]
    )


def _different_programs(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem]:
    yield from _different("program", {_where(rank): rank["program"] for rank in facts})


def _different_sources(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem]:
    yield from _different("files", {_where(rank): rank.get("source", "") for rank in facts})


def _different_folders(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem]:
    yield from _different(
        "folder", {_where(rank): rank.get("working_folder", "") for rank in facts}
    )


def _different_groups(facts: Sequence[Facts], _: DoctorConfig) -> Iterator[Problem]:
    for name in ("MASTER_ADDR", "MASTER_PORT", "NNODES"):
        values = {_where(rank): rank["environment"].get(name, "unset") for rank in facts}
        yield from _different(name, values)


def _bad_nodes(facts: Sequence[Facts], config: DoctorConfig) -> Iterator[Problem]:
    counts = {host: str(len(ranks)) for host, ranks in _by_host(facts).items()}
    yield from _different("ranks", counts)
    tp = config.parallelism.tensor_model_parallel_size
    smallest = min(map(int, counts.values()))
    if len(counts) > 1 and tp > smallest:
        yield Problem("all hosts", f"--tensor-model-parallel-size {tp} crosses hosts")


CHECKS: tuple[Check, ...] = (
    Check(
        "version pairs",
        "packages, CUDA, NCCL, driver, Python",
        "no known bad pair",
        "",
        _bad_pairs,
    ),
    Check(
        "same versions",
        "packages of every rank",
        "the same on all",
        "uv sync --locked on the hosts named, or one image for all.",
        _different_versions,
    ),
    Check(
        "uv sync",
        "installed packages against uv.lock",
        "as in uv.lock",
        "uv sync --locked",
        _unsynced,
        is_warning=True,
    ),
    Check(
        "container torch",
        "torch inside a container of NVIDIA's",
        "the container's own",
        "Install mcore with the container's constraints: pip install --no-deps, or "
        "-c /etc/pip/constraint.txt.",
        _replaced_torch,
    ),
    Check(
        "same program",
        "path of the Python",
        "the same on all",
        "Start all hosts from one shared path.",
        _different_programs,
    ),
    Check(
        "same source",
        "files of the mcore wheels",
        "the same on all",
        "Install one build of the wheels on all hosts.",
        _different_sources,
    ),
    Check(
        "same folder",
        "folder in which ranks start",
        "the same on all",
        "Give launch --workdir, or cd to one shared path.",
        _different_folders,
    ),
    Check(
        "one worker group",
        "MASTER_ADDR, MASTER_PORT and NNODES",
        "the same on all",
        "Start one job with one worker group; its first host is the master of all.",
        _different_groups,
    ),
    Check(
        "ranks of a host",
        "ranks on each host",
        "the same number, and tensor ranks within one host",
        "Use one worker group with equal --nproc-per-node on all hosts, and a smaller "
        "--tensor-model-parallel-size.",
        _bad_nodes,
    ),
    Check(
        "GPUs of a host",
        "GPUs and ranks",
        "one rank per GPU",
        "Set --nproc-per-node to the number of GPUs that nvidia-smi -L lists.",
        _missing_gpus,
    ),
    Check(
        "ECC",
        "uncorrected memory errors since the start",
        "0",
        "Reset the GPU, or leave the host out.",
        _gpu_check(
            "ecc_errors", lambda g: f"{g['ecc_errors']} errors" if g["ecc_errors"] else ""
        ),
    ),
    Check(
        "memory rows",
        "remapped rows",
        "none pending or failed",
        "Reset the GPU (nvidia-smi -r); replace it if a row failed.",
        _gpu_check("remapped_rows", _remapped),
    ),
    Check(
        "Xid",
        "the kernel's log",
        "no Xid of broken hardware",
        "Leave the host out and let the GPU be checked (dcgmi diag -r 3).",
        _xids,
    ),
    Check(
        "throttling",
        "reasons of lowered clocks",
        "none of power or heat",
        "Check the power supply and cooling of the host.",
        _gpu_check("throttle", _throttled),
    ),
    Check(
        "power limit",
        "limit against the default",
        "not lowered",
        "nvidia-smi -pl DEFAULT",
        _gpu_check(
            "power_limit_w",
            lambda g: (
                f"{g['power_limit_w']:.0f} W of {g['default_power_w']:.0f}"
                if g["power_limit_w"] < 0.98 * g.get("default_power_w", 0)
                else ""
            ),
        ),
        is_warning=True,
    ),
    Check(
        "clocks",
        "application clock limit",
        "at least 90 % of the highest",
        "nvidia-smi -rgc",
        _gpu_check(
            "sm_mhz",
            lambda g: (
                f"{g['sm_mhz']} of {g['max_sm_mhz']} MHz under load"
                if g["sm_mhz"] < 0.6 * g.get("max_sm_mhz", 0)
                else ""
            ),
        ),
        is_warning=True,
    ),
    Check(
        "free GPU",
        "memory in use before the run",
        f"below {IDLE_GIB:.0f} GiB",
        "End the process that uses the GPU (nvidia-smi).",
        _gpu_check(
            "used_gib",
            lambda g: f"{g['used_gib']:.1f} GiB in use" if g["used_gib"] > IDLE_GIB else "",
        ),
    ),
    Check(
        "NVLink",
        "links of each GPU",
        "all up",
        "Leave the host out; nvidia-smi nvlink -s names the link.",
        _gpu_check(
            "nvlinks",
            lambda g: (
                f"{g['nvlinks'].count(False)} of {len(g['nvlinks'])} down"
                if not all(g["nvlinks"]) and any(g["nvlinks"])
                else ""
            ),
        ),
    ),
    Check(
        "GEMM rate",
        "bf16 GEMM of 8 192",
        f"{100 * GEMM_SHARE:.0f} % of the data sheet",
        "Check clocks, power limit and temperature of this GPU.",
        _slow_gemm,
    ),
    Check(
        "GEMM outliers",
        "GEMM rate over ranks",
        "none far below the median",
        "Leave the host out, or check the clocks of its GPU.",
        _outlier_check("gemm_tflops", "TFLOP/s"),
    ),
    Check(
        "bandwidth of axes",
        "all-reduce over each axis",
        f"{100 * LINK_SHARE:.0f} % of its links",
        "Check the path with NCCL_DEBUG=INFO: P2P and NVLink within a host, IB between hosts.",
        _slow_axes,
    ),
    Check(
        "neighbours",
        "messages between ranks of a host",
        "none far below the median",
        "Check NVLink or PCIe of the two ranks.",
        _outlier_check("near_gbs", "GB/s"),
    ),
    Check(
        "hosts in pairs",
        "messages between hosts",
        "none far below the median",
        "Check the cable and port of the host.",
        _outlier_check("far_gbs", "GB/s"),
    ),
    Check(
        "InfiniBand",
        "ports of each host",
        "all up, at one rate",
        "Check with ibstat; replace the cable or port.",
        _ports_down,
    ),
    Check(
        "folder",
        "rights and locks on shared folders",
        "all hosts may write",
        "Give the job's user write permission, or choose another folder.",
        _folder_check(lambda f, _: f.get("error", "")),
    ),
    Check(
        "shared folder",
        "rank 0's file on all hosts",
        "visible on all hosts",
        "Give a folder on a file system that all hosts mount at one path.",
        _folder_check(_unshared),
    ),
    Check(
        "rate of the folder",
        "write and sync",
        f"{WRITE_MBS:.0f} MB/s, {FSYNC_MS:.0f} ms",
        "Use another file system for --save, or --async-save with local checkpoints.",
        _folder_check(_slow_folder),
        is_warning=True,
    ),
    Check(
        "room for checkpoints",
        "free space",
        "enough for two checkpoints",
        "Delete files, or use --save-retain-last.",
        _folder_check(_no_room),
    ),
    Check(
        "log folder",
        "file system of --log-dir",
        "not local to a host",
        "Choose a --log-dir on the shared file system.",
        _local_logs,
        is_warning=True,
    ),
    Check(
        "/dev/shm",
        "free shared memory",
        f"{SHM_GIB:.0f} GiB per rank",
        "docker run --shm-size=64g or --ipc=host.",
        _small_shm,
    ),
    Check(
        "ports",
        "a TCP port to listen on",
        "one is free",
        "Check firewall and limits of the host.",
        _no_port,
    ),
    Check(
        "names",
        "own name and MASTER_ADDR",
        "resolve; with several hosts not to a loopback address",
        "Correct /etc/hosts or DNS; MASTER_ADDR must be the name of the first host.",
        _bad_names,
    ),
    Check(
        "time",
        "clocks of hosts",
        f"within {CLOCK_S:.0f} s",
        "Start chrony or ntpd on the host.",
        _clocks,
        is_warning=True,
    ),
    Check(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "the variable against layout and GPU",
        "1 before Blackwell with tp or cp, 32 with expert overlap, not 1 with FSDP",
        "",
        _connections,
    ),
)
"""All checks, in the order of the page."""


# -- Measurements and reports.


def measure_host(device: str, *, is_first: bool = True) -> Facts:
    """Measure this host without other ranks: program, packages, names, memory, GPUs.

    Args:
        device: device of the ranks, ``cpu`` or ``cuda``.
        is_first: whether this is the host's first rank, which also reads uv.lock.
    """
    environment = probes.environment()
    return {
        "device": device,
        "program": os.path.abspath(sys.executable),
        "source": probes.source_digest(Path(__file__).parents[1]),
        "working_folder": str(Path.cwd()),
        "versions": probes.versions(),
        "environment": environment,
        "locked": probes.locked_versions(Path.cwd()) if is_first else {},
        "names": probes.names(environment.get("MASTER_ADDR", "")),
        "listen_error": probes.can_listen(),
        "shm": probes.shared_memory(),
        "infiniband": probes.infiniband(),
        "num_gpus": torch.cuda.device_count(),
    }


def measure(config: DoctorConfig, ctx: ParallelContext, idle_gpu: Facts) -> Facts:
    """Measure this rank; all ranks call this function together.

    Args:
        config: folders and layout of the planned run.
        ctx: axes of all ranks.
        idle_gpu: values of NVML from before this process used the GPU.
    """
    env, device = launcher.read_environment(), ctx.device
    facts: Facts = {
        **measure_host(device.type, is_first=env.local_rank == 0),
        "rank": ctx.world.rank,
        "local_rank": env.local_rank,
        "folders": _measure_folders(config, ctx, is_first=env.local_rank == 0),
        "clock_offset_s": probes.clock_offset_s(ctx),
    }
    if device.type == "cuda":
        facts["gpu_name"] = torch.cuda.get_device_name(device)
        facts["capability"] = list(torch.cuda.get_device_capability(device))
        facts["gpu"] = dict(idle_gpu)
        facts["xids"] = probes.xids(probes.kernel_log())
    facts["gemm_tflops"] = probes.gemm_tflops(device)
    if device.type == "cuda" and facts["gpu"]:
        facts["gpu"] |= _only(ask_nvml(env.local_rank), "sm_mhz", "throttle")  # under load
    axes = {"world": ctx.world, "tp": ctx.tp, "cp": ctx.cp, "pp": ctx.pp, "dp": ctx.dp}
    facts["bus_gbs"] = {
        name: (probes.bus_gbs(axis, device), list(axis.ranks))
        for name, axis in axes.items()
        if axis.size > 1
    }
    if ctx.world.size > 1:
        facts["near_gbs"] = probes.pair_gbs(ctx, 1)
        ranks = int(facts["environment"].get("LOCAL_WORLD_SIZE", ctx.world.size))
        if ranks < ctx.world.size:
            facts["far_gbs"] = probes.pair_gbs(ctx, ranks)
    return facts


def ask_nvml(index: int) -> Facts:
    """Return NVML's values of a GPU; empty without the extra ``doctor`` or a driver."""
    try:
        import pynvml  # pyrefly: ignore[missing-import]
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        return probes.gpu(index, pynvml)
    finally:
        pynvml.nvmlShutdown()


def _measure_folders(
    config: DoctorConfig, ctx: ParallelContext, *, is_first: bool
) -> list[Facts]:
    """Measure the folders that must be shared, on the first rank of each host."""
    token = f"doctor-{gather_json(os.getpid(), ctx.world)[0]}"
    paths = list(dict.fromkeys(filter(None, (config.options.save, config.options.log_dir))))
    is_writer = ctx.world.rank == 0
    folders = []
    if is_first:
        folders = [probes.folder(path, token, is_writer=is_writer) for path in paths]
    gather_json(None, ctx.world)  # barrier: rank 0 has written its files
    for measured in folders:
        measured["is_shared"] = probes.sees_token(measured["path"], token)
    gather_json(None, ctx.world)  # barrier: all ranks have looked for the files
    for measured in folders if is_writer else ():
        for name in (token, f"{token}.lock"):
            (Path(measured["path"]) / name).unlink(missing_ok=True)
    return folders


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one check."""

    check: Check
    problems: tuple[Problem, ...]
    is_skipped: bool

    @property
    def word(self) -> str:
        """Outcome in one word."""
        if self.is_skipped:
            return "skipped"
        if not self.problems:
            return "ok"
        return "warning" if self.check.is_warning else "FAULT"


def judge(
    facts: Sequence[Facts], config: DoctorConfig, names: Collection[str] = ()
) -> list[Result]:
    """Apply the rows of ``CHECKS`` to the facts of all ranks; ``names`` selects rows."""
    results = []
    for check in CHECKS:
        if names and check.name not in names:
            continue
        problems = check.judge(facts, config)
        results.append(Result(check, tuple(problems or ()), problems is None))
    return results


def page(facts: Sequence[Facts], results: Sequence[Result]) -> str:
    """Format one page: measured rates, then every check."""
    hosts = _by_host(facts)
    devices = Counter(rank.get("gpu_name", rank["device"]) for rank in facts)
    rates = [rank["gemm_tflops"] for rank in facts]
    lines = [
        f"hosts: {len(hosts)} ({_list_some(list(hosts))}); ranks: {len(facts)}; devices: "
        + ", ".join(f"{count} x {name}" for name, count in devices.items()),
        f"GEMM: {min(rates):.3g} to {max(rates):.3g} TFLOP/s",
    ]
    for name, (rate, ranks) in facts[0].get("bus_gbs", {}).items():
        lines.append(f"all-reduce over {name}: {rate:.3g} GB/s bus ({len(ranks)} ranks)")
    for measured in facts[0]["folders"]:
        if "write_mbs" in measured:
            lines.append(
                f"{measured['path']}: {measured['kind']}, {measured['free_gib']:.1f} GiB free, "
                f"writes {measured['write_mbs']:.0f} MB/s, a sync {measured['fsync_ms']:.1f} ms"
            )
    width = max(len(result.check.name) for result in results)
    for result in results:
        lines.append(f"{result.word:<8} {result.check.name:<{width}}  {result.check.expected}")
        for problem in result.problems[:8]:
            lines.append(f"         - {problem.where}: {problem.value}")
        if len(result.problems) > 8:
            lines.append(f"         - and {len(result.problems) - 8} more")
        advice = {p.advice or result.check.advice for p in result.problems} - {""}
        lines += [f"         do: {text}" for text in sorted(advice)]
    faults = sum(result.word == "FAULT" for result in results)
    warnings = sum(result.word == "warning" for result in results)
    skipped = sum(result.is_skipped for result in results)
    lines.append(
        f"{faults} faults, {warnings} warnings, {skipped} of {len(results)} checks skipped"
    )
    return "\n".join(lines)


def to_json(facts: Sequence[Facts], results: Sequence[Result]) -> str:
    """Return facts and checks as JSON."""
    checks = [
        {
            "name": result.check.name,
            "outcome": result.word,
            "problems": [
                {"where": p.where, "value": p.value, "advice": p.advice or result.check.advice}
                for p in result.problems
            ],
        }
        for result in results
    ]
    return json.dumps({"checks": checks, "facts": list(facts)})


def examine(config: DoctorConfig) -> tuple[list[Facts], list[Result]]:
    """Initialize the ranks, measure every rank, and return all facts and results on each."""
    # Before CUDA is initialized: its context and NCCL's buffers would count as used memory.
    idle_gpu = ask_nvml(launcher.read_environment().local_rank)
    device = launcher.initialize(config.options.device, config.options.timeout_minutes)
    try:
        ctx = ParallelContext.build(config.parallelism, device)
        facts = gather_json(measure(config, ctx, idle_gpu), ctx.world)
        ctx.destroy()
    finally:
        launcher.shut_down()
    return facts, judge(facts, config)
