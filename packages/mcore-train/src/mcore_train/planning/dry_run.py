"""Resolves a run of any number of ranks on one CPU: ``mcore-train gpt ... --dry-run``.

Everything that a run decides before its first step is decided here by the same code: the plan
with all its conflicts, process groups (torch's fake backend, which connects no processes), the
layers of one rank per stage (matrices without memory), the schedule, the tensors of a
checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mcore_models.families import Family
from mcore_models.flops import local_elements, rank_elements, rank_stages
from mcore_models.layers.layer_setup import Execution
from mcore_models.protocol import share_embedding
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.schedule import build_schedule
from mcore_parallel.pipeline_parallel.simulator import simulate
from mcore_parallel.pipeline_parallel.stages import stages_of_rank
from mcore_parallel.rank_grid import build_grids
from mcore_parallel.rng import RngStreams
from mcore_parallel.sharding import named_shards
from mcore_train.composition import TrainConfig
from mcore_train.options.output_checks import build_checked_plan
from mcore_train.planning.memory import GIB
from mcore_train.precision import torch_dtype
from mcore_train.resolution import Plan

GROUPS = (("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp"))
EXPERT_GROUPS = (("expert_tp",), ("ep",), ("expert_dp",))
MOST_SIMULATED = 256
"""Largest number of micro-batches of the schedule that is checked; later ones repeat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltRank:
    """Parameters and logical tensors of one rank."""

    rank: int
    pipeline_rank: int
    parameters: int
    logical_tensors: frozenset[str]


def dry_run(config: TrainConfig, family: Family, world_size: int) -> str:
    """Return a description of a run from its resolved plan, without training.

    Args:
        config: all options.
        family: of the model.
        world_size: ranks of the job.

    Raises:
        ValueError: for every fault of a run of that world, and if its ranks together do not
            hold the model.
    """
    plan = build_checked_plan(config, world_size, family)
    config, pp = plan.config, plan.config.parallelism.pipeline_model_parallel_size
    ranks = [_build_rank(plan, _member(plan, pipeline_rank)) for pipeline_rank in range(pp)]
    names = frozenset().union(*(rank.logical_tensors for rank in ranks))
    expected = family.tensor_shapes(config.model, plan.vocab_size, config.experts)
    lines = [
        (
            f"dry run of {world_size} ranks: {plan.num_microbatches} micro-batches of "
            f"{config.batch.micro_batch_size} on each of {plan.data_parallel_size} data ranks"
        ),
        "",
        *_groups(plan),
        "",
        *_schedule(plan),
        "",
        *_bytes(plan, ranks),
        "",
        *_checkpoint(plan, names, set(expected)),
        "",
        *_data(plan),
    ]
    return "\n".join(lines)


def _groups(plan: Plan) -> list[str]:
    """Check that each rank is in one group of each axis; describe the groups."""
    parallel, world = plan.config.parallelism, plan.world_size
    dense, expert = build_grids(parallel, world)
    lines = [f"{'axis':12}{'groups':>8}{'ranks':>7}  first group"]
    grids = [(dense, names) for names in GROUPS]
    if plan.config.experts.num_experts:
        grids += [(expert, names) for names in EXPERT_GROUPS]
    for grid, names in grids:
        groups = grid.groups(names)
        members = sorted(rank for group in groups for rank in group)
        if members != list(range(world)):
            raise ValueError(f"groups of {'-'.join(names)} do not hold each rank once.")
        first = groups[0]
        shown = ", ".join(map(str, first[:6])) + (", ..." if len(first) > 6 else "")
        lines.append(f"{'-'.join(names):12}{len(groups):>8}{len(first):>7}  {shown}")
    return lines


def _schedule(plan: Plan) -> list[str]:
    """Check order, messages and deadlocks of the schedule; describe its bubble."""
    pipeline, pp = plan.config.pipeline, plan.config.parallelism.pipeline_model_parallel_size
    if pp == 1:
        return ["schedule: one stage, no messages"]
    num_simulated = min(plan.num_microbatches, MOST_SIMULATED)
    simulation = simulate(
        build_schedule(pipeline, pp, num_simulated),
        num_microbatches=num_simulated,
        num_chunks=pipeline.num_chunks,
        v_shaped=pipeline.v_shaped,
    )
    layers = ", ".join(str(len(stage.layers)) for stage in plan.stages)
    return [
        (
            f"schedule {pipeline.pipeline_schedule or '1f1b'} of {num_simulated} "
            f"micro-batches: valid, bubble {simulation.bubble_fraction:.1%} of the work with "
            "equal stages"
        ),
        f"layers of the stages: {layers}",
    ]


def _member(plan: Plan, pipeline_rank: int) -> int:
    """Return the first global rank of a pipeline rank."""
    dense, _ = build_grids(plan.config.parallelism, plan.world_size)
    return dense.groups(("pp",))[0][pipeline_rank]


def _build_rank(plan: Plan, rank: int) -> BuiltRank:
    config = plan.config
    with _fake_world(rank, plan.world_size):
        ctx = ParallelContext.build(
            config.parallelism, "cpu", embedding_stages=plan.embedding_stages
        )
        streams = RngStreams(config.run.seed, ctx)
        chunks = [
            plan.family.build(
                config.model,
                ctx,
                vocab_size=plan.vocab_size,
                moe=config.experts,
                stage=stage,
                seed=None,
                execution=Execution(recomputing=config.recomputation, streams=streams),
                device=ctx.device,
                dtype=torch_dtype(plan.dtype),
            )
            for stage in stages_of_rank(plan.stages, ctx.pp.rank)
        ]
        if config.pipeline.v_shaped:
            share_embedding(chunks)
        parameters_by_id = {id(p): p for chunk in chunks for p in chunk.parameters()}
        tensors = {name for chunk in chunks for name in named_shards(chunk)}
        parameters = sum(p.numel() for p in parameters_by_id.values())
        return BuiltRank(
            rank=rank,
            pipeline_rank=ctx.pp.rank,
            parameters=parameters,
            logical_tensors=frozenset(tensors),
        )


@contextmanager
def _fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Join a fake process group as one rank of a world; no processes are connected."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _bytes(plan: Plan, ranks: list[BuiltRank]) -> list[str]:
    """Describe the bytes of the built ranks, and the planner's estimate of the fullest."""
    config = plan.config
    wide = 4 if plan.dtype == "float32" else 2
    gradient = wide if config.data_parallelism.has_narrow_grads else 4
    lines = []
    for rank in ranks[:: max(1, len(ranks) - 1)]:
        lines.append(
            f"rank {rank.rank}, pipeline rank {rank.pipeline_rank}: {rank.parameters:,} "
            f"parameters, {wide * rank.parameters / GIB:.3f} GiB of weights, "
            f"{gradient * rank.parameters / GIB:.3f} GiB of gradients"
        )
    fullest = max(rank.parameters for rank in ranks)
    stages = rank_stages(config.model, config.experts, config.parallelism, config.pipeline)
    shapes = plan.family.tensor_shapes(config.model, plan.vocab_size, config.experts)
    planned = max(
        local_elements(counts, config.parallelism)
        for counts in rank_elements(config.model, shapes, stages)
    )
    lines.append(
        f"fullest rank: {wide * fullest / GIB:.3f} GiB of weights, planned "
        f"{wide * planned / GIB:.3f} ({planned / fullest - 1:+.2%}); "
        f"{gradient * fullest / GIB:.3f} GiB of gradients, planned "
        f"{gradient * planned / GIB:.3f}"
    )
    if config.data_parallelism.is_fully_sharded:
        lines.append("these weights and gradients are then sharded over the data ranks")
    return lines


def _checkpoint(plan: Plan, names: frozenset[str], expected: set[str]) -> list[str]:
    """Check that pipeline ranks hold every tensor of the model; describe a checkpoint."""
    moe, ep = plan.config.experts, plan.config.parallelism.expert_model_parallel_size
    missing = {n for n in expected - names if ep == 1 or ".experts." not in n}
    if missing or (unknown := names - expected):
        wrong = sorted(missing)[:3] or sorted(unknown)[:3]
        raise ValueError(f"the ranks together do not hold the model: {', '.join(wrong)}.")
    kinds = 3 if plan.config.optimizer.optimizer == "adam" else 2
    local = f", experts in {ep} parts of {moe.num_experts // ep}" if ep > 1 else ""
    return [
        (
            f"checkpoint: {len(expected)} tensors{local}, each with {kinds} of the optimizer "
            "in float32; any other layout can load it"
        )
    ]


def _data(plan: Plan) -> list[str]:
    batch = plan.config.batch
    source = "--mock-data" if plan.config.data.mock_data else "the data of the flags"
    return [
        (
            f"data: {source}; {plan.train_iters:,} steps of {plan.global_batch_size:,} "
            f"sequences of {batch.seq_length:,} tokens: {plan.train_samples:,} sequences, "
            f"{plan.train_samples * batch.seq_length / 1e9:.3f} B tokens; a data rank reads "
            f"{plan.global_batch_size // plan.data_parallel_size:,} sequences a step"
        )
    ]
