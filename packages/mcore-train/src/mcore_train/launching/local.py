"""``launch local``: runs the hosts of a job as processes of this machine, with restarts.

Each simulated host runs the same host script as under a scheduler: an agent of torchrun and its
ranks. Ranks survive a killed agent; they become children of this process, which ends them
before the next attempt.
"""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from mcore_parallel.launch.launcher import free_port, num_cores
from mcore_train.launching.job import Job, host_script
from mcore_train.launching.restarts import after_attempt

log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): orphaned descendants become children of this process."""
POLL_S = 0.1
PEERS_S = 30.0
"""Time for the other hosts to end after one host failed, so that their ranks report it too."""
GRACE_S = 10.0


def run_locally(job: Job) -> int:
    """Run a job's attempts on this host; return the job's exit code.

    SIGTERM and SIGINT let the ranks save and end, and the job is not restarted; a second
    SIGINT ends them at once.
    """
    logs = Path(job.log_dir) / f"{job.config.job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    job = replace(
        job, config=replace(job.config, preflight=False)
    )  # one machine: no difference
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    attempt, hosts = 0, job.config.nodes
    with _Signals() as signals:
        while True:
            folder = logs / f"attempt-{attempt}"
            folder.mkdir(parents=True)
            log.info("attempt %d, logs in %s", attempt, folder)
            status, num_lost = _run_attempt(job, folder, signals, hosts)
            hosts = _next_hosts(job, num_lost)
            if signals.received and status == 0:
                return 0
            answer = after_attempt(
                folder,
                status,
                save=job.save,
                last_step=job.train_iters,
                max_restarts=0 if signals.received else job.restarts.max_restarts,
                backoff_s=job.restarts.restart_backoff_s,
            )
            if answer.word in ("finished", "requeue"):
                return 0
            if answer.word == "stop":
                return int(answer.number)
            if not signals.wait(answer.number):
                return status
            attempt += 1


class _Signals:
    """Context manager that sends SIGTERM to the host scripts on SIGTERM, SIGINT and SIGUSR1."""

    def __init__(self) -> None:
        self.hosts: list[subprocess.Popen] = []
        self.received = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyrefly: ignore

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = True
        for host in self.hosts:
            if host.poll() is None:
                host.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Wait; return False if a signal was received."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.received:
            time.sleep(POLL_S)
        return not self.received


def _next_hosts(job: Job, num_lost: int) -> int:
    """Return the number of hosts of the next attempt; lost hosts return one attempt later."""
    num_left = job.config.nodes - num_lost
    fitting = [hosts for hosts in job.layouts if hosts <= num_left]
    hosts = max(fitting, default=job.config.nodes)
    if hosts != job.config.nodes:
        log.info("%d of %d hosts are lost: using %d", num_lost, job.config.nodes, hosts)
    return hosts


def _run_attempt(job: Job, logs: Path, signals: _Signals, num_hosts: int) -> tuple[int, int]:
    """Start the script of each host once and wait.

    Returns:
        0 or the exit code of the first host that failed, and the number of lost hosts, whose
        script was killed.
    """
    config = job.config
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NNODES": str(num_hosts),
        "MCORE_LOGS": str(logs),
        "OMP_NUM_THREADS": os.environ.get(
            "OMP_NUM_THREADS",
            str(max(1, num_cores() // (num_hosts * config.nproc_per_node))),
        ),
    }
    script = host_script(job)
    with _end_processes(signals):
        for rank in range(num_hosts):
            host = subprocess.Popen(
                ["bash", "-c", script],
                env={**environment, "NODE_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            signals.hosts.append(host)
        status = _wait(signals.hosts)
        return status, sum(host.poll() == -signal.SIGKILL for host in signals.hosts)


def _wait(hosts: list[subprocess.Popen]) -> int:
    """Wait until all hosts end, or ``PEERS_S`` after a failure; return the exit code."""
    failed_s, status = 0.0, 0
    while any(host.poll() is None for host in hosts):
        codes = [host.returncode for host in hosts if host.returncode]
        if codes and not status:
            status, failed_s = codes[0], time.monotonic()
        if status and time.monotonic() - failed_s > PEERS_S:
            break
        time.sleep(POLL_S)
    status = status or next((host.returncode for host in hosts if host.returncode), 0)
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _end_processes(signals: _Signals) -> Iterator[None]:
    """On exit, end all remaining processes of an attempt, including orphaned ranks."""
    try:
        yield
    finally:
        deadline = time.monotonic() + GRACE_S
        _signal_all(signal.SIGTERM)
        while _descendants(os.getpid()) and time.monotonic() < deadline:
            _reap()
            time.sleep(POLL_S)
        _signal_all(signal.SIGKILL)
        for host in signals.hosts:
            host.wait()
        signals.hosts.clear()
        _reap()


def _signal_all(number: int) -> None:
    for process in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _descendants(process: int) -> list[int]:
    """List the descendants of a process, from /proc."""
    descendants = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                descendants += [child, *_descendants(child)]
    return descendants


def _reap() -> None:
    """Collect the exit codes of ended children, so that no zombies remain."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
