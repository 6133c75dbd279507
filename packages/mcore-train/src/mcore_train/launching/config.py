"""Options of ``mcore-train launch``, one frozen dataclass for each concept.

``launching.cli`` lists the options of each launcher. Standard library and options only.
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
"""Options that change how data ranks share work and memory, not how a model is split."""

TURN = "MCORE_TURN"
"""Environment variable of ranks of a standby: the file that begins their attempt."""
LAUNCHER = "MCORE_LAUNCHER"
"""Environment variable of ranks of a standby: process number of the launcher."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig(Options):
    """Hosts of a job, their command and environment, and the folders of the job's files."""

    job_name: str = "mcore"
    """Name of the job: lower-case letters, digits and dashes."""
    nodes: int = option(1, minimum=1)
    """Hosts of the job; with --min-nodes the largest number of hosts."""
    min_nodes: int = option(0, minimum=0, zero="as many as --nodes")
    """Smallest number of hosts with which an attempt starts, as in torchrun's --nnodes MIN:MAX.
    Under Slurm the job uses the hosts that it gets at each start; under launch local the next
    attempt leaves out a lost host. The global batch and the order of the data do not change;
    the number of data ranks does."""
    elastic_options: tuple[str, ...] = ELASTIC_OPTIONS
    """Options of the layout, without leading dashes, that the planner may change if the
    command's layout does not fit a number of hosts. No other option is changed."""
    elastic_gpu: str = "h200"
    """GPU with whose memory and speed the planner calculates: h100, h200, a100 or b200."""
    nproc_per_node: int = option(8, minimum=1)
    """Ranks that each host starts: the number of its GPUs."""
    log_dir: str = ""
    """Folder on storage that all hosts share, for the output of every rank; empty: logs/ in
    the run's --save folder, or in the current folder."""
    workdir: str = ""
    """Folder in which each host starts the ranks, the same on all hosts; empty:
    --container-workdir, else the current folder, or the image's folder if it is not mounted."""
    python: str = ""
    """Command that runs Python on each host; empty: 'uv run python', in a container 'python',
    and for launch local the interpreter that runs this command."""
    env: tuple[str, ...] = ()
    """Environment variables of the ranks, each NAME=VALUE."""
    master_port: int = option(29500, minimum=1)
    """Port on the first host for the rendezvous of the ranks; each restart uses the next
    port."""
    render_dir: str = ""
    """Folder for the rendered files, whose old versions are replaced; empty: launch/JOB_NAME
    in the current folder."""
    preflight: bool = True
    """Before ranks start, every host compares its paths, packages, GPUs and shared folders
    with those of the other hosts."""
    preflight_timeout_s: float = option(300.0, minimum=1)
    """Time that a host waits for the other hosts in preflight."""
    ft_rank_section_timeouts: str = "setup:600,step:180,checkpointing:420"
    """Seconds after which ft_launcher ends a rank in a section, for runs with
    --enable-ft-package."""

    rules = (
        Rule(
            ("job_name",),
            lambda v: not _NAME.fullmatch(v.job_name),
            "--job-name {job_name!r} must be at most 42 lower-case letters, digits and dashes, "
            "without a dash at either end: Kubernetes uses it in host names.",
        ),
        Rule(("env",), lambda v: list(_bad_variables(v))),
        Rule(
            ("nodes", "min_nodes"),
            lambda v: v.min_nodes > v.nodes,
            "--min-nodes {min_nodes} is more than --nodes {nodes}: give at most {nodes}.",
        ),
    )

    @property
    def world_size(self) -> int:
        """Largest number of ranks of the job."""
        return self.nodes * self.nproc_per_node

    @property
    def is_elastic(self) -> bool:
        """Whether an attempt may start with fewer hosts than ``nodes``."""
        return 0 < self.min_nodes < self.nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartConfig(Options):
    """When and how often a failed job is started again."""

    max_restarts: int = option(3, minimum=0)
    """Consecutive restarts without a newly saved step, after failures that may be temporary (a
    lost host, a collective that timed out, ECC, a segmentation fault); 0: none. Errors in the
    options or the data end the job at once."""
    restart_backoff_s: float = option(10.0, minimum=0)
    """Pause before the first restart; doubled before each further restart without a newly
    saved step, up to ten minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalConfig(Options):
    """Options that only ``launch local`` has."""

    standby_after_s: float = option(0.0, minimum=0, zero="no standby")
    """Age of an attempt at which the ranks of the next attempt are started. They import their
    modules and wait, so that a restart takes only the time to connect and to load. Each rank
    uses host memory, an estimated 0.5 to 1 GB, and joins no GPU before its turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitConfig(Options):
    """Whether the rendered job is submitted, and which file to wait for."""

    submit: bool = False
    """Submit the job and print its id."""
    wait_for: str = option("", needs={"submit": ON})
    """File or folder: wait until it exists, then cancel the job."""
    poll_s: float = option(30.0, above=0)
    """Time between two checks for the file of --wait-for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerConfig(Options):
    """The container that ranks run in."""

    container_image: str = ""
    """Name of the image in a registry, or under Slurm the path of a squashfs file; empty: no
    container. Required on Kubernetes."""
    container_mounts: tuple[str, ...] = option((), needs={"container_image": ON})
    """Mounts, each SOURCE:TARGET. Under Slurm SOURCE is a folder of the host, on Kubernetes
    the name of a PersistentVolumeClaim."""
    container_workdir: str = option("", needs={"container_image": ON})
    """Folder in the container in which ranks start."""

    rules = (Rule(("container_mounts",), lambda v: list(_bad_mounts(v))),)

    @property
    def targets(self) -> tuple[str, ...]:
        """Target folders of the mounts, in the container."""
        return tuple(mount.split(":")[1].rstrip("/") or "/" for mount in self.container_mounts)

    def on_host(self, path: str) -> str:
        """Return the path on a Slurm job's hosts of a path in the container."""
        mounts = zip(self.targets, self.container_mounts, strict=True)
        for target, mount in sorted(mounts, key=lambda pair: -len(pair[0])):  # longest first
            prefix = target.rstrip("/")
            if f"{path}/".startswith(f"{prefix}/"):
                return mount.split(":")[0].rstrip("/") + path[len(prefix) :]
        return path


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig(Options):
    """Resources of a Slurm job, and its requeueing."""

    slurm_partition: str = ""
    """Partition; empty: the cluster's default."""
    slurm_account: str = ""
    """Account that is charged; empty: the user's default."""
    slurm_qos: str = ""
    """Quality of service; empty: the default."""
    time_limit: str = ""
    """Time limit of the job, as sbatch --time: D-HH:MM:SS, HH:MM:SS or minutes; empty: the
    partition's limit."""
    gpus_per_node: int = option(-1, minimum=-1)
    """GPUs to request on each host; -1: --nproc-per-node, or none with --device cpu; 0: no
    request, for clusters that allocate whole hosts."""
    signal_before_s: int = option(300, minimum=0)
    """Seconds before the time limit at which Slurm sends SIGUSR1; the run then saves, and the
    job is requeued. 0: no signal."""
    requeue: bool = True
    """Requeue the job when a host is lost, when the job is preempted, or when SIGUSR1 ended
    the run before its last step."""
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
    """Kind of resource: jobset, of the JobSet controller; trainjob, of Kubeflow Trainer 2, with
    its runtime; pytorchjob, of Kubeflow Training Operator 1."""
    namespace: str = "default"
    """Kubernetes namespace."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource name of the GPUs."""
    shm_size: str = "64Gi"
    """Size of /dev/shm, which data workers and NCCL use."""
    priority_class: str = ""
    """PriorityClass of the pods; empty: the cluster's default."""
    queue_name: str = ""
    """Local queue of Kueue that admits the job; empty: none."""
    termination_grace_s: int = option(600, minimum=0)
    """Time limit of the last save when a pod is evicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig(Options):
    """Ray cluster of a job."""

    ray_version: str = "2.46.0"
    """Version of Ray in the container image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilotConfig(Options):
    """Resources of a SkyPilot task."""

    accelerators: str = ""
    """GPU of a host, such as H100; empty: none, for --device cpu."""
    infra: str = ""
    """Infrastructure, such as slurm/mycluster, kubernetes or aws; empty: the cheapest."""
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
