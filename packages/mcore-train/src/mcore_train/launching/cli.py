"""``mcore-train launch``: renders, submits and follows jobs; commands that job scripts call."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mcore_base.command_line import HELP_FLAGS, FaultCollector, read_options
from mcore_base.command_line import parse as parse_options
from mcore_train.launching.config import (
    ContainerConfig,
    JobConfig,
    KubernetesConfig,
    LocalConfig,
    RayConfig,
    RestartConfig,
    SkyPilotConfig,
    SlurmConfig,
    SubmitConfig,
)

PROGRAM = "mcore-train launch"


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherOptions:
    """Options of every launcher."""

    job: JobConfig = field(default_factory=JobConfig)
    restarts: RestartConfig = field(default_factory=RestartConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions(LauncherOptions):
    """Options of ``launch local``, which runs the job's hosts as processes of this machine."""

    local: LocalConfig = field(default_factory=LocalConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions(LauncherOptions):
    """Options of ``launch slurm``."""

    submission: SubmitConfig = field(default_factory=SubmitConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions(LauncherOptions):
    """Options of ``launch kubernetes``."""

    submission: SubmitConfig = field(default_factory=SubmitConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions(KubernetesOptions):
    """Options of ``launch ray``: with an image a RayJob, else a driver for a Ray cluster."""

    ray: RayConfig = field(default_factory=RayConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilotOptions(LauncherOptions):
    """Options of ``launch skypilot``."""

    submission: SubmitConfig = field(default_factory=SubmitConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    skypilot: SkyPilotConfig = field(default_factory=SkyPilotConfig)


def launch(words: Sequence[str]) -> int:
    """Run one verb of ``mcore-train launch``."""
    verb, rest = (words[0], words[1:]) if words else ("--help", [])
    if verb in HELP_FLAGS:
        print(_USAGE)
        return 0
    if verb in LAUNCHERS:
        return _render(verb, list(rest))
    if verb not in VERBS:
        raise ValueError(
            f"unknown verb {verb}: {PROGRAM} has {', '.join([*LAUNCHERS, *VERBS])}."
        )
    return VERBS[verb](list(rest))


_USAGE = """usage: mcore-train launch LAUNCHER [OPTIONS] -- TRAINING COMMAND

Checks the training command, renders files that start it on several hosts, and submits them.

launchers:
  slurm       a batch script that restarts and requeues the job
  kubernetes  a JobSet, a TrainJob or a PyTorchJob
  ray         a RayJob, or a driver for a running Ray cluster
  skypilot    a SkyPilot task
  local       runs the job on this machine, with processes as hosts and the same restarts

submitted jobs:
  status JOB
  logs JOB
  cancel JOB

examples:
  mcore-train launch slurm --nodes 64 --time-limit 1-00:00:00 --submit -- gpt --recipe run.toml
  mcore-train launch local --nproc-per-node 2 -- gpt --model tiny --mock-data --train-iters 9

mcore-train launch LAUNCHER --help shows a launcher's options."""


def _render(verb: str, words: list[str]) -> int:
    """Check launcher options and training command, render the job, and submit it if asked."""
    from mcore_train.launching.job import build_job

    launcher_words, command = _split(words)
    options_type, render, sees_files = LAUNCHERS[verb]
    if set(launcher_words) & set(HELP_FLAGS):
        parse_options(options_type, f"{PROGRAM} {verb}", launcher_words)
    faults = FaultCollector()
    build = read_options(options_type, f"{PROGRAM} {verb}", launcher_words, faults)
    options = build() if build is not None else options_type()
    container = getattr(options, "container", None)
    job = build_job(
        options.job,
        options.restarts,
        command,
        faults,
        container=container,
        default_python=_python(verb, container),
        # Paths in a mount are those of the container, on any launcher.
        sees_files=sees_files and not getattr(container, "container_mounts", ()),
    )
    if options.job.is_elastic and verb not in ("slurm", "local"):
        faults.add(
            f"--min-nodes is supported by launch slurm and launch local, not by launch {verb}."
        )
    if verb == "kubernetes":
        from mcore_train.launching.kubernetes import check

        faults.attempt(check, container)
    faults.raise_all()
    assert job is not None
    if verb == "local":
        from mcore_train.launching.local import run_locally

        return run_locally(job, options.local.standby_after_s)
    rendered, submit = render(job, options)
    folder = Path(options.job.render_dir or f"launch/{options.job.job_name}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in rendered.items():
        (folder / name).write_text(text)
        print(folder / name)
    return _submit(options.submission, lambda: submit(folder))


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line at its first ``--``."""
    if "--" not in words:
        return words, []
    index = words.index("--")
    return words[:index], words[index + 1 :]


def _python(verb: str, container: ContainerConfig | None) -> str:
    """Return the command that runs Python on the hosts; images need not contain uv."""
    import sys

    if verb == "local":
        return shlex.quote(sys.executable)
    return "python" if container and container.container_image else "uv run python"


def _submit(config: SubmitConfig, submit: Callable[[], str]) -> int:
    if not config.submit:
        return 0
    from mcore_train.launching.clients import wait_for

    job_id = submit()
    print(job_id)
    if config.wait_for:
        wait_for(job_id, Path(config.wait_for), config.poll_s)
    return 0


Rendered = tuple[dict[str, str], Callable[[Path], str]]
"""Texts by file name, and a function that submits their folder and returns the job's id."""


def _slurm(job: Any, options: SlurmOptions) -> Rendered:
    from mcore_train.launching import clients, slurm

    text = slurm.render(job, options.slurm, options.container)
    return {slurm.SCRIPT: text}, lambda folder: clients.submit_slurm(folder / slurm.SCRIPT)


def _kubernetes(job: Any, options: KubernetesOptions) -> Rendered:
    from mcore_train.launching import clients, kubernetes

    resources = kubernetes.render(job, options.kubernetes, options.container)
    kind = options.kubernetes.kind
    job_id = f"{options.kubernetes.namespace}/{kind}/{options.job.job_name}"
    files = {kubernetes.FILE: kubernetes.yaml_text(resources)}
    return files, lambda folder: clients.submit_kubernetes(folder / kubernetes.FILE, job_id)


def _ray(job: Any, options: RayOptions) -> Rendered:
    from mcore_train.launching import clients, kubernetes, ray_skypilot

    name = options.job.job_name
    if not options.container.container_image:
        file = ray_skypilot.DRIVER
        text = ray_skypilot.driver(job)
        return {file: text}, lambda folder: clients.submit_ray(folder / file, name)
    resources = ray_skypilot.ray_job(job, options.ray, options.kubernetes, options.container)
    job_id = f"{options.kubernetes.namespace}/rayjob/{name}"
    files = {kubernetes.FILE: kubernetes.yaml_text(resources)}
    return files, lambda folder: clients.submit_kubernetes(folder / kubernetes.FILE, job_id)


def _skypilot(job: Any, options: SkyPilotOptions) -> Rendered:
    from mcore_train.launching import clients, kubernetes, ray_skypilot

    task = ray_skypilot.sky_task(job, options.skypilot, options.container)
    file = ray_skypilot.TASK
    return (
        {file: kubernetes.yaml_text([task])},
        lambda folder: clients.submit_sky(folder / file, options.job.job_name),
    )


def _local(_job: Any, _options: LocalOptions) -> Rendered:
    raise AssertionError("a local job is run, not rendered")


LAUNCHERS: Mapping[str, tuple[type[Any], Callable[[Any, Any], Rendered], bool]] = {
    "slurm": (SlurmOptions, _slurm, True),
    "kubernetes": (KubernetesOptions, _kubernetes, False),
    "ray": (RayOptions, _ray, False),
    "skypilot": (SkyPilotOptions, _skypilot, False),
    "local": (LocalOptions, _local, True),
}
"""By launcher: options, renderer, and whether this host has the files of the job's hosts."""


def _on_job(verb: str, words: list[str]) -> int:
    """Run a verb that takes a job's id."""
    from mcore_train.launching import clients

    def call(job: str, /) -> int:
        """Query or cancel a job by its scheduler; JOB is the id that --submit printed."""
        if answer := getattr(clients, verb)(job):
            print(answer)
        return 0

    return parse_options(call, f"{PROGRAM} {verb}", words)


def preflight(
    *,
    logs: str,
    num_ranks: int,
    has_gpus: bool = True,
    save: str = "",
    timeout_s: float = 300.0,
) -> int:
    """Compare this host with the other hosts of its job, before ranks start.

    Args:
        logs: log folder of the attempt, which all hosts share.
        num_ranks: number of ranks that each host starts.
        has_gpus: whether each rank needs a GPU.
        save: run folder that all hosts write to.
        timeout_s: time to wait for the other hosts.
    """
    from mcore_train.launching.preflight import check_hosts

    check_hosts(logs, num_ranks, has_gpus, save, timeout_s)
    return 0


def after(
    *,
    logs: str,
    status: int,
    save: str = "",
    last_step: int = 0,
    max_restarts: int = 3,
    restart_backoff_s: float = 10.0,
    record: bool = True,
) -> int:
    """Print what follows an attempt: finished, retry SECONDS, requeue or stop EXIT_CODE.

    Args:
        logs: log folder of the attempt.
        status: exit code of the attempt.
        save: run folder of the job.
        last_step: step after which the run is finished; 0: unknown.
        max_restarts: consecutive restarts without a newly saved step.
        restart_backoff_s: pause before the first of these restarts.
        record: write the answer to the job's history, and use the history to count restarts.
    """
    from mcore_train.launching.restarts import after_attempt

    answer = after_attempt(
        Path(logs),
        status,
        save=save,
        last_step=last_step,
        max_restarts=max_restarts,
        backoff_s=restart_backoff_s,
        record=record,
    )
    print(answer.word, f"{answer.number:g}")
    return 0


VERBS: Mapping[str, Callable[[list[str]], int]] = {
    "status": partial(_on_job, "status"),
    "logs": partial(_on_job, "logs"),
    "cancel": partial(_on_job, "cancel"),
    "preflight": lambda words: parse_options(preflight, f"{PROGRAM} preflight", words),
    "next": lambda words: parse_options(after, f"{PROGRAM} next", words),
}
"""Verbs for jobs; ``preflight`` and ``next`` are called by rendered scripts."""
