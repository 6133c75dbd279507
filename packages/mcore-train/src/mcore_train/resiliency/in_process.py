"""``--inprocess-restart``: nvidia-resiliency-ext's wrapper around a whole run.

After a fault of any rank the wrapper destroys all process groups, which ends the collectives of
the other ranks, raises an exception in their main threads, and calls the run again on all
ranks. The run is a function of its options: it loads the newest step and continues.
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
"""Errors that a restart in the same processes would repeat, unless torch raised them."""

Attempt = Callable[[int, dist.Store, Any], int]
"""Trains once. Arguments: number of earlier restarts, store for the rendezvous of the ranks,
and the package's wrapper, which receives progress marks."""


def run_with_restarts(train: Attempt, config: InProcessConfig) -> int:
    """Call ``train`` on all ranks, again after each temporary fault, until it returns.

    Args:
        train: trains once; it destroys all process groups before it returns.
        config: timeouts and numbers of ranks.

    Returns:
        Result of ``train``; 0 on spare ranks.

    Raises:
        ValueError: if nvidia-resiliency-ext is missing, or a launcher did not start the ranks.
    """
    inprocess = import_nvrx("inprocess", "--inprocess-restart")
    world = launcher.read_environment()
    if not world.is_launched:
        raise ValueError(
            "--inprocess-restart needs ranks that a launcher started: use torchrun."
        )
    active = config.inprocess_active_world_size or world.world_size
    if active > world.world_size:
        raise ValueError(
            f"--inprocess-active-world-size {active} is more than the {world.world_size} "
            "started ranks: lower it, or start more ranks."
        )
    abort_error = import_nvrx("inprocess.exception", "").RestartAbort
    failure: list[Exception] = []
    store = rendezvous_store(world)

    def call(wrapper: Any) -> int:
        name = f"start-{launcher.restart_count()}-{wrapper.iteration}"
        try:
            return train(wrapper.iteration, dist.PrefixStore(name, store), wrapper)
        except BaseException as error:  # the package raises asynchronous exceptions
            is_lasting = isinstance(error, LASTING) and not _is_raised_by_torch(error)
            # The frames of the error refer to groups and tensors. A gloo group closes its
            # connections, on which other ranks wait, only when it is freed. The tensors must be
            # freed before the next attempt allocates, and the package stores the error.
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
        return wrapped(None) or 0  # the package replaces the argument by its wrapper
    except abort_error:
        if failure:
            raise failure[0] from None
        raise RuntimeError(
            "another rank ended with an error that a restart does not fix, or fewer than the "
            f"{active} ranks that must train are left: the launcher must start the ranks again."
        ) from None


def clear_frames(error: BaseException) -> None:
    """Free the locals of all frames of an error and of its contexts."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__context__


def _is_raised_by_torch(error: BaseException) -> bool:
    """Whether torch raised an error, such as after another rank destroyed the groups."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and "/torch/" in frames[-1].f_code.co_filename


def import_nvrx(name: str, flag: str) -> Any:
    """Import a module of nvidia-resiliency-ext.

    Raises:
        ValueError: if the package is not installed, or cannot be loaded on this system.
    """
    try:
        return import_module(f"nvidia_resiliency_ext.{name}")
    except ImportError as error:
        raise ValueError(
            f"{flag} needs nvidia-resiliency-ext ({error}): install mcore-train[resiliency], "
            "on Linux with glibc 2.39 and Python up to 3.12."
        ) from None


def rendezvous_store(world: launcher.RankEnvironment) -> dist.Store:
    """Return the store for the rendezvous of the ranks, which outlives their process groups.

    Under torchrun this is the store of its agent; else rank 0 serves one on MASTER_PORT + 1.
    """
    host, port = launcher.master_address()
    has_agent_store = launcher.has_agent_store()
    return dist.TCPStore(
        host,
        port if has_agent_store else port + 1,
        is_master=world.rank == 0 and not has_agent_store,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
    )


def _wrapper(
    inprocess: Any, config: InProcessConfig, active: int, world: launcher.RankEnvironment
) -> Any:
    """Build the package's wrapper from the options."""
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
        wrapper.restart_health_check = None  # the default uses NVML, also on hosts without GPUs
    return wrapper


def _empty_cache() -> None:
    torch.cuda.empty_cache()
