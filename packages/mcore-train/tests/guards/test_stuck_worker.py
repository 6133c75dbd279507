"""A data worker that stands still is found by the watch, and ends the run if it may."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = """gpt --device cpu --model tiny --mock-data --seq-length 32 --micro-batch-size 1
    --global-batch-size 1 --lr 1e-3 --train-iters 100000 --num-workers 1 --end-on-hang
    --log-interval 1"""


@pytest.mark.slow
def test_a_data_worker_that_stands_still_ends_the_run_with_the_line_that_waits(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    call = [sys.executable, "-m", "mcore_train", *RUN.split(), "--metrics-file", str(metrics)]
    log = tmp_path / "log"  # a pipe would stay open in the worker that stands still
    with log.open("w") as output:
        run = subprocess.Popen(call, stdout=output, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count('"train"') > 8):
        assert run.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    workers = [
        int(child)
        for child in children
        if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    assert workers
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        code = run.wait(timeout=120)
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
    text = log.read_text()
    assert code == 1, text
    assert "rank 0 holds up step" in text
    assert "loader" in text
