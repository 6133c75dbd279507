"""The commands of docs/cluster.md, with fakes for Slurm; test_slurm.py has a real one."""

import subprocess
import sys
from pathlib import Path

import pytest
from docs.blocks import ROOT, blocks_of
from docs.test_documents import steps
from e2e.fake_schedulers import fake, on_path
from warm_ranks import run_command

RECIPE = """model = "tiny"
mock_data = true
num_workers = 0
device = "cpu"
seq_length = 16
global_batch_size = 4
tensor_model_parallel_size = 2
lr = 1e-3
log_interval = 1
"""
SMALL = {
    "--min-nodes 48": "--min-nodes 1",
    "--nodes 64": f"--nodes 2 --nproc-per-node 2 --python {sys.executable}",
    "--save-interval 200": "--save-interval 2",
}


def small_commands(folder: Path, train_iters: int) -> list[str]:
    """Return the page's blocks made small, and write the recipe that they name."""
    (folder / "run.toml").write_text(f"{RECIPE}train_iters = {train_iters}\n")
    place = ROOT / "docs/cluster.md"
    codes = [b.code for b in blocks_of(place.read_text(), "cluster") if b.run_by]
    assert len(codes) == 5
    for own, small in SMALL.items():
        assert any(own in code for code in codes)
        codes = [code.replace(own, small) for code in codes]
    return codes


@pytest.mark.timeout(120)
def test_the_commands_of_the_page_run(tmp_path):
    """A cluster that has trained one step when the job is submitted."""
    run = tmp_path / "runs/llama"
    (tmp_path / "one.toml").write_text(RECIPE.replace("size = 2", "size = 1"))
    words = ("--recipe", tmp_path / "one.toml", "--train-iters", 100, "--exit-interval", 1)
    done = run_command("mcore_train", "gpt", *words, "--save", run)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "out").write_text("lm loss: 1\n")
    fake(tmp_path, "sbatch", "echo 42")
    fake(tmp_path, "scancel", f'echo "$@" >> {tmp_path}/cancelled')
    fake(tmp_path, "squeue", "echo '42 PENDING 0:00 2 (BeginTime)'")
    fake(tmp_path, "scontrol", f"echo JobId=42 JobState=PENDING StdOut={tmp_path}/out")
    environment = on_path(tmp_path, JOB="42")
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    printed = ""
    for step in (s for code in small_commands(tmp_path, 100) for s in steps(code)):
        if isinstance(step, str):
            command = ["bash", "-c", f"set -euo pipefail\n{step}"]
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        else:
            done = run_command(step[0].replace("-", "_"), *step[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{step}\n{done.stdout}{done.stderr}"
        printed += done.stdout
    assert "42 PENDING" in printed
    assert "lm loss: 1" in printed
    assert (tmp_path / "cancelled").read_text().splitlines() == ["--signal=USR1 42", "42"]
    assert (tmp_path / "llama-hf/model.safetensors").exists()
