"""Runs golden cases: the ranks of each are forked from this process, which has torch loaded.

A rank is what ``mcore-train gpt ...`` under a launcher would be, with a process, environment
and log file of its own; only the seconds for loading torch are paid once. A CPU rank computes
with one thread, so sums have one order.
"""

import hashlib
import importlib
import json
import logging
import multiprocessing as mp
import os
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mcore_base.entry_point import LAUNCHER
from mcore_train.diagnosis.triage import triage
from mcore_train.golden.cases import RECORDED, STEPS, Case, Job

log = logging.getLogger(__name__)

RETRIES = 3
"""Further attempts after failures that ``triage`` counts as passing."""
WARM_UP = 10
"""Steps whose time is not counted: kernels are compiled and sizes recorded in them."""
PRELOADED = (
    *("torch", "torch.distributed", "torch._dynamo", "rich.progress"),
    *("mcore_train.running", "mcore_train.options.parsing", "mcore_train.cli"),
)
_POLL_S = 0.02


def run_case(case: Case, job: Job, steps: int, output: Path) -> dict[str, Any]:
    """Train a case once into a folder; return its key and values.

    A failure that may pass is repeated up to three times. The checkpoint is deleted once its
    digest is known; logs of all ranks and the metrics stay.

    Args:
        case: what to train.
        job: ranks and time limit.
        steps: after which the run ends, at most ``STEPS``.
        output: folder of this repetition; replaced.

    Raises:
        RuntimeError: if the run fails, with the log that tells why.
        TimeoutError: if the job's time limit passes.
    """
    for attempt in range(1, RETRIES + 2):
        try:
            _train(case, job, steps, output, attempt)
            break
        except RuntimeError as error:
            verdict = triage(output / "logs")
            passes = verdict.retry and verdict.fault != "unknown"
            if attempt > RETRIES or not passes:
                raise RuntimeError(f"{error}: {verdict.message or verdict.fault}") from None
            log.warning("%s: %s, which may pass; again", case.name, verdict.fault)
    values = read_values(output / "save", steps)
    shutil.rmtree(output / "save")
    return values


def _train(case: Case, job: Job, steps: int, output: Path, attempt: int) -> None:
    shutil.rmtree(output / "save", ignore_errors=True)
    save = str(output / "save")
    words = [case.command, *case.words, "--train-iters", str(STEPS), "--log-interval", "1"]
    words += ["--save", save]
    stops = [steps]
    if case.test_type == "ckpt-resume":
        stops = [steps // 2, steps]
    for index, stop in enumerate(stops):
        rest = ["--exit-interval", str(stop)] if stop < STEPS else []
        rest += ["--load", save] if index else []
        logs = output / "logs" / str(attempt + index)
        run_ranks(words + rest, job.nodes * job.gpus, case.env, logs, job.time_limit)


def run_ranks(
    words: Sequence[str],
    num_ranks: int,
    env: Mapping[str, str],
    logs: Path,
    time_limit_s: float,
) -> None:
    """Run ``mcore-train WORDS`` on so many ranks of this host, with a log file for each.

    Raises:
        RuntimeError: if a rank fails; the other ranks are ended.
        TimeoutError: if time runs out.
    """
    # Imported here, so that listing and comparing values load no torch.
    from mcore_parallel.launch.launcher import free_port

    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    # Forked from this process, which has loaded torch and computed nothing with it. Counting
    # GPUs through the driver would start CUDA here, and a forked process cannot use it then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for module in PRELOADED:
        importlib.import_module(module)
    context = mp.get_context("fork")
    place = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": "1",
        **env,
    }
    ranks: list[BaseProcess] = []
    for rank in range(num_ranks):
        variables = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = (list(words), variables, str(logs / f"rank-{rank}.log"))
        ranks.append(context.Process(target=_run_rank, args=arguments))
        ranks[-1].start()
    deadline = time.monotonic() + time_limit_s
    try:
        while any(rank.exitcode is None for rank in ranks):
            for number, rank in enumerate(ranks):
                if rank.exitcode:
                    raise RuntimeError(
                        f"rank {number} ended with exit code {rank.exitcode}, see {logs}"
                    )
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {time_limit_s:g} s, see {logs}")
            time.sleep(_POLL_S)
        if failed := [number for number, rank in enumerate(ranks) if rank.exitcode]:
            raise RuntimeError(f"ranks {failed} failed, see {logs}")
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _run_rank(words: list[str], variables: dict[str, str], log_file: str) -> None:
    """Be one rank: its environment, its log, its exit code."""
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.update(variables)
    import torch

    from mcore_train.cli import main

    torch.set_num_threads(1)
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    # As the program does: at once, without the clean-up of a forked process.
    os._exit(code)


def read_values(save: Path, steps: int) -> dict[str, Any]:
    """Read a run's key, and by metric and step its values, from the files that it wrote."""
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    header = next(row for row in rows if row["kind"] == "run")
    reports = {row["iteration"]: row for row in rows if row["kind"] == "train"}
    if sorted(reports) != list(range(1, steps + 1)):
        raise RuntimeError(f"{save} has reports of {len(reports)} steps, not of {steps}")
    kept = [step for step in RECORDED if step <= steps]
    last = str(steps)
    later = [reports[step]["step_ms"] for step in reports if step > min(WARM_UP, steps // 2)]
    digest = hashlib.sha256()
    for file in sorted(save.glob(f"iter_{steps:07}/*.safetensors")):
        digest.update(file.name.encode() + file.read_bytes())
    values: dict[str, Any] = {
        name: {str(step): reports[step][name] for step in kept}
        for name in ("loss", "grad_norm")
    }
    values["skipped_steps"] = {last: sum(row["skipped_steps"] for row in reports.values())}
    values["checkpoint"] = {last: digest.hexdigest()}
    values["step_ms"] = {last: statistics.median(later)}
    values["peak_gib"] = {last: max(row["peak_gib"] for row in reports.values())}
    return {"key": describe_machine(header), "values": values}


def describe_machine(header: Mapping[str, Any]) -> str:
    """Return what decides the last bits of a run: torch, device and dtype.

    Of a CPU that is its maker, its vector unit and whether it multiplies bfloat16 in tiles.
    """
    device = ", ".join(header["devices"])
    if device == "cpu":
        import torch

        text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        maker = next(
            (w.split(":")[1] for w in text.splitlines() if "vendor_id" in w), ""
        ).strip()
        units = [torch.backends.cpu.get_cpu_capability()]
        units += [unit for unit in ("avx512_bf16", "amx_bf16") if f" {unit} " in text]
        device = " ".join(["cpu", maker, *units])
    return f"torch {header['versions']['torch']}, {device}, {header['format']}"
