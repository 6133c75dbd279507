"""What ends a job from outside: a kill leaves a whole step, SIGTERM to all of it saves one."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from warm_ranks import run_command

from mcore_ckpt.conversion.inspection import check
from mcore_ckpt.storage.folder_lock import LOCK
from mcore_ckpt.storage.paths import complete_steps, latest_step

SHAPE = [
    *("--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 4),
    *("--vocab-size", 500, "--tensor-model-parallel-size", 2),
]
RUN = [
    *("--mock-data", "--num-workers", 0, "--device", "cpu", "--seq-length", 8, "--lr", 1e-3),
    *("--micro-batch-size", 1, "--global-batch-size", 1, "--save-interval", 1),
    *("--log-interval", 1000, "--save-retain-last", 3, "--nproc", 2, "--train-iters", 100_000),
]


def killed_after(seconds, run, words):
    """Start the job; once it saves, give it so many seconds more, then kill its processes."""
    before = latest_step(run)
    command = [sys.executable, "-m", "mcore_train", "gpt", *SHAPE, *RUN, *words]
    job = subprocess.Popen(
        [str(word) for word in (*command, "--save", run, "--load", run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while latest_step(run) == before:
            assert job.poll() is None, job.communicate()[0]
            assert time.monotonic() < deadline, "nothing was saved"
            time.sleep(0.01)
        time.sleep(seconds)
        assert job.poll() is None, job.communicate()[0]
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


@pytest.mark.crash
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [[], ["--async-save"]], ids=["sync", "async"])
def test_each_kill_leaves_a_whole_step_that_the_next_start_goes_on_from(tmp_path, words):
    draw = random.Random(5)
    newest = 0
    for _ in range(6):
        killed_after(draw.uniform(0, 1.5), tmp_path, words)
        step = latest_step(tmp_path)
        assert step > newest
        newest = step
        # Every byte of the newest has its checksum, and of the older ones that are kept.
        check(tmp_path)
        assert step in complete_steps(tmp_path)
        assert (tmp_path / LOCK).exists()


TERMINATED = """
import os, signal, sys, threading, time
from pathlib import Path
from mcore_train.cli import main
os.setsid()
metrics = Path(sys.argv[sys.argv.index("--save") + 1]) / "metrics.jsonl"
def end_the_job():  # as timeout does: the process, then its group, in which it is itself
    while not (metrics.is_file() and '"kind": "train"' in metrics.read_text()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    os.killpg(0, signal.SIGTERM)
threading.Thread(target=end_the_job, daemon=True).start()
sys.exit(main(["gpt", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    "layout",
    [
        [],
        pytest.param(
            ["--tensor-model-parallel-size", 2, "--nproc", 2], marks=pytest.mark.crash
        ),
    ],
    ids=["one", "tp2"],
)
def test_sigterm_to_the_process_group_saves_the_step_that_is_under_way(
    tmp_path, monkeypatch, layout
):
    (tmp_path / "terminated.py").write_text(TERMINATED)
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "run"
    words = [*SHAPE[:-2], *RUN[:-4], "--train-iters", 100_000, "--num-workers", 2, *layout]
    words[words.index("--save-interval") + 1] = 100_000
    done = run_command("terminated", *words, "--save", run, is_ours=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"stopping after iteration {latest_step(run)}" in done.stdout
    check(run)
