"""Seconds from a fault to the next step, from a hang to its detection, and what watching costs.

Each case starts a small job, lets a fault happen in it, and reads the times off its files:

- ``kill``: a rank is killed under ``mcore-train launch local``, which starts all ranks again;
- ``standby``: the same while the ranks of the next attempt wait (``--standby-after-s``);
- ``hang``: everything is watched, and a device stops in a step (without a GPU: a rank sleeps);
  until the rank is named, and until all ranks have ended (``--end-on-hang``);
- ``in_process``: a rank raises under ``--inprocess-restart``;
- ``peers``: one of two ranks is killed while the device of the other one waits for it; until
  both have ended. It needs two GPUs, or none.

``kill``, ``standby`` and ``in_process`` continue from a local checkpoint if
nvidia-resiliency-ext is installed; without it the first two continue from ``--save``, and
``in_process`` is left out. The
steps of ``hang`` before the fault, compared with those of ``kill``, are what watching costs.

Each case has a limit of its own besides that of all. A case that fails is reported with what it
waited for, and the others run while there is time. Every line that a job prints around a fault
is kept with its second, which shows where the time goes.

usage: bench_restart.py [--nproc 1] [--cases kill hang ...] [--limit-s 150] [--output DIR]
           -- FLAGS of gpt
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import reporting
import torch

from mcore_parallel.launch.launcher import free_port

SAVED_STEP, KILLED_STEP = 5, 8
"""Step that is saved, and the one after which ``kill`` kills and ``in_process`` raises."""
HUNG_STEP = 24
PEERS_STEP = 4
WARM_STEPS = 4
"""First steps, which are left out of medians."""
HANG_S = 45.0
LEAST_S = 15.0
"""With less time left than this, a case is not started."""
KEPT_LINES = 40
HAS_NVRX = importlib.util.find_spec("nvidia_resiliency_ext") is not None

FAULTY = '''
"""A training command in which one rank fails once, before a step."""
import os, signal, sys, time
from pathlib import Path
import torch
import mcore_train.loop as loop
from mcore_train.cli import main

KIND, STEP, NOTE = os.environ["FAULT"], int(os.environ["FAULT_STEP"]), Path(os.environ["NOTE"])
VICTIM = int(os.environ["WORLD_SIZE"]) - 1
one_step = loop.one_step


def occupy_device(seconds):
    if torch.cuda.is_available():
        torch.cuda._sleep(int(seconds * 2e9))  # cycles, at about 2 GHz
    elif KIND == "hang":
        time.sleep(seconds)


def faulty_step(run, *arguments):
    if run.progress.iteration == STEP and not NOTE.exists():
        is_victim = run.ctx.global_rank == VICTIM
        if is_victim and KIND == "raise":
            NOTE.write_text(str(time.time()))
            raise RuntimeError("a fault of the benchmark")
        if is_victim and KIND == "hang":
            NOTE.write_text(str(time.time()))
            occupy_device(float(os.environ["HANG_S"]))
        if KIND == "kill" and not is_victim:
            occupy_device(float(os.environ["HANG_S"]))
        if KIND == "kill" and is_victim:
            time.sleep(1)  # the others wait on their devices by then
            NOTE.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
    return one_step(run, *arguments)


if __name__ == "__main__":
    loop.one_step = faulty_step
    sys.exit(main(sys.argv[1:]))
'''


def main() -> None:
    """Run the cases; print a table and one JSON line, and keep the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    reporting.add_options(parser)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--limit-s", type=float, default=150.0, help="of all cases together")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    # Ends the case under way and its ranks; what was measured before is kept.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results: dict[str, dict] = {}
    try:
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_TMP")) as folder:
            run_cases(Path(folder), options, results)
    finally:
        print_table(results)
        shapes = {"nproc": options.nproc, "flags": " ".join(options.flags)}
        name = f"restart-x{options.nproc}{'' if torch.cuda.is_available() else '-cpu'}"
        head = {"name": name, **reporting.versions(options), **shapes}
        reporting.keep(options, {**head, **results})


def run_cases(folder: Path, options: argparse.Namespace, results: dict[str, dict]) -> None:
    """Run the cases one by one while there is time; put the result of each into ``results``."""
    ends_s = time.monotonic() + options.limit_s
    for name in options.cases:
        run, most_s = CASES[name]
        began_s = time.monotonic()
        left_s = ends_s - began_s
        if left_s < LEAST_S:
            results[name] = {"left_out": f"{left_s:.0f} s of {options.limit_s:.0f} s left"}
            continue
        limit_s = min(most_s, left_s)
        case = Case(folder / name, options.nproc, options.flags, limit_s)
        case.folder.mkdir()
        try:
            results[name] = run(case)
        except (RuntimeError, TimeoutError, OSError, StopIteration) as error:
            results[name] = {"failed": f"{type(error).__name__}: {error}"[:6000]}
        results[name]["case_s"] = round(time.monotonic() - began_s, 1)
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    if "step_ms" in results.get("kill", {}) and "step_ms" in results.get("hang", {}):
        cost = results["hang"]["step_ms"] / results["kill"]["step_ms"] - 1
        results["hang"]["watching_share_of_a_step"] = round(cost, 4)


def print_table(results: dict[str, dict]) -> None:
    """Print each figure beside its goal, and why a case has none."""
    print(f"{'case':12}{'figure':42}{'measured':>12}  goal")
    for name, result in results.items():
        for key in ("failed", "left_out"):
            if key in result:
                print(f"{name:12}{key}: {result[key].splitlines()[0][:150]}")
        for figure, number in result.items():
            if isinstance(number, float):
                goal = GOALS.get((name, figure), "")
                print(f"{name:12}{figure:42}{number:12.3f}  {goal}")


@dataclass(frozen=True, slots=True)
class Case:
    """Where, with what and how long one case runs."""

    folder: Path
    nproc: int
    flags: Sequence[str]
    limit_s: float


def kill(case: Case) -> dict:
    """Kill a rank of ``launch local``; until the first step of the next attempt has ended."""
    return kill_rank(case)


def standby(case: Case) -> dict:
    """Kill a rank while ranks of the next attempt wait (``--standby-after-s``)."""
    return kill_rank(case, "--standby-after-s", "5")


def kill_rank(case: Case, *options: str) -> dict:
    """Kill a rank of ``launch local`` with options; see ``kill`` and ``standby``."""
    run = case.folder / "run"
    launch = ["launch", "local", "--nproc-per-node", str(case.nproc), *options]
    launch += ["--restart-backoff-s", "0", "--", "gpt", *case.flags, *saving(case.folder)]
    with Job([sys.executable, "-m", "mcore_train", *launch], case) as job:
        job.wait_for_step(run, KILLED_STEP)
        if options:
            job.wait_for_line("this rank has imported its modules and waits")
        before = [p for p in job.processes() if not is_standby(p)]
        victim = next(p for p in before if is_rank(p, case.nproc - 1))
        os.kill(victim, signal.SIGKILL)
        killed_s = time.time()
        job.note.write_text(str(killed_s))
        rank_s = killed_s if options else job.wait_for_rank(before)
        job.wait_for_step(run, 1, attempt=2)
        took_s = time_of_step(run, 1, attempt=2) - killed_s
    first_s = time_of_step(run, 1, attempt=1) - job.began_s
    return {
        "fault_to_next_step_s": round(took_s, 2),
        "fault_to_start_of_rank_s": round(rank_s - killed_s, 2),
        "start_to_first_step_s": round(first_s, 2),
        "step_ms": step_ms(run),
        "continues_from": "local checkpoint" if HAS_NVRX else "--save",
        "start_s_of_attempts": [row["start_s"] for row in metrics(run) if row["kind"] == "run"],
        "start_lines": job.lines_from(job.began_s, job.began_s + first_s),
        "restart_lines": job.lines_from(killed_s, killed_s + took_s),
    }


def hang(case: Case) -> dict:
    """Let a device stop in a step, with everything watched, until ranks are named and end."""
    run = case.folder / "run"
    watching = ["--end-on-hang", "--log-straggler", "--straggler-interval", "5"]
    watching += ["--rerun-on-mismatch", "--health-port", str(free_port())]
    if case.nproc > 1:
        watching += ["--check-weight-hash-across-dp-replicas-interval", "10"]
    words = [*case.flags, *watching, f"--save={run}", *STEPS]
    with faulty_job("hang", HUNG_STEP, case, words) as job:
        told_s, told = job.wait_for_line("holds up step", "every rank is in a collective")
        detected_s = told_s - job.fault_s()
        job.wait_for_end()
        ended_s = time.time() - job.fault_s()
    result = {
        "hang_to_detection_s": round(detected_s, 2),
        "hang_to_end_of_ranks_s": round(ended_s, 2),
        "step_ms": step_ms(run),
        "told": told[:400],
    }
    # Ranks are scored against each other: a rank alone has no reports.
    if reports := [row["cost_ms"] for row in metrics(run) if row["kind"] == "stragglers"]:
        result["straggler_report_ms"] = round(statistics.median(reports[1:] or reports), 3)
    return result


def in_process(case: Case) -> dict:
    """Let a rank raise under ``--inprocess-restart``; until its next step has ended."""
    if not HAS_NVRX:
        return {"left_out": "nvidia-resiliency-ext is not installed"}
    run = case.folder / "run"
    words = [*case.flags, *saving(case.folder), "--inprocess-restart", "--auto-resume"]
    with faulty_job("raise", KILLED_STEP, case, words) as job:
        job.wait_for_step(run, 1, attempt=2)
        took_s = time_of_step(run, 1, attempt=2) - job.fault_s()
    return {
        "fault_to_next_step_s": round(took_s, 2),
        "step_ms": step_ms(run),
        # The second is as the first if the old run was freed before the new one was built.
        "peak_gib_of_attempts": [peak_gib(run, attempt) for attempt in (1, 2)],
        "restart_lines": job.lines_from(job.fault_s(), job.fault_s() + took_s),
    }


def peers(case: Case) -> dict:
    """Kill one of two ranks while the device of the other waits; until both have ended."""
    sizes = {
        "--num-layers": "2",
        "--hidden-size": "512",
        "--ffn-hidden-size": "2048",
        "--num-attention-heads": "8",
        "--num-query-groups": "8",
        "--global-batch-size": "2",
    }
    words = [word for word in case.flags if word != "--use-distributed-optimizer"]
    for flag, value in sizes.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    words += [f"--save={case.folder / 'run'}", *STEPS]
    if torch.cuda.device_count() == 1:
        raise RuntimeError("two ranks need two GPUs: NCCL refuses to share one")
    with faulty_job("kill", PEERS_STEP, case, words, nproc=2) as job:
        job.wait_for_end()
        ended_s = time.time() - job.fault_s()
    return {
        "kill_to_end_of_ranks_s": round(ended_s, 2),
        "lines": job.lines_from(job.fault_s(), job.fault_s() + ended_s),
    }


CASES: dict[str, tuple[Callable[[Case], dict], float]] = {
    "kill": (kill, 110.0),
    "standby": (standby, 110.0),
    "in_process": (in_process, 80.0),
    "hang": (hang, 70.0),
    "peers": (peers, 60.0),
}
"""Each case, and the most seconds that it takes."""
GOALS = {
    ("kill", "fault_to_next_step_s"): "20 s",
    ("standby", "fault_to_next_step_s"): "20 s",
    ("in_process", "fault_to_next_step_s"): "5 s",
    ("hang", "hang_to_detection_s"): "two steps and 10 s",
    ("peers", "kill_to_end_of_ranks_s"): "below the 30 s of torchrun",
}
STEPS = ("--train-iters=10000", "--log-interval=1")


def saving(folder: Path) -> list[str]:
    """Return the flags by which a run saves one step: locally, if that is possible."""
    words = [f"--save={folder / 'run'}", *STEPS]
    if not HAS_NVRX:
        return [*words, f"--save-interval={SAVED_STEP}"]
    local = f"--non-persistent-local-ckpt-dir={folder / 'local'}"
    return [*words, local, f"--non-persistent-save-interval={SAVED_STEP}"]


class Job:
    """A job of several processes; none of them outlives the context."""

    def __init__(self, command: list[str], case: Case, **variables: str) -> None:
        self.note = case.folder / "note"
        self.began_s = time.time()
        self._mark = f"BENCH_JOB={case.folder}"
        self._deadline = time.monotonic() + case.limit_s
        self._lines: list[tuple[float, str]] = []
        marks = {"BENCH_JOB": str(case.folder), "NOTE": str(self.note)}
        quiet = {"NCCL_NVLS_ENABLE": "0", "HANG_S": str(HANG_S), "PYTHONUNBUFFERED": "1"}
        quiet["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, **marks, **quiet, **variables},
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.1)
        self.process.wait()

    def processes(self) -> list[int]:
        """List the living processes of the job, by a variable that all of them inherit."""
        numbers = [int(f.name) for f in Path("/proc").iterdir() if f.name.isdecimal()]
        mark = self._mark.encode()
        return [n for n in numbers if mark in variables_of(n) and n != os.getpid()]

    def fault_s(self) -> float:
        """Return when the fault happened."""
        if not self.note.exists():
            raise RuntimeError(f"no fault happened: {self._tail()}")
        return float(self.note.read_text())

    def wait_for_step(self, run: Path, step: int, attempt: int = 1) -> None:
        """Wait until an attempt has reported a step."""
        while not time_of_step(run, step, attempt):
            self._check(f"step {step} of attempt {attempt}")

    def wait_for_rank(self, before: Sequence[int]) -> float:
        """Wait for a first rank that is none of the processes ``before``; return when."""
        while not any(is_rank(p, 0) for p in set(self.processes()) - set(before)):
            self._check("the start of a new rank 0")
        return time.time()

    def wait_for_line(self, *texts: str) -> tuple[float, str]:
        """Wait until the job prints one of the texts; return when, and the line."""
        while True:
            for line_s, line in list(self._lines):
                if any(text in line for text in texts):
                    return line_s, line
            self._check(f"a line with {' or '.join(map(repr, texts))}")

    def wait_for_end(self) -> None:
        """Wait until no process of the job is left."""
        while self.process.poll() is None or self.processes():
            if time.monotonic() > self._deadline:
                raise self._late("the end of all ranks")
            time.sleep(0.05)

    def lines_from(
        self, begin_s: float, end_s: float, num_lines: int | None = KEPT_LINES
    ) -> list[str]:
        """Return the first lines that the job printed in a time, each with its second.

        Lines of the stack of torchrun's agent are left out.
        """
        lines = [
            f"+{line_s - begin_s:.2f} {line[:160]}"
            for line_s, line in self._lines
            if begin_s <= line_s <= end_s + 0.5 and line[:1] not in ("", " ", "=", "-")
        ]
        return lines[:num_lines]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append((time.time(), line.rstrip()))

    def _tail(self) -> str:
        lines = self.lines_from(self.began_s, time.time(), num_lines=None)
        return "\n".join(lines[-KEPT_LINES:])

    def _late(self, awaited: str) -> TimeoutError:
        fault = "no fault yet"
        if self.note.exists():
            fault = f"the fault was at +{self.fault_s() - self.began_s:.1f} s"
        limit_s = time.time() - self.began_s
        return TimeoutError(
            f"waited for {awaited} until the limit of {limit_s:.0f} s; {fault}. The last lines "
            f"of the job, with their seconds since its start:\n{self._tail()}"
        )

    def _check(self, awaited: str) -> None:
        if self.process.poll() is not None:
            time.sleep(0.5)  # the last lines
            code = self.process.returncode
            raise RuntimeError(f"the job ended with {code} before {awaited}:\n{self._tail()}")
        if time.monotonic() > self._deadline:
            raise self._late(awaited)
        time.sleep(0.02)


def faulty_job(
    kind: str,
    step: int,
    case: Case,
    words: Sequence[str],
    nproc: int | None = None,
    **variables: str,
) -> Job:
    """Start the ranks of a training command, the last of which fails before a step."""
    script = case.folder / "faulty.py"
    script.write_text(FAULTY)
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
    command += ["--nproc-per-node", str(nproc or case.nproc), str(script), "gpt", *words]
    return Job(command, case, FAULT=kind, FAULT_STEP=str(step), **variables)


def metrics(run: Path) -> list[dict]:
    """Read the rows that a run has reported; the last line may be half written."""
    file = run / "metrics.jsonl"
    rows = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def time_of_step(run: Path, step: int, attempt: int) -> float:
    """Return when an attempt had first ended a step from ``step`` on; 0: not yet."""
    for row in metrics(run):
        if row["kind"] == "train" and row["attempt"] == attempt and row["iteration"] >= step:
            return row["time"]
    return 0.0


def peak_gib(run: Path, attempt: int) -> float:
    """Return the most memory that the first rank had taken on its device in an attempt."""
    rows = [row for row in metrics(run) if row["kind"] == "train" and row["attempt"] == attempt]
    return max(row["peak_gib"] for row in rows)


def step_ms(run: Path) -> float:
    """Return the median step of the first attempt, in milliseconds."""
    rows = [row for row in metrics(run) if row["kind"] == "train" and row["attempt"] == 1]
    return round(statistics.median(row["step_ms"] for row in rows[WARM_STEPS:]), 3)


def variables_of(process: int) -> list[bytes]:
    """Return the environment that a process was started with; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def is_standby(process: int) -> bool:
    """Whether a process was started for a later attempt, which waits or waited."""
    return any(v.startswith(b"MCORE_TURN=") for v in variables_of(process))


def is_rank(process: int, local_rank: int) -> bool:
    """Whether a process trains as a rank, and is no worker or child of one."""
    if f"LOCAL_RANK={local_rank}".encode() not in variables_of(process):
        return False
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # it has ended
        return False
    parent = next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))
    return not any(v.startswith(b"LOCAL_RANK=") for v in variables_of(parent))


if __name__ == "__main__":
    main()
