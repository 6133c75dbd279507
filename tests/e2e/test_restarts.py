"""Killed jobs end at the weights of an uninterrupted one, bitwise."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from e2e.killing import (
    KINDS,
    LAST_STEP,
    TRAINING,
    kill_at,
    lose_host,
    processes_of,
    weights_of,
)

from mcore_ckpt.storage.index import read_index
from mcore_ckpt.storage.paths import complete_steps, latest_step, step_folder
from mcore_train.reporting.log import read_metrics

LAUNCH = [
    *(sys.executable, "-m", "mcore_train", "launch", "local", "--nodes", "2"),
    *("--nproc-per-node", "2", "--max-restarts", "3", "--restart-backoff-s", "0.5", "--"),
]


def start(run, *options):
    """Start a job of 2 x 2 ranks; its output goes beside the run folder."""
    run.parent.mkdir(parents=True, exist_ok=True)
    command = [*LAUNCH[:-1], *options, "--", *TRAINING, "--save", str(run)]
    with run.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=run.parent)


def exit_code(job, seconds=600):
    """Return the exit code of a job, which is ended if it takes longer or the test stops."""
    try:
        return job.wait(seconds)
    finally:
        job.terminate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert exit_code(start(run)) == 0, run.with_suffix(".log").read_text()
    return weights_of(run)


@pytest.mark.crash
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(6))
def test_five_kills_leave_the_weights_of_an_undisturbed_job(tmp_path, undisturbed, seed):
    draw = random.Random(seed)
    run = tmp_path / "run"
    job = start(run, *(("--standby-after-s", "3") if seed % 2 else ()))
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
    starts = [r["start_s"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "run"]
    # A rank of a standby has imported its modules before its attempt begins.
    assert any("imports" not in start for start in starts) == bool(seed % 2)


@pytest.mark.crash
@pytest.mark.timeout(600)
def test_an_elastic_job_goes_on_with_fewer_hosts_and_again_with_all(tmp_path):
    """Losses are those of an uninterrupted job but for the order of sums over data ranks."""
    training = [*TRAINING, "--save-interval", "4"]
    training[training.index("--hidden-dropout") + 1] = "0"
    training[training.index("--eval-interval") + 1] = "1000"

    def launch(run):
        run.parent.mkdir(parents=True, exist_ok=True)
        words = [*LAUNCH[:-1], "--min-nodes", "1", "--", *training, "--save", str(run)]
        with run.with_suffix(".log").open("w") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, cwd=run.parent)

    def losses(run):
        return {row["iteration"]: row["loss"] for row in read_metrics(run / "metrics.jsonl")
                if row["kind"] == "train"}  # fmt: skip

    whole, run = tmp_path / "whole/run", tmp_path / "elastic/run"
    assert exit_code(launch(whole), 300) == 0
    job = launch(run)
    try:
        for num_ranks in (4, 2):  # a lost host, then a killed rank
            deadline = time.monotonic() + 200
            before = latest_step(run) or 0
            while (latest_step(run) or 0) <= before or len(
                processes_of(run)["ranks"]
            ) != num_ranks:
                assert job.poll() is None, run.with_suffix(".log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            if num_ranks == 4:
                lose_host(run, 1)
            else:
                os.kill(processes_of(run)["ranks"][0], signal.SIGKILL)
        assert job.wait(300) == 0, run.with_suffix(".log").read_text()
    finally:
        job.terminate()
        job.wait()
    assert "1 of 2 hosts are lost: using 1" in run.with_suffix(".log").read_text()
    found, expected = losses(run), losses(whole)
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-5), step
    saved = [read_index(step_folder(run, step)).extra for step in complete_steps(run)]
    assert {extra["parallel"]["world_size"] for extra in saved} == {2, 4}
    samples = [extra["consumed_train_samples"] for extra in saved]
    assert samples == [4 * step for step in sorted(complete_steps(run))]
