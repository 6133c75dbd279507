"""A job, independent of its launcher: checked training command, environment and host script.

All launchers share the host script. Every host runs it once, with ``MASTER_ADDR``,
``MASTER_PORT``, ``NNODES``, ``NODE_RANK`` and ``MCORE_LOGS`` set. The script compares the
hosts, starts torchrun's agent, and on SIGTERM sends SIGUSR1 to the ranks, which then save and
end.
"""

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mcore_base.command_line import FaultCollector, OptionsError, canonical
from mcore_base.stores import as_path, is_store
from mcore_train.composition import FAMILY_COMMANDS, TrainConfig
from mcore_train.launching.config import ContainerConfig, JobConfig, RestartConfig
from mcore_train.launching.elastic import layouts_by_hosts
from mcore_train.options.output_checks import build_checked_plan
from mcore_train.options.parsing import parse
from mcore_train.resolution import Plan

log = logging.getLogger(__name__)

MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Hardware queues between a process and its GPU, read by CUDA when it starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A checked training command and the hosts that run it; input of the launchers."""

    config: JobConfig
    restarts: RestartConfig
    command: tuple[str, ...]
    """Arguments of ``python -m mcore_train``."""
    python: str
    environment: dict[str, str]
    workdir: str
    log_dir: str
    save: str
    """Run folder, whose newest step is the progress of the run; empty: none."""
    train_iters: int
    """Step after which the run is finished; 0: unknown."""
    uses_gpus: bool
    uses_ft_launcher: bool
    """Whether ``ft_launcher`` of nvidia-resiliency-ext starts the ranks, and not torchrun."""
    health_port: int
    """Port of the health endpoint of each host's first rank; 0: none."""
    layouts: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Flags to add to the command by the number of hosts; empty: the number is fixed."""


def build_job(
    config: JobConfig,
    restarts: RestartConfig,
    words: Sequence[str],
    faults: FaultCollector,
    *,
    container: ContainerConfig | None = None,
    default_python: str = "uv run python",
    sees_files: bool = True,
) -> Job | None:
    """Check a training command for the hosts of a job, as a run checks it; build the job.

    Args:
        config: options of the job.
        restarts: restart options; a run that can be restarted gets ``--auto-resume``.
        words: the training command: ``gpt`` and its flags.
        faults: collects all errors.
        container: container of the ranks.
        default_python: used if ``--python`` is not given.
        sees_files: whether this host has the files of the job's hosts. If not, errors about
            files in the container's mounts are ignored; the hosts check these files.

    Returns:
        The job, or None if the command cannot run; then errors were added to ``faults``.
    """
    container = container or ContainerConfig()
    name, *flags = words or [""]
    if name not in FAMILY_COMMANDS:
        faults.add(
            f"give a training command ({', '.join(FAMILY_COMMANDS)}) and its flags after --, "
            f"not {name!r}: mcore-train launch slurm --nodes 8 -- gpt --recipe run.toml."
        )
        return None
    remote_folders = () if sees_files else container.targets
    resume_flags = {"--auto-resume", "--no-auto-resume"} & {canonical(word) for word in flags}
    check = partial(
        _check_command, remote_folders=remote_folders, decides_resuming=bool(resume_flags)
    )
    checked = check(name, flags, config.world_size, faults=faults)
    if checked is None:
        return None
    train, plan = checked
    if train.launch.nproc:
        faults.add("--nproc cannot be used under mcore-train launch: give --nproc-per-node.")
    uses_gpus = train.run.device != "cpu"
    environment = dict(pair.split("=", 1) for pair in config.env)
    faults.attempt(_set_connections, environment, train)
    workdir = config.workdir or container.container_workdir or str(Path.cwd())
    if workdir == str(Path.cwd()) and not _is_inside(container, workdir):
        workdir = "."  # the container does not have this folder: use the image's
    save = train.saving.save
    if save and not is_store(as_path(save)):
        save = os.path.normpath(Path(workdir) / save)
    if not save and restarts.max_restarts:
        log.info(
            "the job will not be restarted: restarts need a saved step, and --save is not given"
        )
        restarts = replace(restarts, max_restarts=0)
    layouts: Mapping[int, tuple[str, ...]] = {}
    if config.is_elastic and plan is not None:
        if not train.batch.global_batch_size:
            flags += ["--global-batch-size", str(plan.global_batch_size)]
            log.info("--global-batch-size %d is added, to keep it", plan.global_batch_size)
            batch = replace(train.batch, global_batch_size=plan.global_batch_size)
            train = replace(train, batch=batch)

        def is_valid(more: Sequence[str], world_size: int) -> bool:
            layout_faults = FaultCollector()
            check(name, [*flags, *more], world_size, faults=layout_faults)
            return not layout_faults.lines

        family = FAMILY_COMMANDS[name].family
        layouts = faults.attempt(layouts_by_hosts, config, train, plan, family, is_valid) or {}
    command = [name, *flags]
    if save and not resume_flags:
        command.append("--auto-resume")
        log.info("--auto-resume is added, so that restarts continue from the newest saved step")
    if train.saving.overwrite:
        faults.add(
            "--overwrite would delete the run at each restart: delete the folder yourself, or "
            "give another --save."
        )
    log_parent = save if save and not is_store(as_path(save)) else workdir
    log_dir = os.path.normpath(Path(workdir) / (config.log_dir or f"{log_parent}/logs"))
    faults.attempt(_check_mounts, container, {"--log-dir": log_dir, "--save": save})
    for recipe in train.launch.recipe:
        if not _is_inside(container, os.path.normpath(Path(workdir) / recipe)):
            log.warning(
                "--recipe %s is in none of --container-mounts (%s): the image must have it. "
                "Else mount its folder and give its path in the container.",
                *(recipe, ", ".join(container.targets) or "none given"),
            )
    return Job(
        config=config,
        restarts=restarts,
        command=tuple(command),
        python=config.python or default_python,
        environment=environment,
        workdir=workdir,
        log_dir=log_dir,
        save=save,
        train_iters=plan.train_iters if plan is not None else train.batch.train_iters,
        uses_gpus=uses_gpus,
        uses_ft_launcher=train.fault_tolerance.enable_ft_package,
        health_port=train.logging.health_port,
        layouts=layouts,
    )


def _check_command(
    name: str,
    flags: Sequence[str],
    world_size: int,
    *,
    remote_folders: Sequence[str],
    decides_resuming: bool,
    faults: FaultCollector,
) -> tuple[TrainConfig, Plan | None] | None:
    """Parse a training command and plan it for a number of ranks; add errors to ``faults``.

    Args:
        name: name of the command.
        flags: flags of the command.
        world_size: ranks of the job.
        remote_folders: folders of the job's hosts only; errors about files in these folders
            are logged and ignored.
        decides_resuming: whether the flags have ``--auto-resume`` or ``--no-auto-resume``. If
            not, ``--auto-resume`` is assumed for a run that saves.
        faults: collects all other errors.
    """
    command = FAMILY_COMMANDS[name]
    command_faults, plans = FaultCollector(), []

    def check(config: TrainConfig) -> None:
        if config.saving.save and not decides_resuming:
            config = replace(config, loading=replace(config.loading, auto_resume=True))
        plans.append(build_checked_plan(_for_gpus(config), world_size, command.family))

    config = command_faults.attempt(
        partial(parse, needs=command.needs, check=check),
        *(flags, f"mcore-train {name}", command.run, command.beginning),
    )
    if config is not None:
        command_faults.attempt(check, config)
    local_faults = [
        line
        for line in command_faults.lines
        if not any(f"{folder}/" in line for folder in remote_folders)
    ]
    if local_faults:
        faults.add_error(OptionsError(local_faults))
    elif command_faults.lines:
        log.info(
            "not checked here, since only the job's hosts have the files: %s",
            "; ".join(command_faults.lines),
        )
    return None if config is None else (config, plans[0] if plans else None)


def _for_gpus(config: TrainConfig) -> TrainConfig:
    """Replace ``--precision auto`` by bfloat16, since the job's hosts may have other GPUs."""
    if config.precision.precision != "auto":
        return config
    bf16 = config.run.device != "cpu"
    return replace(config, precision=replace(config.precision, precision="", bf16=bf16))


def max_connections(config: TrainConfig) -> str:
    """Return ``CUDA_DEVICE_MAX_CONNECTIONS`` for a layout; empty: CUDA's default.

    With 1, a collective starts before a GEMM that is launched after it; the overlap of tensor
    and context parallelism needs this order on GPUs before Blackwell. Fully sharded weights
    need several queues, so that gathers overlap with GEMMs; batch-level overlap of experts
    needs 32.
    """
    parallelism = config.parallelism
    if config.run.device == "cpu":
        return ""
    if config.pipeline.overlap_moe_expert_parallel_comm:
        return "32"
    if config.data_parallelism.is_fully_sharded:
        return ""
    is_split = (
        parallelism.tensor_model_parallel_size > 1 or parallelism.context_parallel_size > 1
    )
    return "1" if is_split else ""


def _set_connections(environment: dict[str, str], config: TrainConfig) -> None:
    """Add the layout's ``CUDA_DEVICE_MAX_CONNECTIONS``; refuse another value of ``--env``."""
    required, value = max_connections(config), environment.get(MAX_CONNECTIONS, "")
    if value == "1" and config.data_parallelism.is_fully_sharded:
        raise ValueError(
            f"--env {MAX_CONNECTIONS}=1 serializes the gathers of fully sharded weights with "
            "the GEMMs they should overlap: leave it out."
        )
    allowed = {"32": ("1", "32"), "1": ("1",)}.get(required, (value,))
    if value and value not in allowed:
        raise ValueError(
            f"--env {MAX_CONNECTIONS}={value}: this layout needs {' or '.join(allowed)}, "
            "except on Blackwell, where it has no effect. Leave it out; the launcher sets it."
        )
    if required and not value:
        environment[MAX_CONNECTIONS] = required


def _check_mounts(container: ContainerConfig, paths: dict[str, str]) -> None:
    """Refuse paths of shared files that are not in a mount of the container."""
    if not container.container_image:
        return
    targets = ", ".join(container.targets) or "none given"
    outside = [
        f"{option} {path} is in none of --container-mounts ({targets}): the files would be "
        "lost with the container. Add a mount, or give a path in one."
        for option, path in paths.items()
        if path and not is_store(as_path(path)) and not _is_inside(container, path)
    ]
    if outside:
        raise OptionsError(outside)


def _is_inside(container: ContainerConfig, path: str) -> bool:
    """Whether the ranks can see a path: it is in a mount, or there is no container."""
    mounted = (f"{path}/".startswith(f"{each.rstrip('/')}/") for each in container.targets)
    return not container.container_image or any(mounted)


def exports(job: Job) -> list[str]:
    """Return the shell lines that set a job's environment and unset inherited values."""
    lines = [f"export {name}={shlex.quote(text)}" for name, text in job.environment.items()]
    if job.uses_gpus and MAX_CONNECTIONS not in job.environment:
        lines.append(f"unset {MAX_CONNECTIONS}")
    return lines


def host_script(job: Job, preamble: Sequence[str] = (), *, retry_code: int = 0) -> str:
    """Render the script that each host runs once.

    Args:
        job: what to start.
        preamble: shell lines that set the variables of the module's docstring.
        retry_code: for schedulers that restart by exit code: exit code after a temporary
            failure or a stop before the last step; other failures use the code of their class
            in ``FAULTS``. 0: the exit code of torchrun.
    """
    config = job.config
    lines = [
        "set -euo pipefail",
        *preamble,
        *exports(job),
        f"cd {shlex.quote(job.workdir)}",
        'mkdir -p "$MCORE_LOGS/host-$NODE_RANK"',
    ]
    if job.layouts:
        lines += [
            "# Flags of the layout for this number of hosts; batch and data are the same.",
            'case "$NNODES" in',
            *(
                f"    {hosts}) layout=({' '.join(map(shlex.quote, flags))}) ;;"
                for hosts, flags in job.layouts.items()
            ),
            f'    *) echo "no layout for $NNODES hosts: use {_listed(job.layouts)}" >&2',
            "       exit 12 ;;",
            "esac",
        ]
    if config.preflight and config.nodes > 1:
        gpus = "--has-gpus" if job.uses_gpus else "--no-has-gpus"
        save = f" --save {shlex.quote(job.save)}" if job.save else ""
        lines += [
            "# Exits with 2 before ranks start if a comparison of the hosts fails.",
            f'{job.python} -m mcore_train launch preflight --logs "$MCORE_LOGS" \\',
            f"    --num-ranks {config.nproc_per_node} {gpus}{save} \\",
            f"    --timeout-s {config.preflight_timeout_s:g} 2>&1 \\",
            '    | tee "$MCORE_LOGS/host-$NODE_RANK/preflight.log"',
        ]
    agent = "torch.distributed.run"
    agent_options = [
        '    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\',
        "    --local-ranks-filter 0 \\",
    ]
    if job.uses_ft_launcher:
        agent = "nvidia_resiliency_ext.fault_tolerance.launcher"
        agent_options = [
            '    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" \\',
            "    --max-restarts 0 \\",
            f"    --ft-rank-section-timeouts {config.ft_rank_section_timeouts} \\",
        ]
    lines += [
        "# If a collective hangs, ranks write the last ones here, for mcore-train triage.",
        'export TORCH_FR_DUMP_TEMP_FILE="$MCORE_LOGS/host-$NODE_RANK/nccl_trace_rank_"',
        "",
        "# A batch system sends USR1 to every process of the job. Ranks save and end;",
        "# torchrun must ignore it, since its default action would end torchrun.",
        "trap '' USR1 USR2",
        f"{job.python} -m {agent} \\",
        '    --nnodes "$NNODES" --node-rank "$NODE_RANK" \\',
        f"    --nproc-per-node {config.nproc_per_node} \\",
        *agent_options,
        '    --log-dir "$MCORE_LOGS/host-$NODE_RANK" --redirects 3 --tee 3 \\',
        f"    -m mcore_train {quoted_command(job.command)} \\",
        *(['    "${layout[@]}" \\'] if job.layouts else []),
        '    2> >(tee "$MCORE_LOGS/host-$NODE_RANK/torchrun.log" >&2) &',
        "agent=$!",
        _WAIT.strip("\n"),
    ]
    if retry_code:
        lines += [
            "# The exit code determines whether the scheduler restarts the job.",
            f"answer=$({next_command(job)} --no-record) || answer='stop 1'",
            'read -r next number <<< "$answer"',
            'case "$next" in',
            '    stop) exit "$number" ;;',
            f"    retry | requeue) exit {retry_code} ;;",
            "esac",
        ]
    lines.append('exit "$status"')
    return "\n".join(lines) + "\n"


def _listed(layouts: Mapping[int, tuple[str, ...]]) -> str:
    return ", ".join(map(str, sorted(layouts)))


_WAIT = """
# torchrun kills ranks 30 s after SIGTERM, and a save may take longer: send USR1 to ranks only.
warn_ranks() {
    local child
    for child in $(cat /proc/"$1"/task/*/children 2>/dev/null); do
        if grep -qz '^LOCAL_RANK=' "/proc/$child/environ" 2>/dev/null; then
            kill -USR1 "$child" 2>/dev/null || true
        else
            warn_ranks "$child"
        fi
    done
}
trap 'warn_ranks "$agent"' TERM INT
while kill -0 "$agent" 2>/dev/null; do wait "$agent" || true; done
status=0
wait "$agent" || status=$?
"""


def quoted_command(command: Sequence[str]) -> str:
    """Quote a command for a shell, with one option per line."""
    lines: list[str] = []
    for word in command:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n        ".join(lines)


def next_command(job: Job) -> str:
    """Return the shell command that prints what follows an attempt that ended with $status."""
    words = [
        f'{job.python} -m mcore_train launch next --logs "$MCORE_LOGS" --status "$status"',
        f"--max-restarts {job.restarts.max_restarts}",
        f"--restart-backoff-s {job.restarts.restart_backoff_s:g}",
    ]
    if job.save:
        words.append(f"--save {shlex.quote(job.save)} --last-step {job.train_iters}")
    return " \\\n        ".join(words)
