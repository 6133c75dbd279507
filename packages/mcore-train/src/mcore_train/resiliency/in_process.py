"""``--inprocess-restart``: nvidia-resiliency-ext's wrapper around a whole run.

After a fault of any rank the wrapper destroys all process groups, which ends the collectives
that other ranks wait in, raises in their main threads, and calls the run again on all of them.
The run is a function of its options: it loads the newest step and goes on.
"""

import logging
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from mcore_parallel.launch import launcher
from mcore_train.guards.nan_guard import NonFiniteError
from mcore_train.guards.rerun import BrokenDeviceError
from mcore_train.resiliency.config import InProcessConfig

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 300.0
LASTING = (ValueError, FileNotFoundError, NonFiniteError, BrokenDeviceError)
"""Errors that a restart in the same processes would meet again, unless torch raised them."""

Attempt = Callable[[int, dist.Store, Any], int]
"""Trains once: takes the number of restarts before, the store at which ranks meet, and the
package's wrapper, which receives marks of progress."""


def run_with_restarts(train: Attempt, config: InProcessConfig) -> int:
    """Call ``train`` on all ranks until they return, again after each fault that may pass.

    Args:
        train: leaves all process groups when it returns.
        config: times and numbers of ranks.

    Returns:
        What ``train`` returned; 0 on spare ranks.

    Raises:
        ValueError: if nvidia-resiliency-ext is missing, or a launcher did not start the ranks.
    """
    inprocess = import_nvrx("inprocess", "--inprocess-restart")
    world = launcher.read_environment()
    if not world.is_launched:
        raise ValueError("--inprocess-restart restarts ranks of a launcher: use torchrun.")
    active = config.inprocess_active_world_size or world.world_size
    if active > world.world_size:
        raise ValueError(
            f"--inprocess-active-world-size {active} is more than the {world.world_size} ranks "
            "that were started."
        )
    abort_error = import_nvrx("inprocess.exception", "").RestartAbort
    failure: list[Exception] = []
    meeting = meeting_store(world)

    def call(wrapper: Any) -> int:
        name = f"start-{launcher.restart_count()}-{wrapper.iteration}"
        try:
            return train(wrapper.iteration, dist.PrefixStore(name, meeting), wrapper)
        except BaseException as error:  # the package raises its own between two lines
            is_lasting = isinstance(error, LASTING) and not _is_of_torch(error)
            # The frames hold the groups. A gloo group closes its connections only when it is
            # freed, and other ranks wait on these connections. They hold the tensors too, and
            # the package keeps the error while the next attempt allocates its own.
            clear_frames(error)
            if is_lasting:
                failure.append(error)
                raise abort_error(str(error)) from error
            if not isinstance(error, Exception):
                raise
            log.error("this rank failed: %s: %s", type(error).__name__, error)
            raise RuntimeError(f"{type(error).__name__}: {error}") from None

    call.__annotations__["wrapper"] = inprocess.CallWrapper
    wrapped = _wrapper(inprocess, config, active, world)(call)
    try:
        return wrapped(None) or 0  # the package puts its wrapper in the argument's place
    except abort_error:
        if failure:
            raise failure[0] from None
        raise RuntimeError(
            "ranks ended for good on another rank, or too few of them are left to go on in "
            f"process ({active} must train): the launcher has to start them again."
        ) from None


def clear_frames(error: BaseException) -> None:
    """Free the locals of all frames of an error, and of the errors that it was raised in."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__context__


def _is_of_torch(error: BaseException) -> bool:
    """Whether torch raised an error, as it does where another rank tore the groups down."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and "/torch/" in frames[-1].f_code.co_filename


def import_nvrx(name: str, flag: str) -> Any:
    """Import a module of nvidia-resiliency-ext.

    Raises:
        ValueError: if it is not installed, or cannot be loaded here.
    """
    try:
        return import_module(f"nvidia_resiliency_ext.{name}")
    except ImportError as error:
        raise ValueError(
            f"{flag} needs nvidia-resiliency-ext ({error}): install mcore-train[resiliency], "
            "on Linux with glibc 2.39 and Python up to 3.12."
        ) from None


def meeting_store(world: launcher.RankEnvironment) -> dist.Store:
    """Return the store at which ranks meet, which outlives their process groups.

    Under torchrun that of its agent; else rank 0 holds one, on the port after MASTER_PORT.
    """
    host, port = launcher.master_address()
    is_agents = launcher.has_agent_store()
    return dist.TCPStore(
        host,
        port if is_agents else port + 1,
        is_master=world.rank == 0 and not is_agents,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
    )


def _wrapper(
    inprocess: Any, config: InProcessConfig, active: int, world: launcher.RankEnvironment
) -> Any:
    """Build the package's wrapper by the options."""
    layers = [
        inprocess.rank_assignment.Layer(
            min_ranks=active,
            max_ranks=active,
            flag=inprocess.rank_assignment.LayerFlag.RESERVE,
        )
    ]
    if config.inprocess_granularity == "node":
        ranks = min(world.local_world_size, active)
        layers.append(
            inprocess.rank_assignment.Layer(
                min_ranks=ranks,
                max_ranks=ranks,
                key_or_fn=lambda _state: os.uname().nodename,
                flag=inprocess.rank_assignment.LayerFlag.RESERVE,
            )
        )
    seconds = {
        name.removeprefix("inprocess_"): timedelta(seconds=getattr(config, name))
        for name in (
            "inprocess_monitor_thread_interval",
            "inprocess_monitor_process_interval",
            "inprocess_progress_watchdog_interval",
            "inprocess_heartbeat_interval",
            "inprocess_heartbeat_timeout",
            "inprocess_soft_timeout",
            "inprocess_hard_timeout",
            "inprocess_barrier_timeout",
            "inprocess_completion_timeout",
            "inprocess_last_call_wait",
            "inprocess_termination_grace_time",
        )
    }
    host, port = launcher.master_address()
    on_gpu = torch.cuda.is_available()
    finalize = None
    if config.inprocess_empty_cuda_cache and on_gpu:
        finalize = inprocess.finalize.ThreadedFinalize(timedelta(seconds=10), _empty_cache)
    abort = inprocess.abort.AbortTorchDistributed()
    if on_gpu:
        abort = inprocess.Compose(inprocess.abort.AbortTransformerEngine(), abort)
    wrapper = inprocess.Wrapper(
        store_kwargs={"host_name": host, "port": port + 2},
        initialize=inprocess.initialize.RetryController(
            max_iterations=config.inprocess_max_iterations, min_world_size=active
        ),
        abort=abort,
        finalize=finalize,
        health_check=(
            inprocess.health_check.CudaHealthCheck(timedelta(seconds=10)) if on_gpu else None
        ),
        rank_assignment=inprocess.rank_assignment.Tree(layers),
        **seconds,
    )
    if not on_gpu:
        wrapper.restart_health_check = None  # the package asks NVML, also on hosts without it
    return wrapper


def _empty_cache() -> None:
    torch.cuda.empty_cache()
