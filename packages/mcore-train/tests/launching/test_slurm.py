"""The batch script of a job: what it asks for, and how it runs with fakes for Slurm."""

import json
import subprocess

import pytest
from e2e.fake_schedulers import NCCL, RUN, fake, fake_python, fake_slurm, launch, on_path


def rendered(folder, *words, training=()):
    """Render a batch script in a folder and return its text."""
    done = launch("slurm", *words, "--", *RUN, *training, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("launch/*/job.sbatch")
    return file.read_text()


def test_the_script_has_the_documents_lines(tmp_path):
    text = rendered(
        tmp_path,
        *(
            "--nodes",
            4,
            "--nproc-per-node",
            4,
            "--slurm-partition",
            "batch",
            "--slurm-account",
            "llm",
        ),
        *("--time-limit", "1-00:00:00", "--sbatch-options", "exclusive", "mem=0"),
        training=("--save", "run", "--tensor-model-parallel-size", 2),
    )
    for line in (
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --partition=batch",
        "#SBATCH --account=llm",
        "#SBATCH --time=1-00:00:00",
        "#SBATCH --output=mcore-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR1@300",
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        "    MASTER_PORT=$((29500 + attempt % 100))",
        "WORLD_SIZE=$((NNODES * 4))",
        "export NODE_RANK=$SLURM_NODEID",
        "uv run python -m torch.distributed.run \\",
        '    --log-dir "$MCORE_LOGS/host-$NODE_RANK" --redirects 3 --tee 3 \\',
        "        --auto-resume \\",
    ):
        assert line in text.splitlines()
    # The job makes its folders: this machine need not have the cluster's storage.
    assert {path.name for path in tmp_path.iterdir()} == {"launch"}


def test_a_container_is_given_to_srun_with_its_mounts_and_decides_in_the_image(tmp_path):
    text = rendered(
        tmp_path,
        *("--nodes", 2, "--container-image", "/images/mcore.sqsh"),
        *("--container-mounts", "/lustre/runs:/runs", "/lustre/data:/data"),
        *("--container-workdir", "/opt/mcore"),
        training=("--save", "/runs/a"),
    )
    inside = (
        "--container-image=/images/mcore.sqsh "
        "--container-mounts=/lustre/runs:/runs,/lustre/data:/data "
        "--container-workdir=/opt/mcore"
    )
    assert f"srun --ntasks-per-node=1 --wait=60 {inside} \\" in text
    assert f"srun --nodes=1 --ntasks=1 --export=ALL {inside} bash -c" in text
    assert "\npython -m torch.distributed.run \\" in text
    assert "uv run" not in text  # not in every image
    # Ranks and hosts name one folder.
    assert "job_logs=/runs/a/logs/mcore-$SLURM_JOB_ID" in text.splitlines()
    assert "host_logs=/lustre/runs/a/logs/mcore-$SLURM_JOB_ID" in text.splitlines()
    assert '    mkdir -p "$host_logs/attempt-$attempt"' in text.splitlines()
    lost = launch(
        *("slurm", "--container-image", "/i.sqsh", "--container-mounts", "/a:/data", "--"),
        *(*RUN, "--save", "/runs/a"),
        cwd=tmp_path,
    )
    assert lost.returncode == 2
    assert "--save /runs/a is in none of --container-mounts (/data)" in lost.stderr


def test_files_of_the_mounts_need_not_exist_here_and_recipes_have_to_be_in_them(tmp_path):
    (tmp_path / "own.toml").write_text("lr = 1e-3\n")
    done = launch(
        *("slurm", "--container-image", "/i.sqsh", "--container-mounts", "/a:/data", "--"),
        *(*RUN, "--recipe", "own.toml", "--save", "/data/run"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/data/tokenizer"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "--tokenizer-model /data/tokenizer does not exist" in done.stderr
    assert "--recipe own.toml is in none of --container-mounts (/data)" in done.stderr
    text = (tmp_path / "launch/mcore/job.sbatch").read_text()
    assert f"--last-step {RUN[RUN.index('--train-iters') + 1]}" in text


def test_one_message_has_the_faults_of_both_sides_of_the_command_line(tmp_path):
    done = launch(
        *("slurm", "--nodes", 2, "--slurm-partitoin", "x", "--time-limit", "soon", "--"),
        *(*RUN, "--tensor-model-parallel-size", 3, "--nproc", 2, "--hiden-size", 4),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    for part in (
        "unknown option --slurm-partitoin: did you mean --slurm-partition?",
        "--time-limit 'soon' must be minutes",
        "--hiden-size",
        "--tensor-model-parallel-size 3",
    ):
        assert part in done.stderr
    assert not (tmp_path / "launch").exists()
    assert "give a training command" in launch("slurm", cwd=tmp_path).stderr
    assert "--nproc cannot be used" in launch("slurm", "--", *RUN, "--nproc", 2).stderr


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--tensor-model-parallel-size", 2], "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
        (["--context-parallel-size", 2], "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ([], "unset CUDA_DEVICE_MAX_CONNECTIONS"),
        (
            [
                *("--tensor-model-parallel-size", 2),
                *("--data-parallel-sharding-strategy", "optim_grads_params"),
            ],
            "unset CUDA_DEVICE_MAX_CONNECTIONS",
        ),
    ],
)
def test_the_layout_chooses_the_hardware_queues(tmp_path, flags, line):
    assert line in rendered(tmp_path, training=flags).splitlines()


def test_hardware_queues_that_contradict_the_layout_are_refused(tmp_path):
    queues = ("--env", "CUDA_DEVICE_MAX_CONNECTIONS=8")
    done = launch("slurm", *queues, "--", *RUN, "--tensor-model-parallel-size", 2, cwd=tmp_path)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8: this layout needs 1" in done.stderr
    sharded = ("--data-parallel-sharding-strategy", "optim_grads_params")
    queues = ("--env", "CUDA_DEVICE_MAX_CONNECTIONS=1")
    done = launch("slurm", *queues, "--", *RUN, *sharded, cwd=tmp_path)
    assert "serializes the gathers" in done.stderr


def run_script(folder, *words):
    """Render a job of two nodes and run its script as Slurm's batch host would."""
    options = ("--nodes", 2, "--python", folder / "bin/fakepython", "--restart-backoff-s", 0)
    text = rendered(folder, *options, *words, training=("--save", "run"))
    environment = on_path(
        folder, SLURM_JOB_ID="42", SLURM_JOB_NODELIST="n[1-2]", SLURM_JOB_NUM_NODES="2"
    )
    done = subprocess.run(
        ["bash", "-c", text], env=environment, capture_output=True, text=True, check=False
    )
    history = folder / "run/logs/mcore-42/attempts.jsonl"
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    return done, [row["word"] for row in rows]


def test_failures_that_may_pass_are_retried_and_the_run_goes_on_to_its_end(tmp_path):
    fake_slurm(tmp_path)
    fake_python(tmp_path, [(1, NCCL, 2), (1, NCCL, 2), (0, "", 6)])
    done, words = run_script(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert words == ["retry", "retry", "finished"]


def test_at_most_three_restarts_go_by_without_a_saved_step(tmp_path):
    fake_slurm(tmp_path)
    fake_python(tmp_path, [(1, NCCL, 2), *[(1, NCCL, 4)] * 5])
    done, words = run_script(tmp_path)
    assert done.returncode == 1
    assert words == ["retry", "retry", "retry", "retry", "stop"]


def test_an_error_of_the_options_ends_the_job_at_once(tmp_path):
    fake_slurm(tmp_path)
    fake_python(tmp_path, [(1, "mcore-train: error: --lr is missing", 0)])
    done, words = run_script(tmp_path)
    assert (done.returncode, words) == (12, ["stop"])


def test_a_run_that_a_signal_stopped_is_queued_again(tmp_path):
    fake_slurm(tmp_path)
    fake_python(tmp_path, [(0, "", 4)])
    fake(tmp_path, "sleep", "exit 0")
    _, words = run_script(tmp_path)
    assert words == ["requeue"]
    assert "scontrol requeue 42" in (tmp_path / "asked").read_text()


def test_a_job_is_submitted_waited_for_and_cancelled(tmp_path, monkeypatch):
    fake_slurm(tmp_path)
    fake(tmp_path, "squeue", f"echo '42 RUNNING 0:10 2 n[1-2]'; touch {tmp_path}/result.json")
    monkeypatch.setenv("PATH", on_path(tmp_path)["PATH"])
    done = launch(
        *("slurm", "--submit", "--wait-for", "result.json", "--poll-s", "0.01", "--", *RUN),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["launch/mcore/job.sbatch", "42"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["--parsable launch/mcore/job.sbatch", "cancel 42"]


def test_a_job_that_ends_without_the_artifact_is_an_error(tmp_path, monkeypatch):
    fake_slurm(tmp_path)
    fake(tmp_path, "squeue", "exit 1")
    fake(tmp_path, "sacct", "echo '42|FAILED|00:01:00|2|1:0'")
    monkeypatch.setenv("PATH", on_path(tmp_path)["PATH"])
    done = launch("slurm", "--submit", "--wait-for", "never", "--", *RUN, cwd=tmp_path)
    assert done.returncode == 1
    assert "job 42 ended without never: 42 FAILED 00:01:00 2 1:0" in done.stderr


def test_status_logs_and_cancel_ask_slurm(tmp_path, monkeypatch):
    fake_slurm(tmp_path)
    (tmp_path / "out").write_text("lm loss\n")
    fake(tmp_path, "squeue", "exit 0")
    fake(tmp_path, "sacct", "exit 1")
    fake(
        tmp_path,
        "scontrol",
        f"echo JobId=42 JobState=FAILED RunTime=1 ExitCode=1:0 StdOut={tmp_path}/out",
    )
    monkeypatch.setenv("PATH", on_path(tmp_path)["PATH"])
    assert launch("status", 42).stdout.strip() == "42 FAILED 1 1:0"
    assert launch("logs", 42).stdout.strip() == "lm loss"
    assert launch("cancel", 42).returncode == 0
    assert "cancel 42" in (tmp_path / "asked").read_text()
    assert "'x' is not a job's id" in launch("status", "x").stderr


def test_a_job_is_rendered_again_where_its_run_has_saved_steps(tmp_path):
    step = tmp_path / "run/iter_0000002"
    step.mkdir(parents=True)
    (step / "index.json").write_text("{}")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("2")
    done = launch("slurm", "--", *RUN, "--save", "run", "--no-auto-resume", cwd=tmp_path)
    assert "holds step 2 of an earlier run" in done.stderr
