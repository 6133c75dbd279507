"""``launch local``: runs the hosts of a job as processes of this machine, with restarts.

Each simulated host runs the same host script as under a scheduler: an agent of torchrun and its
ranks. Ranks survive a killed agent; they become children of this process, which ends them
before the next attempt.
"""

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from mcore_parallel.launch.launcher import free_port, num_cores
from mcore_train.launching.config import LAUNCHER, TURN
from mcore_train.launching.job import Job, host_script
from mcore_train.launching.restarts import after_attempt

log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): orphaned descendants become children of this process."""
POLL_S = 0.1
PEERS_S = 30.0
"""Time for the other hosts to end after one host failed, so that their ranks report it too."""
GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    """The scripts of all hosts of one attempt."""

    logs: Path
    hosts: list[subprocess.Popen] = field(default_factory=list)

    @property
    def turn(self) -> Path:
        """File whose creation starts the training of a standby attempt."""
        # Outside of the logs, since triage reads all files in them.
        return self.logs.with_name(f"turn-of-{self.logs.name}")


def run_locally(job: Job, standby_after_s: float = 0.0) -> int:
    """Run a job's attempts on this host; return the job's exit code.

    SIGTERM and SIGINT let the ranks save and end, and the job is not restarted; a second
    SIGINT ends them at once.

    Args:
        job: job to run.
        standby_after_s: age of an attempt at which the next attempt is started, to wait;
            0: never.
    """
    logs = Path(job.log_dir) / f"{job.config.job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Hosts on one machine cannot differ.
    job = replace(job, config=replace(job.config, preflight=False))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    number, num_hosts = 0, job.config.nodes
    standby_after_s = standby_after_s if job.restarts.max_restarts else 0.0
    standby: _Attempt | None = None
    with _Signals() as signals:
        try:
            while True:
                folder = logs / f"attempt-{number}"
                if standby is not None and not _is_ready(standby, num_hosts):
                    _discard(standby)
                    standby = None
                attempt = standby or _Attempt(logs=folder)
                # Set before the start, since a signal may arrive at any time.
                signals.hosts = attempt.hosts
                if standby is None:
                    _start(job, attempt, num_hosts)
                else:
                    attempt.turn.touch()
                standby = None
                log.info("attempt %d, logs in %s", number, folder)
                if standby_after_s and not _has_ended_after(attempt, standby_after_s):
                    standby = _Attempt(logs=logs / f"attempt-{number + 1}")
                    _start(job, standby, num_hosts, waits=True)
                status, num_lost = _wait(attempt.hosts)
                _end(attempt, standby)
                num_hosts = _next_hosts(job, num_lost)
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
                number += 1
        finally:
            if standby is not None:
                _discard(standby)
            _end_all(set())


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


def _start(job: Job, attempt: _Attempt, num_hosts: int, *, waits: bool = False) -> None:
    """Start the script of each host; the ranks of a standby attempt wait."""
    config = job.config
    attempt.logs.mkdir(parents=True)
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NNODES": str(num_hosts),
        "MCORE_LOGS": str(attempt.logs),
        "OMP_NUM_THREADS": os.environ.get(
            "OMP_NUM_THREADS",
            str(max(1, num_cores() // (num_hosts * config.nproc_per_node))),
        ),
        **({TURN: str(attempt.turn), LAUNCHER: str(os.getpid())} if waits else {}),
    }
    script = host_script(job)
    for rank in range(num_hosts):
        host = subprocess.Popen(
            ["bash", "-c", script],
            env={**environment, "NODE_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        attempt.hosts.append(host)


def _is_ready(standby: _Attempt, num_hosts: int) -> bool:
    """Whether a standby attempt has the hosts of the next attempt, all alive."""
    return len(standby.hosts) == num_hosts and all(h.poll() is None for h in standby.hosts)


def _has_ended_after(attempt: _Attempt, seconds: float) -> bool:
    """Wait at most ``seconds`` for the end of a host; return whether one has ended."""
    deadline = time.monotonic() + seconds
    while (is_alive := all(h.poll() is None for h in attempt.hosts)) and (
        time.monotonic() < deadline
    ):
        time.sleep(POLL_S)
    return not is_alive


def _wait(hosts: list[subprocess.Popen]) -> tuple[int, int]:
    """Wait until all hosts end, or ``PEERS_S`` after a failure.

    Returns:
        0 or the exit code of the first host that failed, and the number of lost hosts, whose
        script was killed.
    """
    failed_s, status = 0.0, 0
    while any(host.poll() is None for host in hosts):
        codes = [host.returncode for host in hosts if host.returncode]
        if codes and not status:
            status, failed_s = codes[0], time.monotonic()
        if status and time.monotonic() - failed_s > PEERS_S:
            break
        time.sleep(POLL_S)
    status = status or next((host.returncode for host in hosts if host.returncode), 0)
    num_lost = sum(host.returncode == -signal.SIGKILL for host in hosts)
    return (status if status >= 0 else 128 - status), num_lost


def _end(attempt: _Attempt, standby: _Attempt | None) -> None:
    """End all remaining processes of an attempt, including orphaned ranks, but no standby."""
    _end_all({host.pid for host in standby.hosts} if standby is not None else set())
    for host in attempt.hosts:
        host.wait()


def _discard(standby: _Attempt) -> None:
    """Kill a standby attempt, which has not trained, and delete its folder."""
    for host in standby.hosts:
        for process in (*_descendants(host.pid, set()), host.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        host.wait()
    shutil.rmtree(standby.logs, ignore_errors=True)


def _end_all(spared: set[int]) -> None:
    """End the descendants of this process, except spared children and their descendants."""
    deadline = time.monotonic() + GRACE_S
    _signal_all(signal.SIGTERM, spared)
    while _descendants(os.getpid(), spared) and time.monotonic() < deadline:
        _reap()
        time.sleep(POLL_S)
    _signal_all(signal.SIGKILL, spared)
    _reap()


def _signal_all(number: int, spared: set[int]) -> None:
    for process in _descendants(os.getpid(), spared):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _descendants(process: int, spared: set[int]) -> list[int]:
    """List the descendants of a process, from /proc, except ``spared`` and theirs."""
    descendants = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in set(map(int, task.read_text().split())) - spared:
                descendants += [child, *_descendants(child, spared)]
    return descendants


def _reap() -> None:
    """Collect the exit codes of ended children, so that no zombies remain."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
