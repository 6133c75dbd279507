"""Runs a training from its config to its end: plan, ranks, assembly, checkpoint, loop."""

import contextlib
import faulthandler
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from mcore_base.options import flag
from mcore_base.stores import as_path, is_store
from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_models.families import GPT_FAMILY, Family
from mcore_parallel.launch import launcher
from mcore_parallel.launch.watchdog import Watch
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import Tables
from mcore_train.checkpoints.checkpointing import clear_run_folder
from mcore_train.checkpoints.origin import starting_point
from mcore_train.checkpoints.resuming import build_run
from mcore_train.composition import TrainConfig, flat
from mcore_train.config import LogConfig
from mcore_train.launching.standby import wait_for_turn
from mcore_train.loop import train
from mcore_train.options.output_checks import build_checked_plan
from mcore_train.planning.micro_batch import choose_micro_batch
from mcore_train.precision import with_device_precision
from mcore_train.reporting.header import StartClock, build_header
from mcore_train.reporting.health import Health, HealthServer
from mcore_train.reporting.log import (
    METRICS,
    SAMPLES,
    SPIKES,
    TENSORBOARD,
    Reporter,
    set_up,
)
from mcore_train.reporting.loggers.background import BackgroundLogger
from mcore_train.reporting.loggers.protocol import Logger
from mcore_train.resiliency.sections import InProcessSections, Sections, open_sections
from mcore_train.resolution import Plan

log = logging.getLogger(__name__)


def run_training(
    config: TrainConfig,
    family: Family = GPT_FAMILY,
    tables: Tables | None = None,
    loggers: Sequence[Logger] = (),
) -> int:
    """Train as the config specifies, as one rank of the launcher's world.

    Args:
        config: the options.
        family: of the model; one of ``FAMILIES`` or your own.
        tables: optimizers, fp8 recipes and data-parallel engines by option value.
        loggers: loggers in addition to those that the options name.

    Returns:
        0, also after a signal that ended the run cleanly.

    Raises:
        ValueError: with every conflict of options and world, before any collective.
    """
    start = StartClock()
    start.end("imports")
    if wait_for_turn(uses_gpus=config.run.device != "cpu"):
        start = StartClock(since_process_began=False)
    if not config.in_process.inprocess_restart:
        return _train_once(config, family, tables, loggers, start)
    from mcore_train.resiliency.in_process import run_with_restarts

    def train_again(num_restarts: int, store: dist.Store, wrapper: Any) -> int:
        if num_restarts:
            log.info("restart %d in the same processes", num_restarts)
        sections = InProcessSections(wrapper)
        clock = StartClock(since_process_began=False) if num_restarts else start
        return _train_once(config, family, tables, loggers, clock, store, sections)

    return run_with_restarts(train_again, config.in_process)


def _train_once(
    config: TrainConfig,
    family: Family,
    tables: Tables | None,
    loggers: Sequence[Logger],
    start: StartClock,
    store: dist.Store | None = None,
    sections: Sections | None = None,
) -> int:
    """Train from start or newest step to the end; see ``run_training``.

    Args:
        config: the options.
        family: of the model.
        tables: see ``run_training``.
        loggers: see ``run_training``.
        start: takes the times of the parts of the start.
        store: at which ranks meet; None: the launcher's.
        sections: report to a monitor; None: those of the options.
    """
    world = launcher.read_environment()
    console = set_up(world.rank == 0)
    config = with_device_precision(config, world.local_rank)
    plan = build_checked_plan(config, world.world_size, family, is_reporter=world.rank == 0)
    start.end("planning")
    sections = sections or open_sections(config.fault_tolerance, config.saving.save, world)
    with (
        sections,
        served_health(plan, world) as health,
        watched_world(plan, store) as (ctx, watch),
    ):
        start.end("joining ranks")
        if config.launch.find_micro_batch_size:
            plan = choose_micro_batch(plan, ctx, tables)
            start.end("probing batches")
        run = build_run(plan, ctx, tables, start)
        if run.origin.checkpoint:
            load = starting_point(config).load
            log.info("continuing at iteration %d from %s", run.progress.iteration, load)
        if config.saving.overwrite:
            clear_run_folder(config.saving.save, ctx)
        with build_reporter(
            plan,
            console if world.rank == 0 else None,
            continues_from=run.progress.iteration,
            health=health,
            loggers=loggers,
        ) as reporter:
            reporter.report_header(run.progress.iteration, build_header(run, start))
            train(run, reporter, watch=watch, sections=sections)
    return 0


@contextlib.contextmanager
def joined_world(plan: Plan) -> Iterator[ParallelContext]:
    """Join the launcher's world and yield the plan's process groups; see ``watched_world``."""
    with watched_world(plan) as (ctx, _):
        yield ctx


@contextlib.contextmanager
def watched_world(
    plan: Plan, store: dist.Store | None = None
) -> Iterator[tuple[ParallelContext, Watch]]:
    """Join the launcher's world and build the plan's groups; leave both at the end.

    Inside, a rank that fails, dies or hangs ends all ranks (see ``Watch``, which is yielded
    with the groups).

    Args:
        plan: of the run.
        store: rendezvous of the ranks; None: the launcher's. With a store the watch is off:
            the caller restarts ranks, and ends ranks that hang.
    """
    config = plan.config
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # a mapped file that loses its space ends a rank by SIGBUS
    timeout_minutes = config.parallelism.distributed_timeout_minutes
    with contextlib.ExitStack() as stack:
        if config.run.deterministic_mode:
            stack.enter_context(launcher.deterministic_algorithms())
        device = launcher.initialize(config.run.device, timeout_minutes, store)
        leaving = contextlib.ExitStack()
        leaving.callback(launcher.shut_down)
        if store is None:
            stack.push(leaving)
        if config.run.cuda_graph_impl != "none":
            if device.type != "cuda":
                raise ValueError(
                    f"--cuda-graph-impl {config.run.cuda_graph_impl} needs a GPU, and this run "
                    "is on the CPU: leave it out."
                )
            # CUDA graphs cannot record the default stream, nor work that was started on it.
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        ctx = ParallelContext.build(
            config.parallelism,
            device,
            compare_calls=True,
            embedding_stages=plan.embedding_stages,
        )
        leaving.callback(ctx.destroy)
        watch = Watch.of_world(
            ctx.world.rank,
            ctx.world.size if store is None else 1,
            timeout_minutes,
            reports_steps=store is None,
            end_on_hang=config.watching.end_on_hang,
        )
        stack.enter_context(watch)
        check_same_options(config, ctx)
        yield ctx, watch
        if store is not None:  # after a fault, the restarting caller aborts the groups
            leaving.close()


@contextlib.contextmanager
def served_health(plan: Plan, world: launcher.RankEnvironment) -> Iterator[Health | None]:
    """Serve ``--health-port`` on the first rank of each host, from before ranks meet.

    Raises:
        ValueError: if the port is taken.
    """
    port = plan.config.logging.health_port
    if not port or world.local_rank:
        yield None
        return
    # The watch ends ranks that hang for the timeout. A minute later, a rank that it did not
    # end is reported as stale.
    stale_s = 60.0 * (plan.config.parallelism.distributed_timeout_minutes + 1)
    health = Health(stale_s, rank=world.rank)
    health.begin(0, plan.train_iters)
    with HealthServer(port, health):
        yield health


def check_same_options(config: TrainConfig, ctx: ParallelContext) -> None:
    """Compare the options of all ranks; all of them call it together.

    Raises:
        ValueError: on all ranks, naming the options in which a rank differs from rank 0.
    """
    first, *others = gather_json(flat(config), ctx.world)
    for rank, options in enumerate(others, start=1):
        different = [
            f"{flag(name)} {value} instead of {first[name]}"
            for name, value in options.items()
            if first[name] != value
        ]
        if different:
            raise ValueError(
                f"rank {rank} was started with other options than rank 0 "
                f"({'; '.join(different)}): start all ranks with one command."
            )


def build_reporter(
    plan: Plan,
    console: Console | None,
    *,
    with_lines: bool = True,
    continues_from: int = 0,
    health: Health | None = None,
    loggers: Sequence[Logger] = (),
) -> Reporter:
    """Build the reporter of the plan's flags.

    Args:
        plan: of the run; its flags name the files.
        console: where to show progress; None on ranks that do not report.
        with_lines: write a line for each report.
        continues_from: steps done before.
        health: as of ``Reporter``.
        loggers: in addition to those of the flags.

    Raises:
        ValueError: if the package of a logger is not installed.
    """
    save, options = plan.config.saving.save, plan.config.logging
    on_disk = str(as_path(save)) if save and not is_store(as_path(save)) else ""
    metrics = options.metrics_file or (f"{on_disk}/{METRICS}" if on_disk else "")
    return Reporter(
        console,
        metrics_file=Path(metrics) if metrics else None,
        samples_file=Path(on_disk) / SAMPLES if on_disk else None,
        spikes_file=Path(on_disk) / SPIKES if on_disk else None,
        loggers=() if console is None else (*named_loggers(options, on_disk), *loggers),
        with_lines=with_lines,
        continues_from=continues_from,
        health=health,
    )


def named_loggers(options: LogConfig, folder: str) -> list[Logger]:
    """Build the loggers that the options name; opens no file or connection.

    Args:
        options: the options of logging.
        folder: run folder.

    Raises:
        ValueError: if the package of one is not installed.
    """
    names = ["tensorboard"] * options.tensorboard + ["wandb"] * bool(options.wandb_project)
    built: list[Logger] = []
    for name in (*names, *options.loggers):
        try:
            logger = _build_logger(name, options, folder)
            built.append(logger if name == "tensorboard" else BackgroundLogger(logger))
        except ModuleNotFoundError as error:
            asked = {"tensorboard": "--tensorboard", "wandb": "--wandb-project"}
            raise ValueError(
                f"{asked.get(name, f'--loggers {name}')} needs the package {error.name}: "
                f'pip install "mcore-train[{name}]".'
            ) from None
    return built


def _build_logger(name: str, options: LogConfig, folder: str) -> Logger:
    match name:
        case "tensorboard":
            from mcore_train.reporting.loggers.tensorboard import TensorBoardLogger

            board = Path(options.tensorboard_dir or Path(folder) / TENSORBOARD)
            return TensorBoardLogger(board, options.tensorboard_queue_size)
        case "wandb":
            from mcore_train.reporting.loggers.wandb import WandbLogger

            return WandbLogger(
                options.wandb_project,
                options.wandb_exp_name,
                options.wandb_entity,
                options.wandb_save_dir,
            )
        case "mlflow":
            from mcore_train.reporting.loggers.mlflow import MlflowLogger

            return MlflowLogger()
        case "trackio":
            from mcore_train.reporting.loggers.trackio import TrackioLogger

            return TrackioLogger()
        case "prometheus":
            from mcore_train.reporting.loggers.prometheus import PrometheusLogger

            return PrometheusLogger(Path(folder))
        case _:
            from mcore_train.reporting.loggers.opentelemetry import OpenTelemetryLogger

            return OpenTelemetryLogger()
