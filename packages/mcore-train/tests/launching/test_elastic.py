"""Jobs that may start with fewer hosts: a layout for each number, chosen before they start."""

import re
import subprocess

import pytest
from warm_ranks import run_command

from mcore_train.launching.cli import launch

MODEL = [
    *("gpt", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--vocab-size", "64", "--seq-length", "16", "--micro-batch-size", "1", "--mock-data"),
    *("--device", "cpu", "--lr", "1e-3", "--train-iters", "30", "--save", "run"),
]


def script_of(folder, monkeypatch, *words, model=(), launcher="slurm"):
    """Render a job; return its script."""
    monkeypatch.chdir(folder)
    job = ["--nproc-per-node", "2", "--render-dir", str(folder / "out"), *map(str, words)]
    launch([launcher, *job, "--", *MODEL, *model])
    return (folder / "out/job.sbatch").read_text()


def layout_of(script, hosts):
    """Run the part of a host script that chooses the layout; return exit code and flags."""
    part = script[script.index('case "$NNODES"') :]
    part = part[: part.index("esac") + 4]
    done = subprocess.run(
        ["bash", "-euc", f'{part}\necho "${{layout[@]}}"'],
        env={"NNODES": str(hosts)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.strip()


def test_a_layout_that_fits_stays_and_the_batch_is_that_of_all_hosts(tmp_path, monkeypatch):
    words = ("--nodes", 4, "--min-nodes", 1)
    script = script_of(
        tmp_path, monkeypatch, *words, model=["--tensor-model-parallel-size", "2"]
    )
    assert "#SBATCH --nodes=1-4" in script
    # 4 data ranks of one sequence: three do not divide the batch, one and two do.
    assert "--global-batch-size 4" in script
    assert [layout_of(script, hosts) for hosts in (1, 2, 4)] == [(0, "")] * 3
    assert layout_of(script, 3)[0] == 12


def test_the_planner_changes_what_may_change_and_nothing_else(tmp_path, monkeypatch):
    experts = ["--num-experts", "8", "--expert-model-parallel-size", "8"]
    script = script_of(tmp_path, monkeypatch, "--nodes", 4, "--min-nodes", 1, model=experts)
    code, flags = layout_of(script, 2)
    assert code == 0
    assert "--expert-model-parallel-size" in flags
    assert "tensor-model-parallel-size" not in flags
    assert layout_of(script, 4) == (0, "")
    assert layout_of(script, 3)[0] == 12  # 6 ranks divide neither batch nor experts


@pytest.mark.parametrize(
    ("launcher", "words", "told"),
    [
        ("slurm", ["--min-nodes", "9"], "--min-nodes 9 is more than --nodes 4"),
        ("skypilot", ["--min-nodes", "1"], "--min-nodes is supported by launch slurm and"),
        (
            "slurm",
            ["--min-nodes", "1", "--elastic-options", "colour"],
            "--elastic-options colour: mcore-train gpt has no such",
        ),
        (
            "slurm",
            ["--min-nodes", "3", "--elastic-options", "micro-batch-size"],
            "--min-nodes 3: no valid layout for fewer than 4 hosts differs only in --micro-",
        ),
    ],
)
def test_what_cannot_be_elastic_is_refused(tmp_path, launcher, words, told):
    experts = ["--num-experts", "8", "--expert-model-parallel-size", "8"]
    job = ["launch", launcher, "--nodes", "4", "--nproc-per-node", "2", *words, "--"]
    done = run_command("mcore_train", *job, *MODEL, *experts, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in re.sub(r"\s+", " ", done.stderr)
