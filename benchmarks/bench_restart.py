"""Seconds from a fault to the next step, and from a hang to its detection.

Each case starts a small job, lets a fault happen in it, and reads the times off its files:

- ``kill``: a rank is killed under ``mcore-train launch local``, which starts all ranks again;
- ``in_process``: a rank raises under ``--inprocess-restart``, with and without local
  checkpoints (needs nvidia-resiliency-ext, else the case is reported as left out);
- ``hang``: a rank sleeps under ``--end-on-hang``; until the ranks that wait name it;
- ``rerun``: ``--rerun-on-mismatch`` against the same steps without it.

``kill`` runs with ``--log-straggler``, whose cost is part of its records.

usage: bench_restart.py [--nproc 2] [--cases kill hang ...] [--output DIR] -- FLAGS of gpt
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import reporting
import torch

STEP = 12
"""Steps before the fault."""
LAST_STEP = 24
LIMIT_S = 110.0
"""For each case."""
FAULTY = """
import os, sys, time
from pathlib import Path
import mcore_train.loop as loop
from mcore_train.cli import main

kind, step, note = os.environ["FAULT"], int(os.environ["FAULT_STEP"]), Path(os.environ["NOTE"])
one_step = loop.one_step

def faulty(run, *arguments):
    if run.progress.iteration == step and run.ctx.global_rank == 1 and not note.exists():
        note.write_text(str(time.time()))
        if kind == "raise":
            raise RuntimeError("a fault of the benchmark")
        if kind == "hang":
            time.sleep(600)
    return one_step(run, *arguments)

loop.one_step = faulty
sys.exit(main(sys.argv[1:]))
"""


def main() -> None:
    """Run the cases; print and keep one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    reporting.add_options(parser)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_TMP")) as folder:
        for name in options.cases:
            began_s = time.monotonic()
            try:
                result = CASES[name](Path(folder) / name, options.nproc, options.flags)
            except (RuntimeError, TimeoutError) as error:
                result = {"failed": str(error)[-2000:]}
            found[name] = {**result, "case_s": round(time.monotonic() - began_s, 1)}
            print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    shapes = {"nproc": options.nproc, "flags": " ".join(options.flags), "fault_step": STEP}
    name = f"restart-x{options.nproc}{'' if torch.cuda.is_available() else '-cpu'}"
    reporting.keep(options, {"name": name, **reporting.versions(options), **shapes, **found})


def kill(folder: Path, nproc: int, flags: list[str]) -> dict:
    """Kill a rank of ``launch local``; until the first step of the next attempt."""
    run = folder / "run"
    words = ["launch", "local", "--nproc-per-node", str(nproc), "--restart-backoff-s", "0"]
    words += [
        "--",
        "gpt",
        *flags,
        *_saving(run),
        "--log-straggler",
        "--straggler-interval",
        "5",
    ]
    job = Job([sys.executable, "-m", "mcore_train", *words], folder)
    with job:
        job.wait_for(run, STEP, attempt=1)
        victims = [p for p in _ranks(run) if b"LOCAL_RANK=1\0" in _environ(p)]
        os.kill(victims[0], signal.SIGKILL)
        killed_s = time.time()
        job.wait_for(run, 1, attempt=2)
        took_s = time.time() - killed_s
        job.end()
    rows = [row for row in _metrics(run) if row["kind"] == "stragglers"]
    cost_ms = statistics.median(row["cost_ms"] for row in rows[1:] or rows)
    return {
        "kill_to_next_step_s": round(took_s, 2),
        "straggler_report_ms": round(cost_ms, 3),
        "step_ms": round(_step_ms(run), 3),
        "straggler_share_every_10_steps": round(cost_ms / (10 * _step_ms(run)), 5),
    }


def in_process(folder: Path, nproc: int, flags: list[str]) -> dict:
    """Let a rank raise under ``--inprocess-restart``, from lasting and local checkpoints."""
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        return {"left_out": "nvidia-resiliency-ext is not installed"}
    found = {}
    for name, more in {
        "from_save": [],
        "from_local_checkpoint": [
            *("--non-persistent-local-ckpt-dir", str(folder / "local")),
            *("--non-persistent-save-interval", "3"),
        ],
    }.items():
        run = folder / name
        words = [*flags, *_saving(run), *more, "--inprocess-restart", "--auto-resume"]
        job = _faulty_job("raise", folder / f"job-{name}", nproc, words)
        with job:
            job.wait_for(run, 1, attempt=2)
            found[f"raise_to_next_step_{name}_s"] = round(time.time() - job.fault_s(), 2)
            job.end()
    return found


def hang(folder: Path, nproc: int, flags: list[str]) -> dict:
    """Let a rank sleep; until another rank names it."""
    run = folder / "run"
    words = [*flags, *_saving(run), "--end-on-hang"]
    job = _faulty_job("hang", folder, nproc, words)
    with job:
        told = job.wait_for_text("holds up step")
        took_s = time.time() - job.fault_s()
        job.process.wait(60)
        ended_s = time.time() - job.fault_s()
    return {
        "hang_to_detection_s": round(took_s, 2),
        "hang_to_end_of_ranks_s": round(ended_s, 2),
        "step_ms": round(_step_ms(run), 3),
        "told": told,
    }


def rerun(folder: Path, nproc: int, flags: list[str]) -> dict:
    """Time the steps of one run with ``--rerun-on-mismatch`` and of one without."""
    found = {}
    for name, more in {"without": [], "with": ["--rerun-on-mismatch"]}.items():
        run = folder / name
        job = _faulty_job("none", folder / f"job-{name}", nproc, [*flags, *_saving(run), *more])
        with job:
            job.wait_for(run, LAST_STEP, attempt=1)
            job.process.wait(60)
        found[f"step_ms_{name}"] = round(_step_ms(run), 3)
    found["cost_share"] = round(found["step_ms_with"] / found["step_ms_without"] - 1, 4)
    return found


CASES = {"kill": kill, "in_process": in_process, "hang": hang, "rerun": rerun}


class Job:
    """A job of several processes, all of which end with the context; its output is a file."""

    def __init__(self, command: list[str], folder: Path, **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self.note = folder / "log", folder / "note"
        self._deadline = time.monotonic() + LIMIT_S
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "NOTE": str(self.note),
                    "NCCL_NVLS_ENABLE": "0",
                    **variables,
                },
                start_new_session=True,
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Let the ranks save and end, as SIGTERM does."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)

    def fault_s(self) -> float:
        """Return when the fault happened."""
        return float(self.note.read_text())

    def wait_for(self, run: Path, step: int, attempt: int) -> None:
        """Wait until an attempt has reported a step."""
        while not any(
            row["kind"] == "train" and row["iteration"] >= step and row["attempt"] >= attempt
            for row in _metrics(run)
        ):
            self._check()

    def wait_for_text(self, text: str) -> str:
        """Wait until the output has a text; return its line."""
        while True:
            lines = [x for x in self.log.read_text(errors="replace").splitlines() if text in x]
            if lines:
                return lines[0][:400]
            self._check()

    def _check(self) -> None:
        if self.process.poll() is not None:
            tail = self.log.read_text(errors="replace")[-1500:]
            raise RuntimeError(f"the job ended with {self.process.returncode}: {tail}")
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"not within {LIMIT_S} s: {self.log.read_text()[-1500:]}")
        time.sleep(0.02)


def _faulty_job(kind: str, folder: Path, nproc: int, words: list[str]) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "faulty.py"
    script.write_text(FAULTY)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
    command += ["--master-port", str(_free_port()), str(script), "gpt", *words]
    return Job(command, folder, FAULT=kind, FAULT_STEP=str(STEP))


def _saving(run: Path) -> list[str]:
    shutil.rmtree(run, ignore_errors=True)
    numbers = {"train-iters": LAST_STEP, "save-interval": STEP - 2, "log-interval": 1}
    numbers |= {"save-retain-last": 1}
    return [f"--save={run}", *(f"--{name}={value}" for name, value in numbers.items())]


def _metrics(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # it is being written
    return found


def _step_ms(run: Path) -> float:
    times = [row["step_ms"] for row in _metrics(run) if row["kind"] == "train"]
    return statistics.median(times[3:] or times)


def _ranks(run: Path) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and b"LOCAL_RANK=" in _environ(int(folder.name)):
            words = (folder / "cmdline").read_bytes()
            if str(run).encode() in words and b"torch.distributed.run" not in words:
                found.append(int(folder.name))
    return found


def _environ(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return b""


def _free_port() -> int:
    from mcore_parallel.launch.launcher import free_port

    return free_port()


if __name__ == "__main__":
    main()
