"""Chooses the degrees of a small run: few ranks, but two on each split axis. No torch."""

from dataclasses import replace
from math import gcd, lcm

from mcore_parallel.config import ParallelConfig
from mcore_parallel.rank_grid import build_grids
from mcore_train.composition import TrainConfig


def smallest_world(config: TrainConfig) -> int:
    """Return the smallest world of a layout with two data ranks and all optimizer instances."""
    parallel = config.parallelism
    dense = (
        parallel.tensor_model_parallel_size
        * parallel.context_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    expert = (
        (parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size)
        * parallel.expert_model_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    instances = parallel.num_distributed_optimizer_instances
    return lcm(dense * lcm(2, instances), expert * instances)


def shrink_layout(
    parallel: ParallelConfig, world_size: int, max_ranks: int
) -> tuple[ParallelConfig, int]:
    """Return a smaller layout with all axes of ``parallel``, and its number of ranks.

    Divides degrees by their smallest factor, data ranks first, then the largest degree, until
    at most ``max_ranks`` ranks are left. A prime degree stays.

    Raises:
        ValueError: if the layout needs more ranks to split all its axes.
    """
    tp, cp, pp = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
    exchange, ring = parallel.hierarchical_context_parallel_sizes or (cp, 1)
    degrees = {"dp": world_size // (tp * cp * pp), "cp": exchange, "ring": ring}
    degrees |= {"tp": tp, "pp": pp}
    while (world := _product(degrees)) > max_ranks:
        divisible = [n for n in degrees if _least_factor(degrees[n]) < degrees[n]]
        if not divisible:
            raise ValueError(
                f"--max-ranks {max_ranks} is too small for a layout with all axes of the run: "
                f"each is split over a prime number of ranks now. Use --max-ranks {world}."
            )
        name = "dp" if "dp" in divisible else max(divisible, key=lambda n: degrees[n])
        degrees[name] //= _least_factor(degrees[name])
    shrunk = replace(
        parallel,
        tensor_model_parallel_size=degrees["tp"],
        context_parallel_size=degrees["cp"] * degrees["ring"],
        hierarchical_context_parallel_sizes=(
            (degrees["cp"], degrees["ring"]) if ring > 1 else ()
        ),
        pipeline_model_parallel_size=degrees["pp"],
        nccl_communicator_config_path="",  # changes when numbers come, not which
    )
    return _shrink_experts(shrunk, parallel, world, world_size), world


def describe_layout(parallel: ParallelConfig, world_size: int) -> str:
    """Describe a layout by its degrees above 1: ``8 ranks: tp2 pp2 dp2 sp``."""
    tp, cp, pp = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
    degrees = {
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "dp": world_size // (tp * cp * pp),
        "ep": parallel.expert_model_parallel_size,
        "etp": parallel.expert_tensor_parallel_size,
        "instances": parallel.num_distributed_optimizer_instances,
    }
    words = [f"{name}{n}" for name, n in degrees.items() if n > 1]
    words += ["sp"] if parallel.sequence_parallel else []
    return f"{world_size} ranks: {' '.join(words) or 'one after the other'}"


def _shrink_experts(
    shrunk: ParallelConfig, before: ParallelConfig, world: int, world_size: int
) -> ParallelConfig:
    """Choose degrees of experts and optimizer instances that fit the smaller world.

    If only one of the two can be split, experts are. With orders of ranks that do not end in
    pp, only some degrees give dense and expert layers the same pipelines.
    """
    tp, outside = (
        shrunk.tensor_model_parallel_size,
        world // shrunk.pipeline_model_parallel_size,
    )
    real_expert_tp = before.expert_tensor_parallel_size
    shared_degree = (
        tp
        if real_expert_tp == before.tensor_model_parallel_size
        else gcd(real_expert_tp, outside)
    )
    expert_tp = shared_degree if real_expert_tp else 0
    room = outside // (expert_tp or tp)
    data_ranks = outside // tp
    instances = gcd(before.num_distributed_optimizer_instances, data_ranks, room)
    ep = before.expert_model_parallel_size
    for degree in (gcd(ep, room // instances), gcd(ep, room), *range(room, 1, -1)):
        if room % degree or (degree == 1) != (ep == 1):
            continue
        fitting = replace(
            shrunk,
            expert_tensor_parallel_size=expert_tp,
            expert_model_parallel_size=degree,
            hierarchical_expert_parallel_size=_node_of(before, degree),
            num_distributed_optimizer_instances=gcd(instances, room // degree),
        )
        if _is_layout(fitting, world):
            return fitting
    raise ValueError(
        f"no layout of {world} ranks splits experts as this one does: give --max-ranks "
        f"{world_size}."
    )


def _node_of(before: ParallelConfig, ep: int) -> int:
    """Return the expert ranks of a node for hierarchical dispatch; 0: one all-to-all."""
    size = ep // _least_factor(ep) if before.hierarchical_expert_parallel_size else 0
    return size if size > 1 else 0


def _is_layout(parallel: ParallelConfig, world_size: int) -> bool:
    try:
        build_grids(parallel, world_size)
    except ValueError:
        return False
    return True


def _product(degrees: dict[str, int]) -> int:
    total = 1
    for degree in degrees.values():
        total *= degree
    return total


def _least_factor(number: int) -> int:
    return next((f for f in range(2, number + 1) if number % f == 0), 1)
