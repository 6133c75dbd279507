"""Starts the workers of a plan: processes of this machine, Slurm array jobs or Ray tasks.

Each worker claims units (``plan_worker.py``). An executor only starts workers and replaces dead
ones, so any number of executors may work on one plan.
"""

import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_base.atomic_files import write_durably
from mcore_data.config import LaunchConfig
from mcore_data.indexed.object_store import address_of, is_remote
from mcore_data.preprocessing.plan_worker import work_on_plan
from mcore_data.preprocessing.work_plan import WorkPlan, read_plan, status_of

log = logging.getLogger(__name__)

_POLL_S = 0.2
_LONGEST_PAUSE_S = 15.0
_WORKER_EXIT_CODES = (0, 1, 2)
"""Exit codes of a worker that ended by itself; any other code is that of a killed process."""


def run_local(plan: WorkPlan, config: LaunchConfig, scratch_path: str = "") -> None:
    """Run worker processes on this machine until no unit is left, and replace killed ones.

    Raises:
        ValueError: if a worker refuses the plan.
        RuntimeError: if more workers were killed than ``config.max_retries``.
    """
    command = worker_command(plan, config, scratch_path)
    workers = [subprocess.Popen(command) for _ in range(min(config.num_tasks, len(plan.units)))]
    retries = config.max_retries
    try:
        while workers:
            time.sleep(_POLL_S)
            for worker in [each for each in workers if each.poll() is not None]:
                workers.remove(worker)
                if worker.returncode == 2:
                    raise ValueError("a worker refused the plan, with the message above.")
                if worker.returncode in _WORKER_EXIT_CODES:
                    continue
                if not retries:
                    raise RuntimeError(
                        f"a worker ended with code {worker.returncode}, after "
                        f"{config.max_retries} others had been replaced (--max-retries). "
                        "Repeat the command to continue."
                    )
                retries -= 1
                log.warning("replacing a worker that ended with code %d", worker.returncode)
                workers.append(subprocess.Popen(command))
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


def worker_command(plan: WorkPlan, config: LaunchConfig, scratch_path: str) -> list[str]:
    """Return the command line of one worker."""
    words = [sys.executable, "-m", "mcore_data", "preprocess"]
    words += ["--plan", plan.address, "--workers", str(config.cpus_per_task)]
    words += ["--scratch-path", scratch_path] * bool(scratch_path)
    return words + ["--on-bad-record", "skip"] * config.skip_bad_records


def render_slurm(plan: WorkPlan, config: LaunchConfig, scratch_path: str) -> str:
    """Render the batch script of one worker, for array jobs of any size.

    A task that Slurm preempts, or whose host is lost, is requeued and claims other units.
    """
    folder = script_folder(plan)
    options = {
        "job-name": f"mcore-data-{plan.path.name.partition('.')[0]}",
        "requeue": "",
        "open-mode": "append",
        "cpus-per-task": str(config.cpus_per_task),
        "output": f"{folder}/slurm-%A-%a.log",
        **dict(word.split("=", 1) for word in config.slurm_options),
    }
    directives = "\n".join(
        f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"
        for name, value in options.items()
    )
    return f"""#!/usr/bin/env bash
{directives}
# Rendered by mcore-data launch. Each task is a worker, which claims units until none is left.
set -euo pipefail
cd {shlex.quote(str(Path.cwd()))}
exec {shlex.join(worker_command(plan, config, scratch_path))}
"""


def run_slurm(plan: WorkPlan, config: LaunchConfig, scratch_path: str = "") -> list[str]:
    """Write the batch script, and with ``submit_jobs`` submit tasks for missing units.

    With ``wait`` the function returns when all units are done. If all jobs end with units
    missing, it submits again, at most ``config.max_retries`` times.

    Returns:
        The commands to submit the jobs, or the numbers of the submitted jobs.

    Raises:
        RuntimeError: if Slurm refuses a job, or retries are used up.
    """
    folder = script_folder(plan)
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "worker.sbatch"
    write_durably(script, render_slurm(plan, config, scratch_path).encode())
    sizes = array_sizes(plan, config)
    if not config.submit_jobs:
        return [shlex.join(_array_command(size, script)) for size in sizes]
    jobs = [_submit(_array_command(size, script)) for size in sizes]
    pause_s, retries, running = _POLL_S, config.max_retries, list(jobs)
    while config.wait:
        has_jobs = _is_queued(running)  # asked before counting units, which jobs may finish
        sizes = array_sizes(plan, config, none_runs=True)
        if not sizes:
            break
        if not has_jobs:
            if not retries:
                raise RuntimeError(
                    f"units are missing after all jobs ended and {config.max_retries} retries "
                    f"(--max-retries): see mcore-data status --plan {plan.address} and "
                    f"{folder}/slurm-*.log."
                )
            retries -= 1
            log.warning("all jobs ended with units missing: submitting %d tasks", sum(sizes))
            running = [_submit(_array_command(size, script)) for size in sizes]
            jobs += running
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return jobs


def script_folder(plan: WorkPlan) -> Path:
    """Return the folder of the batch script and logs; a local one for a plan in a store."""
    return Path(plan.folder.name if is_remote(plan.path) else plan.folder).absolute()


def array_sizes(plan: WorkPlan, config: LaunchConfig, *, none_runs: bool = False) -> list[int]:
    """Return the number of tasks of each array job to submit.

    One task is started for each missing unit, at most ``num_tasks``. Slurm refuses arrays
    beyond its MaxArraySize, so each array has at most ``config.max_array`` tasks.

    Args:
        plan: the plan.
        config: numbers of tasks.
        none_runs: whether all jobs are known to have ended. Otherwise units with a lock count
            as running, and at least one task is started, to take over units of dead workers.
    """
    status = status_of(plan)
    missing = status.num_units - len(status.done)
    num_tasks = min(config.num_tasks, missing)
    if not none_runs:
        num_tasks = max(num_tasks - len(status.running), min(1, missing))
    return [
        min(config.max_array, num_tasks - first)
        for first in range(0, num_tasks, config.max_array)
    ]


def _array_command(num_tasks: int, script: Path) -> list[str]:
    return ["sbatch", "--parsable", f"--array=0-{num_tasks - 1}", str(script)]


def _submit(words: Sequence[str]) -> str:
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{shlex.join(words)}: {result.stderr.strip()}")
    return result.stdout.strip().partition(";")[0]


def _is_queued(jobs: Sequence[str]) -> bool:
    """Whether one of the jobs is queued or running; old jobs have an invalid id in Slurm."""
    for job in jobs:
        result = subprocess.run(
            ["squeue", "--noheader", "--jobs", job], capture_output=True, text=True, check=False
        )
        if result.returncode and "Invalid job id" not in result.stderr:
            return True  # the controller does not answer: assume that the job runs
        if result.stdout.strip():
            return True
    return False


def run_ray(plan: WorkPlan, config: LaunchConfig, scratch_path: str = "") -> None:
    """Write each missing unit in a Ray task, at most ``config.num_tasks`` at a time.

    Ray repeats a task whose process or host dies, ``config.max_retries`` times; the unit
    continues from its journal. All hosts need mcore-data, and access to the plan's path.

    Raises:
        ImportError: if Ray is not installed.
        RuntimeError: if a task died more than ``config.max_retries`` times.
    """
    try:
        import ray  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ImportError("--executor ray needs: pip install 'mcore-data[ray]'.") from None
    is_owner = not ray.is_initialized()
    if is_owner:
        ray.init(address=config.ray_address or None, log_to_driver=False)
    write = ray.remote(num_cpus=config.cpus_per_task, max_retries=config.max_retries)(
        _write_unit
    )
    address = address_of(plan.path if is_remote(plan.path) else plan.path.absolute())
    done = {*status_of(plan).done}
    waiting: Iterator[int] = iter([u.number for u in plan.units if u.number not in done])
    running: list[Any] = []
    try:
        while True:
            while len(running) < config.num_tasks and (number := next(waiting, -1)) >= 0:
                running.append(write.remote(address, number, asdict(config), scratch_path))
            if not running:
                return
            finished, running = ray.wait(running)
            for message in ray.get(finished):
                if message:
                    log.warning("%s", message)
    except ray.exceptions.WorkerCrashedError as error:
        raise RuntimeError(
            f"a task died more than {config.max_retries} times (--max-retries): {error}"
        ) from error
    finally:
        if is_owner:
            ray.shutdown()


def _write_unit(path: str, number: int, fields: dict[str, Any], scratch_path: str) -> str:
    """Write one unit of a plan in a Ray worker; return its error, or ''."""
    config = LaunchConfig(**fields)
    report = work_on_plan(
        read_plan(path),
        numbers=[number],
        workers=config.cpus_per_task,
        on_bad_record="skip" if config.skip_bad_records else "refuse",
        scratch_path=scratch_path,
    )
    return "".join(f"unit {number} failed: {error}" for error in report.failures.values())
