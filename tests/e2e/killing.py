"""Jobs that are killed again and again, and the weights they end with."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from mcore_ckpt.storage.paths import complete_steps, latest_step, step_folder
from mcore_train.launching.config import TURN

LAST_STEP = 40
TRAINING = [
    *("gpt", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--vocab-size", "64", "--seq-length", "16", "--micro-batch-size", "1"),
    *(
        "--global-batch-size",
        "4",
        "--tensor-model-parallel-size",
        "2",
        "--hidden-dropout",
        "0.1",
    ),
    *("--mock-data", "--num-workers", "0", "--device", "cpu", "--lr", "1e-3"),
    *("--train-iters", str(LAST_STEP), "--save-interval", "2", "--log-interval", "1"),
    *("--eval-interval", "2", "--eval-iters", "4", "--distributed-timeout-minutes", "1"),
]
"""A GPT on 4 ranks that saves and validates every second step."""
KINDS = ("one rank", "all ranks", "agent", "during a save", "during validation")


def processes_of(run: Path) -> dict[str, list[int]]:
    """List the processes that train into a run folder, ranks apart from torchrun's agents.

    Those of a standby, which waits, are left out.
    """
    found: dict[str, list[int]] = {"ranks": [], "agents": []}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if str(run) not in words or "bash" in words[0]:
                continue
            kind = "agents" if "torch.distributed.run" in words else "ranks"
            environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            variables = dict(pair.partition("=")[::2] for pair in environ)
            if TURN in variables and not Path(variables[TURN]).exists():
                continue
            if kind == "agents" or "LOCAL_RANK" in variables:
                found[kind].append(int(folder.name))
    return found


def kill_at(
    kind: str, run: Path, draw: random.Random, check_alive: Callable[[], None] = lambda: None
) -> str:
    """Wait for a newly saved step and the moment of a kill, and kill; return what was done.

    Args:
        kind: one of ``KINDS``.
        run: folder that the job saves to.
        draw: chooses the victims.
        check_alive: raises once the job is over.
    """
    deadline = time.monotonic() + 240.0
    before = latest_step(run) or 0
    while (latest_step(run) or 0) == before:
        check_alive()
        assert time.monotonic() < deadline, "no step was saved"
        time.sleep(0.01)
    while True:
        assert time.monotonic() < deadline, f"no moment for a kill {kind}"
        found = processes_of(run)
        if len(found["ranks"]) == 4 and len(found["agents"]) == 2 and _is_moment(kind, run):
            break
        time.sleep(0.002 if kind.startswith("during") else 0.1)
    if not kind.startswith("during"):
        time.sleep(draw.uniform(0, 1.5))
    victims = found["ranks"] if kind != "agent" else [draw.choice(found["agents"])]
    if kind in ("one rank", "during a save", "during validation"):
        victims = [draw.choice(found["ranks"])]
    for process in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return f"{kind}: {len(victims)} killed after step {max(complete_steps(run), default=0)}"


def lose_host(run: Path, number: int) -> None:
    """Kill the script, the agent and the ranks of one host of ``launch local``."""
    host = f"NODE_RANK={number}".encode()
    victims = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            logs = [v for v in variables if v.startswith(b"MCORE_LOGS=")]
            if host in variables and logs and str(run).encode() in logs[0]:
                victims.append(int(folder.name))
    for process in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _is_moment(kind: str, run: Path) -> bool:
    """Whether a save is under way, or a step is saved and not validated yet."""
    steps = complete_steps(run)
    if kind == "during a save":
        folders = [f for f in run.glob("iter_*") if ".garbage" not in f.name]
        return any(not (f / "index.json").exists() for f in folders)
    if kind == "during validation":
        log = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
        newest = max(steps, default=0)
        validated = any(
            '"kind": "valid"' in line and f'"iteration": {newest},' in line
            for line in log.splitlines()
        )
        return bool(newest) and not validated
    return True


def weights_of(run: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor file of a run's last step."""
    folder = step_folder(run, LAST_STEP)
    return {f.name: f.read_bytes() for f in sorted(folder.glob("*.safetensors"))}
