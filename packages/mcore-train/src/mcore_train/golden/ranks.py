"""Runs golden cases on ranks that are forked from this process, after torch was imported.

A rank is equivalent to ``mcore-train gpt ...`` under a launcher, with its own process,
environment and log file; forking saves the import of torch. A CPU rank computes with one
thread, so that the order of sums is fixed.
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
"""Largest number of further attempts after failures that ``triage`` classifies as temporary."""
WARM_UP = 10
"""First steps, whose time is not counted since kernels are compiled."""
PRELOADED = (
    *("torch", "torch.distributed", "torch._dynamo", "rich.progress"),
    *("mcore_train.running", "mcore_train.options.parsing", "mcore_train.cli"),
)
_POLL_S = 0.02


def run_case(case: Case, job: Job, steps: int, output: Path) -> dict[str, Any]:
    """Train a case once into a folder; return its key and values.

    After a temporary failure the run is repeated, up to three times. The checkpoint is deleted
    after its digest is computed; the logs of all ranks are kept.

    Args:
        case: case to train.
        job: ranks and time limit.
        steps: last step of the run, at most ``STEPS``.
        output: folder of this repetition; its content is replaced.

    Raises:
        RuntimeError: if the run fails, with the message of the cause.
        TimeoutError: if the job's time limit is exceeded.
    """
    for attempt in range(1, RETRIES + 2):
        try:
            _train(case, job, steps, output, attempt)
            break
        except RuntimeError as error:
            verdict = triage(output / "logs")
            is_temporary = verdict.retry and verdict.fault != "unknown"
            if attempt > RETRIES or not is_temporary:
                raise RuntimeError(f"{error}: {verdict.message or verdict.fault}") from None
            log.warning("%s: trying again after %s", case.name, verdict.fault)
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
    """Run ``mcore-train WORDS`` on ``num_ranks`` ranks of this host, with a log file for each.

    Raises:
        RuntimeError: if a rank fails; the other ranks are ended.
        TimeoutError: if the time limit is exceeded.
    """
    # Imported here, so that listing and comparing values do not import torch.
    from mcore_parallel.launch.launcher import free_port

    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    # Ranks are forked from this process, which must not initialize CUDA, since a forked process
    # could not use it. With this variable torch counts GPUs by NVML, not by the driver.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for module in PRELOADED:
        importlib.import_module(module)
    context = mp.get_context("fork")
    environment = {
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
        variables = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
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
    """Run one rank in this process, with its environment and log; exit with its code."""
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
    # As the program does: exit at once, without the clean-up of a forked process.
    os._exit(code)


def read_values(save: Path, steps: int) -> dict[str, Any]:
    """Return a run's key, and its values by metric and step, from the files of the run."""
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    header = next(row for row in rows if row["kind"] == "run")
    reports = {row["iteration"]: row for row in rows if row["kind"] == "train"}
    if sorted(reports) != list(range(1, steps + 1)):
        raise RuntimeError(f"{save} has reports of {len(reports)} steps, not of {steps}")
    recorded = [step for step in RECORDED if step <= steps]
    last = str(steps)
    later = [reports[step]["step_ms"] for step in reports if step > min(WARM_UP, steps // 2)]
    digest = hashlib.sha256()
    for file in sorted(save.glob(f"iter_{steps:07}/*.safetensors")):
        digest.update(file.name.encode() + file.read_bytes())
    values: dict[str, Any] = {
        name: {str(step): reports[step][name] for step in recorded}
        for name in ("loss", "grad_norm")
    }
    values["skipped_steps"] = {last: sum(row["skipped_steps"] for row in reports.values())}
    values["checkpoint"] = {last: digest.hexdigest()}
    values["step_ms"] = {last: statistics.median(later)}
    values["peak_gib"] = {last: max(row["peak_gib"] for row in reports.values())}
    return {"key": describe_machine(header), "values": values}


def describe_machine(header: Mapping[str, Any]) -> str:
    """Return a key of everything that determines the last bits of a run: torch, device, dtype.

    For a CPU the key has the vendor, the vector unit and units for bfloat16.
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
