"""Rendered jobs on a real Slurm of two nodes: `nox -s slurm`."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from docs.blocks import ROOT
from docs.test_examples import SIZES
from e2e.killing import KINDS, LAST_STEP, TRAINING, kill_at, processes_of, weights_of
from e2e.slurm_cluster import two_nodes
from e2e.test_cluster_page import small_commands

from mcore_ckpt.storage.paths import latest_step

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with two_nodes(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def launch(cluster, folder, *words):
    """Run ``mcore-train launch`` in a folder as a user does; return what it prints."""
    command = [sys.executable, "-m", "mcore_train", "launch", *map(str, words)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(cluster, folder, run, *words):
    """Submit a job of 2 x 2 ranks; return its number."""
    options = ("--nodes", 2, "--nproc-per-node", 2, "--python", sys.executable, "--submit")
    training = [*TRAINING, "--save", run]
    restarts = ("--restart-backoff-s", 1)
    printed = launch(cluster, folder, "slurm", *options, *restarts, *words, "--", *training)
    return printed.split()[1]


def wait_for_step(run, step, seconds=300.0):
    """Wait until a run has saved a step."""
    deadline = time.monotonic() + seconds
    while (latest_step(run) or 0) < step:
        assert time.monotonic() < deadline, f"step {step} was not saved"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    job = submit(cluster, folder, folder / "run")
    cluster.wait("COMPLETED", 600, job)
    return weights_of(folder / "run")


def test_a_lost_host_usr1_and_kills_leave_the_weights_of_an_undisturbed_job(
    cluster, undisturbed, tmp_path
):
    run = tmp_path / "run"
    job = submit(cluster, tmp_path, run)
    draw = random.Random(11)

    def disturb(what):
        if what in KINDS:
            print(kill_at(what, run, draw), flush=True)
        else:
            wait_for_step(run, (latest_step(run) or 0) + 2)
            print(what, "after step", latest_step(run), flush=True)
        if what == "usr1":
            cluster.run("scancel", "--signal=USR1", job)
        elif what == "requeue":
            cluster.run("scontrol", "requeue", job)
        elif what == "lost host":
            cluster.lose_host("n2")
            cluster.wait("PENDING", 120, job)
            cluster.start_daemon("n2")
        while len(processes_of(run)["ranks"]) == 4:
            time.sleep(0.05)

    for what in ("usr1", "one rank", "lost host", "agent", "requeue"):
        disturb(what)
    cluster.wait("COMPLETED", 900, job)
    assert weights_of(run) == undisturbed
    (history,) = run.glob("logs/*/attempts.jsonl")
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    assert [row["word"] for row in rows if row["word"] != "retry"] == ["requeue", "finished"]
    assert rows[-1]["step"] == LAST_STEP


def test_the_artifact_ends_the_job_and_status_logs_and_cancel_answer(cluster, tmp_path):
    run = tmp_path / "run"
    wanted = run / "iter_0000004" / "index.json"
    job = submit(cluster, tmp_path, run, "--wait-for", wanted, "--poll-s", 0.5)
    cluster.wait("CANCELLED", 60, job)
    assert launch(cluster, tmp_path, "status", job).split()[:2] == [job, "CANCELLED"]
    assert "lm loss" in launch(cluster, tmp_path, "logs", job)
    other = submit(cluster, tmp_path, tmp_path / "other")
    launch(cluster, tmp_path, "cancel", other)
    cluster.wait("CANCELLED", 60, other)


def with_our_programs(cluster):
    """Return the cluster's environment with this environment's programs on PATH."""
    path = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
    return {**cluster.environment, "PATH": path, "OMP_NUM_THREADS": "1"}


def test_the_commands_of_the_page_run_on_a_cluster(cluster, tmp_path):
    first, submitting, *rest = small_commands(tmp_path, 10_000)
    # Once it has submitted the job, a person waits until the run has saved.
    wait = "until [ -e runs/llama/latest_checkpointed_iteration.txt ]; do sleep 0.1; done\n"
    script = "".join(["set -euo pipefail\n", first, submitting, wait, *rest])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=with_our_programs(cluster),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lm loss" in done.stdout
    assert (tmp_path / "llama-hf/model.safetensors").exists()


def test_the_70b_script_trains_its_model_made_small_under_sbatch(cluster, tmp_path):
    script = ROOT / "examples/llama/train_llama_70b.sh"
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    words = ("--nodes", "2", "--output", str(tmp_path / "out"), str(script))
    done = subprocess.run(
        ["sbatch", "--parsable", *words, *SIZES.split(), *layout.split()],
        env={**with_our_programs(cluster), "GPUS_PER_NODE": "2"},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    cluster.wait("COMPLETED", 300, done.stdout.strip())
    assert "iteration        2/       2" in (tmp_path / "out").read_text()


def test_an_array_writes_a_corpus_over_a_lost_host_and_is_submitted_again(cluster, tmp_path):
    lines = (json.dumps({"text": f"number {i} " * (i % 300)}) + "\n" for i in range(40_000))
    (tmp_path / "a.jsonl").write_text("".join(lines))

    def data(*words, wait=True):
        command = [sys.executable, "-m", "mcore_data", *map(str, words)]
        process = subprocess.Popen(command, cwd=tmp_path, env=cluster.environment)
        if wait:
            assert process.wait() == 0
        return process

    job = ("--input", "a.jsonl", "--tokenizer-type", "ByteTokenizer", "--append-eod")
    data("preprocess", *job, "--output-prefix", "whole")
    data("plan", *job, "--output-prefix", "c", "--unit-size", "3MB")
    arrays = ("--executor", "slurm", "--num-tasks", 4, "--submit-jobs", "--wait")
    launched = data("launch", "--plan", "c.plan.json", *arrays, wait=False)
    units = tmp_path / "c.units"
    while not list(units.glob("*.manifest.json")):
        time.sleep(0.1)
    cluster.lose_host("n2")
    cluster.start_daemon("n2")
    assert launched.wait() == 0
    data("merge", "--plan", "c.plan.json", "--physical")
    for kind in ("bin", "idx"):
        whole = (tmp_path / f"whole_text_document.{kind}").read_bytes()
        assert (tmp_path / f"c_text_document.{kind}").read_bytes() == whole
