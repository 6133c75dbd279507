"""nvidia-resiliency-ext in a run: in-process restarts, ft_launcher: `nox -s resiliency`."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_ckpt.storage.paths import step_folder
from mcore_parallel.launch.launcher import free_port

pytest.importorskip("nvidia_resiliency_ext")
HERE = Path(__file__).parent
LAST_STEP = 12
TRAINING = [
    *("gpt", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--vocab-size", "64", "--seq-length", "16", "--micro-batch-size", "1"),
    *("--global-batch-size", "4", "--hidden-dropout", "0.1", "--mock-data"),
    *("--num-workers", "0", "--device", "cpu", "--lr", "1e-3", "--log-interval", "1"),
    *("--train-iters", str(LAST_STEP), "--save-interval", "4"),
]
IN_PROCESS = [
    *("--inprocess-restart", "--auto-resume", "--inprocess-soft-timeout", "6"),
    *("--inprocess-hard-timeout", "40", "--inprocess-heartbeat-interval", "1"),
]


def train(folder, fault, *words, step=7):
    """Train on two ranks of torchrun; return exit code and output."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", "2", "--master-port", str(free_port())]
    command += [str(HERE / "faulty_run.py"), *TRAINING, "--save", str(folder / "run"), *words]
    variables = {"FAULT": fault, "FAULT_STEP": str(step), "NOTE": str(folder / "note")}
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    return done.returncode, done.stdout + done.stderr


def weights_of(folder):
    last = step_folder(folder / "run", LAST_STEP)
    return {f.name: f.read_bytes() for f in sorted(last.glob("*.safetensors"))}


def reports_of(folder):
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    code, text = train(folder, "none")
    assert code == 0, text
    return weights_of(folder)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", []),
        ("hang", []),
        (
            "raise",
            [
                *("--non-persistent-local-ckpt-dir", "LOCAL"),
                *("--non-persistent-save-interval", "3"),
            ],
        ),
    ],
    ids=["raise", "hang", "local checkpoint"],
)
def test_ranks_restart_in_their_processes_and_end_at_the_same_weights(
    tmp_path, undisturbed, fault, words
):
    words = [str(tmp_path / "local") if word == "LOCAL" else word for word in words]
    code, text = train(tmp_path, fault, *IN_PROCESS, *words)
    assert code == 0, text
    assert len(re.findall(r"process \d+ of rank", text)) == 2  # nothing was started again
    assert "restart 1 in the same processes" in text
    assert weights_of(tmp_path) == undisturbed
    rows = reports_of(tmp_path)
    # Rank 1 fails in step 8; the step that is continued from is lasting or local.
    first = next(row for row in rows if row["attempt"] == 2)
    assert first["iteration"] == (7 if words else 5)


def test_bad_options_end_all_ranks_at_once(tmp_path):
    began_s = time.monotonic()
    missing = ("--load", str(tmp_path / "nowhere"), "--exit-on-missing-checkpoint")
    code, text = train(tmp_path, "none", *IN_PROCESS, "--seq-length", "17", *missing)
    assert code != 0
    assert "restart 1 in" not in text
    assert time.monotonic() - began_s < 100


@pytest.mark.timeout(240)
def test_ft_launcher_ends_a_rank_whose_step_takes_too_long(tmp_path, undisturbed):
    """``launch local`` starts ft_launcher; sections and timeouts are those of the run."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.environ.get('FT_RANK_MONITOR_IPC_SOCKET') and 'RANK' in os.environ:\n"
        f"    sys.path.insert(0, {str(HERE)!r})\n"
        "    import faulty_run\n"
        "    faulty_run.loop.one_step = faulty_run.faulty_step\n"
    )
    command = [sys.executable, "-m", "mcore_train", "launch", "local", "--nproc-per-node", "2"]
    command += ["--ft-rank-section-timeouts", "setup:60,step:5,checkpointing:60"]
    command += ["--restart-backoff-s", "0.5", "--", *TRAINING, "--save", str(tmp_path / "run")]
    command += ["--enable-ft-package", "--calc-ft-timeouts", "--ft-num-warmup-iters", "2"]
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    variables = {"FAULT": "hang", "FAULT_STEP": "7", "NOTE": str(tmp_path / "note")}
    done = subprocess.run(
        command,
        env={**os.environ, **variables, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights_of(tmp_path) == undisturbed
    (history,) = tmp_path.glob("run/logs/*/attempts.jsonl")
    words = [json.loads(line)["word"] for line in history.read_text().splitlines()]
    assert words == ["retry", "finished"]
