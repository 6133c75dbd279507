"""Options of ``mcore-train launch``, one small frozen dataclass a concept.

Which parts a launcher takes is in ``launching.launchers``. Standard library only.
"""

import re
from dataclasses import dataclass
from typing import Literal

from mcore_base.field_checks import check_at_least

KubernetesKind = Literal["jobset", "trainjob", "pytorchjob"]

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """The hosts of a job, what each of them runs, and where the job's files go."""

    job_name: str = "mcore"
    """Name of the job: lower-case letters, digits and dashes."""
    nodes: int = 1
    """Hosts of the job."""
    nproc_per_node: int = 8
    """Ranks that each host starts: the number of its GPUs."""
    log_dir: str = ""
    """Folder on storage that all hosts share, for the output of every rank; empty: logs/ below
    the run's --save, or below the present folder."""
    workdir: str = ""
    """Folder in which each host starts the ranks, the same on all of them; empty: the present
    one, or --container-workdir."""
    python: str = ""
    """Command that runs Python on each host; empty: 'uv run python', and for launch local the
    interpreter that runs this command."""
    env: tuple[str, ...] = ()
    """Environment variables of the ranks, each NAME=VALUE."""
    master_port: int = 29500
    """Port of the first host at which ranks meet; each restart takes the next one."""
    render_dir: str = ""
    """Folder for the rendered files; empty: launch/ and the job's name below the present
    folder. Files of an earlier rendering are replaced."""
    preflight: bool = True
    """Let every host compare its paths, packages, GPUs and shared folders with those of the
    others before it starts ranks."""
    preflight_timeout_s: float = 300.0
    """Time that a host waits for the others in the comparison."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "nodes", "nproc_per_node", "master_port", "preflight_timeout_s")
        if not _NAME.fullmatch(self.job_name):
            raise ValueError(
                f"--job-name {self.job_name!r} must be at most 42 lower-case letters, digits "
                "and dashes, with no dash at its ends: Kubernetes makes host names of it."
            )
        for pair in self.env:
            if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", pair):
                raise ValueError(f"--env {pair!r} must be NAME=VALUE.")

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.nproc_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartConfig:
    """When a job that failed is started again."""

    max_restarts: int = 3
    """Restarts in a row without a newly saved step, for failures that may pass (a lost host, a
    collective that timed out, ECC, a segmentation fault); 0: none. Errors in the options or
    the data end the job at once."""
    restart_backoff_s: float = 10.0
    """Pause before the first restart; twice as long before each further one without a newly
    saved step, at most ten minutes."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "max_restarts", "restart_backoff_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitConfig:
    """Whether the rendered job is handed to its scheduler, and what is waited for."""

    submit: bool = False
    """Submit the job and print its id."""
    wait_for: str = ""
    """File or folder: wait until it exists, then cancel the job. Needs --submit."""
    poll_s: float = 30.0
    """Time between two looks for --wait-for."""

    def __post_init__(self) -> None:
        if self.poll_s <= 0:
            raise ValueError(f"--poll-s {self.poll_s} must be above 0.")
        if self.wait_for and not self.submit:
            raise ValueError(f"--wait-for {self.wait_for} has no effect without --submit.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerConfig:
    """The container that ranks run in."""

    container_image: str = ""
    """Image: a registry's name, or under Slurm the path of a squashfs file; empty: none, except
    on Kubernetes, where it is required."""
    container_mounts: tuple[str, ...] = ()
    """SOURCE:TARGET, each. Under Slurm SOURCE is a folder of the host, on Kubernetes the name
    of a PersistentVolumeClaim."""
    container_workdir: str = ""
    """Folder in the container in which ranks start."""

    def __post_init__(self) -> None:
        for mount in self.container_mounts:
            source, _, target = mount.partition(":")
            if not source or not target.startswith("/"):
                raise ValueError(f"--container-mounts {mount!r} must be SOURCE:/TARGET.")
        if not self.container_image and (self.container_mounts or self.container_workdir):
            raise ValueError(
                "--container-mounts and --container-workdir have no effect without "
                "--container-image."
            )

    @property
    def targets(self) -> tuple[str, ...]:
        """Folders in the container that mounts bring."""
        return tuple(mount.split(":")[1].rstrip("/") or "/" for mount in self.container_mounts)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig:
    """What sbatch is asked for."""

    slurm_partition: str = ""
    """Partition; empty: the cluster's default."""
    slurm_account: str = ""
    """Account that pays; empty: the user's default."""
    slurm_qos: str = ""
    """Quality of service; empty: the default."""
    time_limit: str = ""
    """Longest time of the job, as sbatch --time: D-HH:MM:SS, HH:MM:SS or minutes; empty: the
    partition's."""
    gpus_per_node: int = -1
    """GPUs to ask for on each host; -1: --nproc-per-node, or none with --device cpu; 0: none is
    asked for, as on clusters that hand out whole hosts."""
    signal_before_s: int = 300
    """Seconds before the time limit at which Slurm sends SIGUSR1, so that the run saves and the
    job is queued again; 0: no signal."""
    requeue: bool = True
    """Queue the job again when a host is lost, when it is preempted, or when SIGUSR1 ended the
    run before its last step."""
    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch, without leading dashes: exclusive, mem=0, reservation=R."""

    def __post_init__(self) -> None:
        check_at_least(self, -1, "gpus_per_node")
        check_at_least(self, 0, "signal_before_s")
        if self.time_limit and not _TIME.fullmatch(self.time_limit):
            raise ValueError(
                f"--time-limit {self.time_limit!r} must be minutes, HH:MM:SS or D-HH:MM:SS."
            )
        for option in self.sbatch_options:
            if option.startswith("-"):
                raise ValueError(f"--sbatch-options {option!r}: leave out the leading dashes.")


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesConfig:
    """The Kubernetes resource of a job."""

    kind: KubernetesKind = "jobset"
    """jobset: of the JobSet controller; trainjob: of Kubeflow Trainer 2, with its runtime;
    pytorchjob: of Kubeflow Training Operator 1."""
    namespace: str = "default"
    """Kubernetes namespace."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the GPUs among a host's resources."""
    shm_size: str = "64Gi"
    """Memory of /dev/shm, through which data workers and NCCL pass data."""
    priority_class: str = ""
    """PriorityClass of the pods; empty: the cluster's default."""
    queue_name: str = ""
    """Local queue of Kueue that admits the job; empty: none."""
    termination_grace_s: int = 600
    """Time for the last save when a pod is evicted."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "termination_grace_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig:
    """How a job runs on a Ray cluster."""

    ray_version: str = "2.46.0"
    """Version of Ray in the container image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilotConfig:
    """What SkyPilot is asked for."""

    accelerators: str = ""
    """GPU of a host, such as H100; empty: none, for --device cpu."""
    infra: str = ""
    """Where to run, such as slurm/mycluster, kubernetes or aws; empty: the cheapest place."""
    setup: str = "uv sync --locked"
    """Command that each host runs once before the ranks start."""
