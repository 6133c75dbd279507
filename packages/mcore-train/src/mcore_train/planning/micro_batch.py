"""Implements ``--micro-batch-size auto``: the planner proposes a size, a probe confirms it."""

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from mcore_models.families import Family
from mcore_parallel.collectives import all_reduce
from mcore_parallel.launch import launcher
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.random_tiles import hash_words
from mcore_parallel.sharding import Shard
from mcore_train.assembly import Tables, assemble
from mcore_train.batches.micro_batches import train_batches
from mcore_train.composition import TrainConfig
from mcore_train.planning.expert_wgrads import choose_expert_wgrads, set_wgrad_micro_batches
from mcore_train.planning.memory import CONTEXT_GIB, GIB, predict_memory
from mcore_train.planning.step_time import predict_step
from mcore_train.planning.system import SYSTEMS, System, system_of_device
from mcore_train.resolution import Plan, build_plan
from mcore_train.step import train_step

log = logging.getLogger(__name__)


def choose_micro_batch(plan: Plan, ctx: ParallelContext, tables: Tables | None = None) -> Plan:
    """Return a run's plan with the fastest micro-batch that fits; all ranks call it together.

    One step of the proposed size is trained and discarded. If the step runs out of memory on
    any rank, the next smaller size is tried.

    Args:
        plan: with any micro-batch.
        ctx: the layout's groups.
        tables: optimizers, fp8 recipes and engines of the run, see ``assemble``.

    Raises:
        RuntimeError: if not even the smallest size can be trained.
    """
    limit = _device_bytes(ctx)
    system = _system(ctx)
    proposals = propose(
        plan.config, plan.family, plan.world_size, plan.vocab_size, system, limit
    )
    for size, seconds, needed in proposals:
        tried = with_micro_batch(plan, size)
        begin = time.monotonic()
        if not _runs(tried, ctx, tables):
            log.info("--micro-batch-size auto: %d ran out of memory in the probe", size)
            continue
        log.info(
            "--micro-batch-size auto takes %d: predicted %.0f ms a step and %.1f of %.1f GiB; "
            "one step was tried, in %.1f s",
            size,
            1e3 * seconds,
            needed / GIB,
            limit / GIB,
            time.monotonic() - begin,
        )
        return tried
    raise RuntimeError(
        "--micro-batch-size auto: even one sequence does not fit. Use "
        "--recompute-granularity full, or a layout that mcore-train plan prints."
    )


def propose(
    config: TrainConfig,
    family: Family,
    world_size: int,
    vocab_size: int,
    system: System,
    limit: float,
) -> list[tuple[int, float, float]]:
    """List micro-batches that should fit: the fastest, then smaller ones in turn.

    Args:
        config: all options.
        family: of the model.
        world_size: ranks.
        vocab_size: tokens of the model.
        system: constants of the GPU.
        limit: bytes of the device.

    Returns:
        Size, predicted seconds of a step and predicted bytes of each. One sequence is always
        among them.
    """
    parallel = config.parallelism
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    dp = world_size // (ranks * parallel.context_parallel_size)
    share = max(1, config.batch.global_batch_size // dp)
    proposals = []
    for size in (2**n for n in range(share.bit_length())):
        if share % size:
            continue
        tried = replace(config, batch=replace(config.batch, micro_batch_size=size))
        wgrads = choose_expert_wgrads(tried, family, world_size, vocab_size, system, limit)
        if wgrads:
            tried = set_wgrad_micro_batches(tried, wgrads.num_together)
        needed_bytes = predict_memory(tried, family, world_size, vocab_size, system).total
        if needed_bytes + CONTEXT_GIB * GIB > limit and size > 1:
            break
        try:
            step = predict_step(tried, family, world_size, vocab_size, system)
        except ValueError:  # the schedule needs more micro-batches
            break
        proposals.append((size, step.total, needed_bytes))
    fastest = min(range(len(proposals)), key=lambda index: proposals[index][1])
    return proposals[fastest::-1]


def with_micro_batch(plan: Plan, size: int) -> Plan:
    """Return the plan of the same run with another micro-batch.

    Raises:
        ValueError: if the options do not allow it.
    """
    config = plan.config
    config = replace(
        config,
        batch=replace(config.batch, micro_batch_size=size),
        launch=replace(config.launch, find_micro_batch_size=False),
    )
    return build_plan(config, plan.world_size, plan.family)


def _runs(plan: Plan, ctx: ParallelContext, tables: Tables | None) -> bool:
    """Train and discard one step; return whether all ranks had enough memory."""
    failed = _is_out_of_memory(lambda: _probe(plan, ctx, tables))
    gc.collect()
    if ctx.device.type == "cuda":
        torch.cuda.empty_cache()
    count = torch.tensor([failed], dtype=torch.int32, device=ctx.device)
    return not int(all_reduce(count, ctx.world))


def _probe(plan: Plan, ctx: ParallelContext, tables: Tables | None) -> None:
    data = replace(plan.config.data, num_workers=0)  # one batch is read: start no workers
    plan = replace(plan, config=replace(plan.config, data=data))
    run = assemble(plan, ctx, draws_weights=False, prepare=_draw_on_device, tables=tables)
    train_step(run, next(iter(train_batches(run))), 0.0, 0.0)


def _draw_on_device(weights: Mapping[str, Shard]) -> None:
    """Fill matrices with normal numbers on the device, equal on ranks that hold the same part.

    A router needs random weights: with zeros all tokens take the same experts. The run's own
    weights are drawn by the host, which takes seconds for each billion of them.
    """
    for name, shard in weights.items():
        if len(shard.shape) > 1 and not name.endswith("norm.weight"):
            for piece in shard.pieces:
                generator = torch.Generator(piece.data.device).manual_seed(hash_words(name))
                piece.data.normal_(std=0.02, generator=generator)


def _is_out_of_memory(function: Callable[[], None]) -> bool:
    try:
        function()
    except (torch.cuda.OutOfMemoryError, MemoryError):
        return True
    return False


def _device_bytes(ctx: ParallelContext) -> float:
    """Return the bytes of this rank's GPU, or the rank's share of the host's memory."""
    if ctx.device.type == "cuda":
        return float(torch.cuda.mem_get_info(ctx.device)[1])
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages / launcher.read_environment().local_world_size


def _system(ctx: ParallelContext) -> System:
    """Return the constants of this device, or of an H200, whose ratios are similar."""
    name = torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else ""
    return system_of_device(name) or SYSTEMS["h200"]
