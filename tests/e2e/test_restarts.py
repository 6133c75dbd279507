"""Killed jobs end at the weights of an uninterrupted one, bitwise."""

import json
import random
import subprocess
import sys
import time

import pytest
from e2e.killing import KINDS, LAST_STEP, TRAINING, kill_at, processes_of, weights_of

LAUNCH = [
    *(sys.executable, "-m", "mcore_train", "launch", "local", "--nodes", "2"),
    *("--nproc-per-node", "2", "--max-restarts", "3", "--restart-backoff-s", "0.5", "--"),
]


def start(run):
    """Start a job of 2 x 2 ranks; its output goes beside the run folder."""
    run.parent.mkdir(parents=True, exist_ok=True)
    command = [*LAUNCH, *TRAINING, "--save", str(run)]
    with run.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=run.parent)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert start(run).wait(600) == 0, run.with_suffix(".log").read_text()
    return weights_of(run)


@pytest.mark.crash
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(6))
def test_five_kills_leave_the_weights_of_an_undisturbed_job(tmp_path, undisturbed, seed):
    draw = random.Random(seed)
    run = tmp_path / "run"
    job = start(run)
    kinds = draw.sample(KINDS, len(KINDS))

    def check_alive():
        assert job.poll() is None, run.with_suffix(".log").read_text()

    try:
        for kind in kinds:
            print(kill_at(kind, run, draw, check_alive), flush=True)
            while len(processes_of(run)["ranks"]) == 4:
                check_alive()
                time.sleep(0.05)
        assert job.wait(600) == 0, run.with_suffix(".log").read_text()
    finally:
        job.terminate()
        job.wait()
    assert weights_of(run) == undisturbed
    (history,) = run.glob("logs/*/attempts.jsonl")
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    assert [row["word"] for row in rows] == ["retry"] * len(kinds) + ["finished"]
    assert rows[-1]["step"] == LAST_STEP
