"""Schedulers and a torchrun made of shell scripts, for jobs that are rendered and run here."""

import os
import stat
import sys

from warm_ranks import run_command

RUN = [
    *("gpt", "--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4),
    *("--vocab-size", 64, "--seq-length", 16, "--mock-data", "--lr", "1e-3"),
    *("--train-iters", 6, "--global-batch-size", 16),
]


def launch(*words, cwd=None):
    return run_command("mcore_train", "launch", *words, cwd=cwd)


def fake(folder, name, script):
    """Put a program on PATH that does what a shell script says."""
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/usr/bin/env bash\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def on_path(folder, **more):
    return {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", **more}


NCCL = "RuntimeError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"


def fake_slurm(folder):
    """Put a Slurm of two nodes on PATH that runs scripts here and notes what it is asked."""
    fake(folder, "sbatch", f'echo "$@" >> {folder}/asked; echo 42')
    fake(folder, "scancel", f'echo "cancel $@" >> {folder}/asked')
    fake(
        folder,
        "scontrol",
        f"""echo "scontrol $@" >> {folder}/asked
        case "$1 $2" in
            "show hostnames") printf 'n1\\nn2\\n' ;;
            "requeue 42") touch {folder}/requeued ;;
        esac""",
    )
    fake(
        folder,
        "srun",
        """while [ "${1#--}" != "$1" ]; do shift; done
        SLURM_NODEID=0 "$@" & first=$!
        SLURM_NODEID=1 "$@" & second=$!
        status=0
        wait $first || status=$?
        wait $second || status=$?
        exit $status""",
    )


def fake_python(folder, outcomes):
    """Write a Python whose torchrun ends attempt after attempt as listed; a line to its log."""
    (folder / "outcomes").mkdir()
    for number, (code, line, step) in enumerate(outcomes):
        text = f"code={code}\nline='{line}'\nstep={step}\n"
        (folder / "outcomes" / f"{number}.sh").write_text(text)
    fake(
        folder,
        "fakepython",
        f"""case "$*" in
            *"launch next"*) exec {sys.executable} "$@" ;;
            *"launch preflight"*) echo "preflight $NODE_RANK of $NNODES" ; exit 0 ;;
        esac
        source {folder}/outcomes/$(basename "$MCORE_LOGS" | cut -d- -f2).sh
        mkdir -p "$MCORE_LOGS/host-$NODE_RANK/x/attempt_0/0"
        echo "$line" > "$MCORE_LOGS/host-$NODE_RANK/x/attempt_0/0/stderr.log"
        if [ "$NODE_RANK" = 0 ]; then
            mkdir -p {folder}/run/iter_000000$step
            echo '{{}}' > {folder}/run/iter_000000$step/index.json
            echo $step > {folder}/run/latest_checkpointed_iteration.txt
        fi
        exit $code""",
    )
