"""Rank arithmetic on plain integers: which ranks form which group.

The world is factorised twice over the same ranks: a dense grid (tp, cp, dp, pp) and an
expert grid (expert_tp, ep, expert_dp, pp), so that experts may be spread over ranks
that are tensor, context or data ranks for the rest of the model ("folding"). A grid is
a mixed-radix number whose leftmost axis varies fastest. No torch here.
"""

from dataclasses import dataclass
from itertools import product
from math import prod

from mcore_parallel.config import AXES, ParallelConfig

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("expert_tp", "ep", "expert_dp", "pp")


@dataclass(frozen=True, slots=True)
class Grid:
    """One factorisation of the world; ``sizes[i]`` belongs to ``names[i]``, fastest first.

    A name may occur several times: its axis then spans all these positions.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks: the sizes of all axes multiplied."""
        return prod(self.sizes)

    def size(self, name: str) -> int:
        """Return the number of ranks along one axis."""
        return prod(s for n, s in zip(self.names, self.sizes, strict=True) if n == name)

    def coordinates(self, global_rank: int) -> dict[str, int]:
        """Return the position of a rank along every axis."""
        position, steps = dict.fromkeys(self.names, 0), dict.fromkeys(self.names, 1)
        for name, size in zip(self.names, self.sizes, strict=True):
            global_rank, digit = divmod(global_rank, size)
            position[name] += digit * steps[name]
            steps[name] *= size
        return position

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """List the groups in which ``axes`` vary and every other axis is fixed.

        Groups are ordered by the mixed-radix number of their fixed axes, ranks inside a group
        by that of ``axes`` in the grid's order. Every rank is in exactly one group.
        """
        if unknown := set(axes) - set(self.names):
            raise KeyError(f"{sorted(unknown)} are not axes of {self.names}")
        strides = [prod(self.sizes[:i]) for i in range(len(self.sizes))]
        members = [i for i, name in enumerate(self.names) if name in axes]
        fixed = [i for i, name in enumerate(self.names) if name not in axes]
        return [
            tuple(base + inner for inner in _offsets(self.sizes, strides, members))
            for base in _offsets(self.sizes, strides, fixed)
        ]


def _offsets(sizes: tuple[int, ...], strides: list[int], axes: list[int]) -> list[int]:
    # itertools.product varies its LAST factor fastest, so the axes go in reversed.
    ranges = [range(sizes[i]) for i in reversed(axes)]
    return [
        sum(k * strides[i] for k, i in zip(ks, reversed(axes), strict=True))
        for ks in product(*ranges)
    ]


def build_grids(config: ParallelConfig, world_size: int) -> tuple[Grid, Grid]:
    """Factorise the world into the dense and the expert grid.

    Raises:
        ValueError: if the degrees do not divide the world, or if the pipeline groups of the
            two grids would differ.
    """
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    pp, ep = config.pipeline_model_parallel_size, config.expert_model_parallel_size
    expert_tp = config.expert_tensor_parallel_size or tp
    _check_divides(
        world_size,
        {
            "tensor-model-parallel-size": tp,
            "context-parallel-size": cp,
            "pipeline-model-parallel-size": pp,
        },
    )
    _check_divides(
        world_size,
        {
            "expert-tensor-parallel-size": expert_tp,
            "expert-model-parallel-size": ep,
            "pipeline-model-parallel-size": pp,
        },
    )
    dp = world_size // (tp * cp * pp)
    expert_dp = world_size // (expert_tp * ep * pp)
    order = _rank_order(config)
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    dense = Grid(*_in_order(order, {name: (name, size) for name, size in sizes.items()}))
    # The expert grid has the same order, with each dense axis replaced by an expert axis.
    expert_axes = {"tp": ("expert_tp", expert_tp), "ep": ("ep", ep), "pp": ("pp", pp)}
    if ep == 1 and expert_tp == tp:
        # Experts are split like dense layers, so their replicas are the dp and cp ranks: one
        # axis at two positions of the order, even if other axes are between them.
        expert_axes |= {"cp": ("expert_dp", cp), "dp": ("expert_dp", dp)}
    else:
        expert_axes["dp"] = ("expert_dp", expert_dp)
    expert = Grid(*_in_order(order, expert_axes))
    if set(dense.groups(("pp",))) != set(expert.groups(("pp",))):
        raise ValueError(
            f"rank order {'-'.join(order)} gives dense and expert layers different pipelines "
            f"here: TP*CP is {tp * cp} and expert TP*EP is {expert_tp * ep}. Make the two "
            "products equal, use --pipeline-model-parallel-size 1, or let pp come last: "
            + (
                "leave --use-tp-pp-dp-mapping out."
                if config.use_tp_pp_dp_mapping
                else f"--rank-order {'-'.join([n for n in order if n != 'pp'] + ['pp'])}."
            )
        )
    instances = config.num_distributed_optimizer_instances
    for name, size in (("DP*CP", dp * cp), ("expert DP", expert_dp)):
        if size % instances:
            raise ValueError(
                f"--num-distributed-optimizer-instances {instances} must divide "
                f"{name} = {size}."
            )
    return dense, expert


def _in_order(
    order: tuple[str, ...], axes: dict[str, tuple[str, int]]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and sizes of ``axes``, sorted as ``order`` sorts the keys of ``axes``."""
    names, sizes = zip(*(axes[key] for key in order if key in axes), strict=True)
    return names, sizes


def _rank_order(config: ParallelConfig) -> tuple[str, ...]:
    if config.rank_order:
        return tuple(config.rank_order.split("-"))
    return ("tp", "cp", "ep", "pp", "dp") if config.use_tp_pp_dp_mapping else AXES


def _check_divides(world_size: int, degrees: dict[str, int]) -> None:
    if world_size % prod(degrees.values()):
        flags = " x ".join(f"--{name} {size}" for name, size in degrees.items())
        raise ValueError(
            f"{flags} = {prod(degrees.values())} does not divide the world of {world_size} "
            f"ranks. Start {prod(degrees.values())} ranks or a multiple, or lower a degree."
        )


def consecutive_blocks(groups: list[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Cut every group into runs of ``size`` neighbours, in order."""
    for group in groups:
        if len(group) % size:
            raise ValueError(f"blocks of {size} do not divide a group of {len(group)} ranks")
    return [g[i : i + size] for g in groups for i in range(0, len(g), size)]


def strided_blocks(groups: list[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Group the i-th ranks of all blocks that ``consecutive_blocks`` makes, for each i."""
    return [g[i::size] for g in groups for i in range(size)]
