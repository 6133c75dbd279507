"""Renders the Slurm batch script of a job, which restarts failed attempts and requeues."""

import shlex

from mcore_train.launching.config import ContainerConfig, SlurmConfig
from mcore_train.launching.job import Job, host_script, next_command

SCRIPT = "job.sbatch"


def render(job: Job, slurm: SlurmConfig, container: ContainerConfig) -> str:
    """Render the batch script.

    The batch host runs the loop of attempts; ``srun`` runs the host script once on each host.

    Args:
        job: job to start.
        slurm: resources of the job.
        container: container, started by Pyxis, which adds options to srun.
    """
    config = job.config
    pyxis_options = " ".join(map(shlex.quote, container_options(container)))
    preamble = ["export NODE_RANK=$SLURM_NODEID"]
    decide = next_command(job)
    if pyxis_options:
        # The package is in the image, not on the batch host.
        in_container = f"cd {shlex.quote(job.workdir)} && {decide}"
        decide = (
            f"srun --nodes=1 --ntasks=1 --export=ALL {pyxis_options} bash -c \\\n"
            f"        {shlex.quote(in_container)}"
        )
    workdir = "" if pyxis_options else f"cd {shlex.quote(job.workdir)}\n"
    log_dirs = f"job_logs={shlex.quote(job.log_dir)}/{config.job_name}-$SLURM_JOB_ID"
    logs_on_host = "$job_logs"
    if pyxis_options:
        log_dirs += f"""
# Path of the same folder on the hosts, outside of the container.
host_logs={shlex.quote(container.on_host(job.log_dir))}/{config.job_name}-$SLURM_JOB_ID"""
        logs_on_host = "$host_logs"
    return f"""#!/usr/bin/env bash
{_directives(job, slurm)}
# Rendered by mcore-train launch slurm. Each host runs HOST_SCRIPT once. The output of every
# rank is in {job.log_dir}/{config.job_name}-JOB/attempt-N/host-N; the output of this script and
# of the first rank of each host is in the folder in which sbatch is called.
set -euo pipefail
{workdir}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
NNODES=$SLURM_JOB_NUM_NODES
WORLD_SIZE=$((NNODES * {config.nproc_per_node}))
export MASTER_ADDR NNODES WORLD_SIZE
{log_dirs}

HOST_SCRIPT=$(
    cat << 'END_OF_HOST_SCRIPT'
{host_script(job, preamble)}END_OF_HOST_SCRIPT
)

attempt=0
while true; do
    # A requeued job continues the count of attempts, so that no log is overwritten.
    while [ -e "{logs_on_host}/attempt-$attempt" ]; do attempt=$((attempt + 1)); done
    MCORE_LOGS=$job_logs/attempt-$attempt
    MASTER_PORT=$(({config.master_port} + attempt % 100))
    export MCORE_LOGS MASTER_PORT
    mkdir -p "{logs_on_host}/attempt-$attempt"
    echo "attempt $attempt on $SLURM_JOB_NODELIST, logs in $MCORE_LOGS"

    status=0
    srun --ntasks-per-node=1 --wait=60 {pyxis_options + " " if pyxis_options else ""}\\
        bash -c "$HOST_SCRIPT" || status=$?

    export status
    answer=$({decide}) || answer="stop $status"
    read -r next number <<< "$answer"
    echo "attempt $attempt ended with $status: $answer"
    case "$next" in
        finished) exit 0 ;;
        retry) sleep "$number" ;;
        requeue) {_requeue(slurm)} ;;
        *) exit "${{number:-1}}" ;;
    esac
done
"""


def container_options(container: ContainerConfig) -> list[str]:
    """Return the srun options of Pyxis for a container."""
    if not container.container_image:
        return []
    options = [f"--container-image={container.container_image}"]
    if container.container_mounts:
        options.append(f"--container-mounts={','.join(container.container_mounts)}")
    if container.container_workdir:
        options.append(f"--container-workdir={container.container_workdir}")
    return options


def _directives(job: Job, slurm: SlurmConfig) -> str:
    config = job.config
    gpus = slurm.gpus_per_node
    if gpus < 0:
        gpus = config.nproc_per_node if job.uses_gpus else 0
    words = [
        f"job-name={config.job_name}",
        f"nodes={config.min_nodes}-{config.nodes}" if job.layouts else f"nodes={config.nodes}",
        "ntasks-per-node=1",
        f"gpus-per-node={gpus}" if gpus else "",
        f"partition={slurm.slurm_partition}" if slurm.slurm_partition else "",
        f"account={slurm.slurm_account}" if slurm.slurm_account else "",
        f"qos={slurm.slurm_qos}" if slurm.slurm_qos else "",
        f"time={slurm.time_limit}" if slurm.time_limit else "",
        # In the current folder: Slurm does not create a folder for the output.
        f"output={config.job_name}-%j.out",
        "open-mode=append",
        "requeue" if slurm.requeue else "no-requeue",
        f"signal=USR1@{slurm.signal_before_s}" if slurm.signal_before_s else "",
        *slurm.sbatch_options,
    ]
    return "\n".join(f"#SBATCH --{word}" for word in words if word)


def _requeue(slurm: SlurmConfig) -> str:
    if slurm.requeue:
        return 'scontrol requeue "$SLURM_JOB_ID" && sleep 60 && exit 1'
    return "exit 0"
