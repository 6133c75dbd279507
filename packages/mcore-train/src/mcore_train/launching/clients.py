"""Submits, queries and cancels jobs with the command-line programs of their schedulers.

The form of a job's id determines its scheduler: digits for Slurm, NAMESPACE/KIND/NAME for
Kubernetes (kubectl), ray/ID for Ray, sky/NAME for SkyPilot.
"""

import logging
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_ENDED = re.compile(
    r"COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE|"
    r"SUCCEEDED|STOPPED|Completed|Complete|Failed|Succeeded"
)
"""Final states of jobs."""
_POD_LABELS = {
    "pytorchjob": "training.kubeflow.org/job-name",
    "rayjob": "ray.io/originated-from-cr-name",
}
_JOB_SET_LABEL = "jobset.sigs.k8s.io/jobset-name"


@dataclass(frozen=True, slots=True)
class Client:
    """Commands for one job."""

    status: tuple[str, ...]
    logs: tuple[str, ...]
    cancel: tuple[str, ...]


def client_of(job_id: str) -> Client:
    """Return the scheduler's commands for a job.

    Raises:
        ValueError: if the id has the form of no scheduler.
    """
    if re.fullmatch(r"\d+", job_id):
        return Client(
            ("squeue", "--noheader", "--jobs", job_id, "--format", "%i %T %M %D %R"),
            ("scontrol", "--oneliner", "show", "job", job_id),
            ("scancel", job_id),
        )
    head, _, rest = job_id.partition("/")
    if head == "ray" and rest:
        return Client(*(("ray", "job", verb, rest) for verb in ("status", "logs", "stop")))
    if head == "sky" and rest:
        return Client(
            ("sky", "jobs", "queue", "--refresh"),
            ("sky", "jobs", "logs", "--no-follow", "--name", rest),
            ("sky", "jobs", "cancel", "--yes", "--name", rest),
        )
    if match := re.fullmatch(r"([\w-]+)/(\w+)/([\w-]+)", job_id):
        namespace, kind, name = match.groups()
        kubectl = ("kubectl", "--namespace", namespace)
        label = f"{_POD_LABELS.get(kind, _JOB_SET_LABEL)}={name}"
        conditions = '{range .status.conditions[?(@.status=="True")]}{.type}{"\\n"}{end}'
        return Client(
            (*kubectl, "get", f"{kind}/{name}", "--output", f"jsonpath={conditions}"),
            (*kubectl, "logs", "--selector", label, "--prefix", "--tail=-1"),
            (*kubectl, "delete", f"{kind}/{name}"),
        )
    raise ValueError(
        f"{job_id!r} is not a job's id: give Slurm's number, NAMESPACE/KIND/NAME of "
        "Kubernetes, ray/ID or sky/NAME, as --submit printed it."
    )


def submit_slurm(script: Path) -> str:
    """Submit a batch script; return the job's number."""
    # In a federation sbatch prints NUMBER;CLUSTER.
    return run(["sbatch", "--parsable", str(script)]).strip().partition(";")[0]


def submit_kubernetes(file: Path, job_id: str) -> str:
    """Apply a file of resources by kubectl; return ``job_id``."""
    namespace = job_id.partition("/")[0]
    log.info("%s", run(["kubectl", "--namespace", namespace, "apply", "-f", str(file)]).strip())
    return job_id


def submit_ray(driver: Path, name: str) -> str:
    """Submit a driver to the Ray cluster of RAY_ADDRESS; return the job's id."""
    number = f"{name}-{time.time_ns() // 1_000_000}"
    words = ["ray", "job", "submit", "--no-wait", "--submission-id", number]
    run([*words, "--working-dir", str(driver.parent), "--", "python", driver.name])
    return f"ray/{number}"


def submit_sky(task: Path, name: str) -> str:
    """Submit a managed job; return its id."""
    run(["sky", "jobs", "launch", "--yes", "--detach-run", "--name", name, str(task)])
    return f"sky/{name}"


def status(job_id: str) -> str:
    """Return the state that a job's scheduler reports; for Slurm also of ended jobs."""
    queued = _attempt(client_of(job_id).status)
    if not job_id.isdecimal():
        if job_id.startswith("sky/"):
            name = job_id[4:]
            return "\n".join(line for line in queued.splitlines() if name in line.split())
        return queued.strip()
    if queued.strip():
        return queued.strip()
    fields = "JobID,State,Elapsed,NNodes,ExitCode"
    words = ("sacct", "--jobs", job_id, "--allocations", "--noheader", "--parsable2")
    if accounted := _attempt((*words, "--format", fields)).strip():
        return accounted.replace("|", " ")
    values = _slurm_fields(run(client_of(job_id).logs))
    return f"{job_id} {values['JobState']} {values['RunTime']} {values['ExitCode']}"


def logs(job_id: str) -> str:
    """Return the output of a job."""
    output = run(client_of(job_id).logs)
    if not job_id.isdecimal():
        return output
    file = Path(_slurm_fields(output)["StdOut"])
    if not file.is_file():
        raise FileNotFoundError(f"job {job_id} has not written {file} yet: try again later.")
    return file.read_text(errors="replace")


def cancel(job_id: str) -> None:
    """End a job."""
    run(client_of(job_id).cancel)


def wait_for(
    job_id: str, artifact: Path, poll_s: float, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until a job has written a file or folder, then cancel the job.

    Raises:
        RuntimeError: if the job ends without writing ``artifact``.
    """
    while not artifact.exists():
        state = status(job_id)
        if _ENDED.search(state) and not artifact.exists():
            raise RuntimeError(f"job {job_id} ended without {artifact}: {state}")
        log.info("waiting for %s: %s", artifact, state or "no state yet")
        sleep(poll_s)
    log.info("%s exists; cancelling job %s", artifact, job_id)
    cancel(job_id)


def run(command: Sequence[str]) -> str:
    """Run a scheduler's program; return its output.

    Raises:
        RuntimeError: if the program is missing or fails, with its error message.
    """
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(
            f"{command[0]} is not on PATH: run this command on a host that has it."
        ) from None
    if result.returncode:
        message = (result.stderr or result.stdout).strip()
        raise RuntimeError(f"{' '.join(command)} failed with {result.returncode}: {message}")
    return result.stdout


def _attempt(command: Sequence[str]) -> str:
    """Run a program; return "" if it fails, since the scheduler has forgotten the job."""
    try:
        return run(command)
    except RuntimeError as error:
        log.debug("%s", error)
        return ""


def _slurm_fields(text: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in text.split())
    return {name: value for name, _, value in pairs}
