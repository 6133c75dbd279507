"""Options of ``mcore-train launch``, one small frozen dataclass a concept.

Which parts a launcher takes is in ``launching.cli``. Standard library and options only.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mcore_base.options import ON, Options, Rule, option

KubernetesKind = Literal["jobset", "trainjob", "pytorchjob"]

ELASTIC_OPTIONS = (
    "expert-model-parallel-size",
    "micro-batch-size",
    "use-distributed-optimizer",
    "use-torch-fsdp2",
    "data-parallel-sharding-strategy",
)
"""What decides how data ranks share the work and the memory, and not how a model is split."""

TURN = "MCORE_TURN"
"""Environment variable of ranks of a standby: the file that begins their attempt."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig(Options):
    """The hosts of a job, what each of them runs, and where the job's files go."""

    job_name: str = "mcore"
    """Name of the job: lower-case letters, digits and dashes."""
    nodes: int = option(1, minimum=1)
    """Hosts of the job; the most of them with --min-nodes."""
    min_nodes: int = option(0, minimum=0, zero="as many as --nodes")
    """Fewest hosts with which an attempt starts, as in torchrun's --nnodes MIN:MAX: under Slurm
    the job takes what it is given at each start, under launch local a host that is lost is left
    out of the next attempt. Batch and order of the data stay; data ranks follow the hosts."""
    elastic_options: tuple[str, ...] = ELASTIC_OPTIONS
    """Options of the layout, without dashes in front, that the planner may change where the
    command's layout does not fit a number of hosts; all others stay as given."""
    elastic_gpu: str = "h200"
    """Kind of GPU by whose memory and speed the planner chooses: h100, h200, a100 or b200."""
    nproc_per_node: int = option(8, minimum=1)
    """Ranks that each host starts: the number of its GPUs."""
    log_dir: str = ""
    """Folder on storage that all hosts share, for the output of every rank; empty: logs/ below
    the run's --save, or below the present folder."""
    workdir: str = ""
    """Folder in which each host starts the ranks, the same on all of them; empty:
    --container-workdir, else the present one, else (an image without it) the image's own."""
    python: str = ""
    """Command that runs Python on each host; empty: 'uv run python', and for launch local the
    interpreter that runs this command."""
    env: tuple[str, ...] = ()
    """Environment variables of the ranks, each NAME=VALUE."""
    master_port: int = option(29500, minimum=1)
    """Port of the first host at which ranks meet; each restart takes the next one."""
    render_dir: str = ""
    """Folder for the rendered files; empty: launch/ and the job's name below the present
    folder. Files of an earlier rendering are replaced."""
    preflight: bool = True
    """Let every host compare its paths, packages, GPUs and shared folders with those of the
    others before it starts ranks."""
    preflight_timeout_s: float = option(300.0, minimum=1)
    """Time that a host waits for the others in the comparison."""
    ft_rank_section_timeouts: str = "setup:600,step:180,checkpointing:420"
    """Seconds after which ft_launcher ends a rank in a section, for runs with
    --enable-ft-package."""

    rules = (
        Rule(
            ("job_name",),
            lambda v: not _NAME.fullmatch(v.job_name),
            "--job-name {job_name!r} must be at most 42 lower-case letters, digits and dashes, "
            "with no dash at its ends: Kubernetes makes host names of it.",
        ),
        Rule(("env",), lambda v: list(_bad_variables(v))),
        Rule(
            ("nodes", "min_nodes"),
            lambda v: v.min_nodes > v.nodes,
            "--min-nodes {min_nodes} is more than --nodes {nodes}.",
        ),
    )

    @property
    def world_size(self) -> int:
        """Ranks of the job, at most."""
        return self.nodes * self.nproc_per_node

    @property
    def is_elastic(self) -> bool:
        """Whether an attempt may start with fewer hosts than ``nodes``."""
        return 0 < self.min_nodes < self.nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartConfig(Options):
    """When a job that failed is started again."""

    max_restarts: int = option(3, minimum=0)
    """Restarts in a row without a newly saved step, for failures that may pass (a lost host, a
    collective that timed out, ECC, a segmentation fault); 0: none. Errors in the options or
    the data end the job at once."""
    restart_backoff_s: float = option(10.0, minimum=0)
    """Pause before the first restart; twice as long before each further one without a newly
    saved step, at most ten minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalConfig(Options):
    """What ``launch local`` alone can do."""

    standby_after_s: float = option(0.0, minimum=0, zero="no standby")
    """Age of an attempt at which the ranks of the next one are started: they import their
    modules and wait, so that a restart takes only as long as its ranks need to meet and load.
    Each takes 0.5 to 1 GB of the host's memory, and none of the GPU's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitConfig(Options):
    """Whether the rendered job is handed to its scheduler, and what is waited for."""

    submit: bool = False
    """Submit the job and print its id."""
    wait_for: str = option("", needs={"submit": ON})
    """File or folder: wait until it exists, then cancel the job."""
    poll_s: float = option(30.0, above=0)
    """Time between two looks for --wait-for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerConfig(Options):
    """The container that ranks run in."""

    container_image: str = ""
    """Image: a registry's name, or under Slurm the path of a squashfs file; empty: none, except
    on Kubernetes, where it is required."""
    container_mounts: tuple[str, ...] = option((), needs={"container_image": ON})
    """SOURCE:TARGET, each. Under Slurm SOURCE is a folder of the host, on Kubernetes the name
    of a PersistentVolumeClaim."""
    container_workdir: str = option("", needs={"container_image": ON})
    """Folder in the container in which ranks start."""

    rules = (Rule(("container_mounts",), lambda v: list(_bad_mounts(v))),)

    @property
    def targets(self) -> tuple[str, ...]:
        """Folders in the container that mounts bring."""
        return tuple(mount.split(":")[1].rstrip("/") or "/" for mount in self.container_mounts)

    def on_host(self, path: str) -> str:
        """Return the name that a Slurm job's hosts have for a path in the container."""
        mounts = zip(self.targets, self.container_mounts, strict=True)
        for target, mount in sorted(mounts, key=lambda pair: -len(pair[0])):
            below = target.rstrip("/")
            if f"{path}/".startswith(f"{below}/"):
                return mount.split(":")[0].rstrip("/") + path[len(below) :]
        return path


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig(Options):
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
    gpus_per_node: int = option(-1, minimum=-1)
    """GPUs to ask for on each host; -1: --nproc-per-node, or none with --device cpu; 0: none is
    asked for, as on clusters that hand out whole hosts."""
    signal_before_s: int = option(300, minimum=0)
    """Seconds before the time limit at which Slurm sends SIGUSR1, so that the run saves and the
    job is queued again; 0: no signal."""
    requeue: bool = True
    """Queue the job again when a host is lost, when it is preempted, or when SIGUSR1 ended the
    run before its last step."""
    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch, without leading dashes: exclusive, mem=0, reservation=R."""

    rules = (
        Rule(
            ("time_limit",),
            lambda v: v.time_limit and not _TIME.fullmatch(v.time_limit),
            "--time-limit {time_limit!r} must be minutes, HH:MM:SS or D-HH:MM:SS.",
        ),
        Rule(("sbatch_options",), lambda v: list(_dashed(v))),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesConfig(Options):
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
    termination_grace_s: int = option(600, minimum=0)
    """Time for the last save when a pod is evicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig(Options):
    """How a job runs on a Ray cluster."""

    ray_version: str = "2.46.0"
    """Version of Ray in the container image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilotConfig(Options):
    """What SkyPilot is asked for."""

    accelerators: str = ""
    """GPU of a host, such as H100; empty: none, for --device cpu."""
    infra: str = ""
    """Where to run, such as slurm/mycluster, kubernetes or aws; empty: the cheapest place."""
    setup: str = "uv sync --locked"
    """Command that each host runs once before the ranks start."""


def _bad_variables(values: Any) -> Iterator[str]:
    for pair in values.env:
        if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", pair):
            yield f"--env {pair!r} must be NAME=VALUE."


def _bad_mounts(values: Any) -> Iterator[str]:
    for mount in values.container_mounts:
        source, _, target = mount.partition(":")
        if not source or not target.startswith("/"):
            yield f"--container-mounts {mount!r} must be SOURCE:/TARGET."


def _dashed(values: Any) -> Iterator[str]:
    for each in values.sbatch_options:
        if each.startswith("-"):
            yield f"--sbatch-options {each!r}: leave out the leading dashes."
