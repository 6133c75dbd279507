"""This rank's place on the rank grid, and its process groups: ``Axis``, ``ParallelContext``.

A context is an object, built once from a ``ParallelConfig`` and passed down; several may
exist in one process. Layers take an ``Axis``, whole models take the context. Every process
group is made in ``build``, in one order on all ranks; an axis of one rank has no group,
and ``None``, torch's name for the whole world, never reaches torch.distributed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch import launcher
from mcore_parallel.launch.call_checks import Agreement
from mcore_parallel.launch.nccl_settings import Communicator, read_communicators
from mcore_parallel.rank_grid import (
    DENSE_AXES,
    EXPERT_AXES,
    Grid,
    build_grids,
    consecutive_blocks,
    strided_blocks,
)
from mcore_parallel.step_clock import StepClock


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """One axis of the rank grid, or several of them as one, as this rank sees it."""

    name: str
    """For error messages: ``tp``, ``cp_dp``."""
    size: int
    """Ranks along the axis."""
    rank: int
    """This rank's place on it, ``0 <= rank < size``."""
    group: dist.ProcessGroup | None
    """None exactly when ``size == 1``: then a layer equals its unsplit form."""
    ranks: tuple[int, ...]
    """Global ranks along the axis, in order; ``ranks[rank]`` is this one."""
    agreement: Agreement | None = None
    """Compares the first calls of all ranks; None without ``compare_calls``."""
    clock: StepClock | None = None
    """Times waits for the other ranks; None for an axis of no context."""

    def __post_init__(self) -> None:
        if self.group is None:
            return
        place = self.group.rank(), self.group.size()
        if place != (self.rank, self.size) or len(self.ranks) != self.size:
            raise ValueError(
                f"axis {self.name}: rank {self.rank} of {self.size}, ranks {self.ranks}, but "
                f"its group has this process as rank {place[0]} of {place[1]} (new_group "
                "sorts the ranks it is given)."
            )

    def __deepcopy__(self, memo: object) -> Axis:
        """Return the axis itself: copies of a layer communicate over the same group."""
        return self

    def waiting(self) -> AbstractContextManager[None]:
        """Return the context in which this rank waits for others: a span of the clock."""
        if self.clock is None or self.size == 1:
            return nullcontext()
        return self.clock.span(self.name)

    @property
    def group_name(self) -> str:
        """Torch's registered name of the group, which functional collectives take."""
        if self.group is None:
            ranks = "one rank" if self.size == 1 else f"{self.size} ranks"
            raise ValueError(f"axis {self.name} has {ranks} and no group")
        return self.group.group_name


_SEPARATE = ("pp_back",)
"""Axes that share no group with others over the same ranks."""
SINGLE = Axis("single", 1, 0, None, (0,))
"""The axis of a layer that is not parallel."""


class ParallelContext:
    """All axes of one rank grid, and the device this rank computes on.

    Attributes:
        config: the degrees it was built from.
        clock: times steps, and in them the waits over all axes.
        device: where this rank's tensors live.
        global_rank: this process in the world.
        world: every rank of the job as one axis.
        tp, cp, pp, dp: dense grid. ``dp_cp`` is where dense gradients are summed.
        expert_tp, ep, expert_dp: expert grid; expert gradients are summed over ``expert_dp``.
        ep_nodes, ep_node: ``ep`` between nodes and within one, of one rank each without
            ``--hierarchical-expert-parallel-size``.
        cp_exchange, cp_ring: ``cp`` cut into neighbours that exchange heads, and the ranks at
            one place of every such group; of one rank each without
            ``--hierarchical-context-parallel-sizes``.
        optimizer_shard, optimizer_replica: ``dp_cp`` cut into instances of the sharded
            optimizer (consecutive blocks), and the ranks at one place of every instance.
        expert_optimizer_shard, expert_optimizer_replica: the same cut of ``expert_dp``.
        embedding_ends: pipeline ranks that hold copies of one embedding, the first and the
            last unless ``build`` is given others; an axis of one rank elsewhere.
        pp_back: ``pp`` over a second group, for messages to lower ranks.
    """

    def __init__(
        self,
        config: ParallelConfig,
        device: torch.device,
        global_rank: int,
        axes: dict[str, Axis],
        groups: list[dist.ProcessGroup],
        clock: StepClock,
    ) -> None:
        """Use ``build`` or ``single`` instead."""
        self.config = config
        self.clock = clock
        self.device = device
        self.global_rank = global_rank
        self._axes = axes
        self._groups = groups
        self.world = axes["world"]
        self.tp, self.cp = axes["tp"], axes["cp"]
        self.dp, self.pp = axes["dp"], axes["pp"]
        self.pp_back = axes["pp_back"]
        self.dp_cp = self.axis("dp", "cp")
        self.expert_tp, self.ep, self.expert_dp = (
            axes["expert_tp"],
            axes["ep"],
            axes["expert_dp"],
        )
        self.ep_nodes, self.ep_node = (axes.get(n, SINGLE) for n in ("ep_nodes", "ep_node"))
        levels = (axes.get(n, SINGLE) for n in ("cp_exchange", "cp_ring"))
        self.cp_exchange, self.cp_ring = levels
        self.optimizer_shard = axes["optimizer_shard"]
        self.optimizer_replica = axes["optimizer_replica"]
        self.expert_optimizer_shard = axes["expert_optimizer_shard"]
        self.expert_optimizer_replica = axes["expert_optimizer_replica"]
        self.embedding_ends = axes["embedding_ends"]

    @classmethod
    def build(
        cls,
        config: ParallelConfig,
        device: torch.device | str = "cpu",
        *,
        compare_calls: bool = False,
        embedding_stages: Sequence[int] = (),
        ranks: Sequence[int] = (),
    ) -> ParallelContext:
        """Make every process group of a rank grid over the initialised world, or a part of it.

        All its ranks call it together, with equal configs, after ``launcher.initialize`` (or
        ``torch.distributed.init_process_group``). With no process group it describes a world
        of one rank. Returns once every rank is connected to all members of its groups.

        Args:
            config: the degrees; data-parallel sizes follow from the world size.
            device: where this rank computes; groups use nccl for ``cuda`` and gloo for ``cpu``.
                Those of the world and of ``tp`` have gloo and nccl, so that numbers on the
                host are exchanged without the GPU.
            compare_calls: let the ranks of each group compare their first calls through the
                world's store, so that an error names those that disagree (see ``call_checks``).
            embedding_stages: pipeline ranks of ``embedding_ends``, ascending; empty: the first
                and the last. Others hold one where multi-token prediction has its own stage.
            ranks: of the world that the grid is over; empty: all. The others do not call it,
                and ``world`` is these ranks alone.

        Raises:
            ValueError: if the degrees do not fit the ranks, these leave this one out, the
                settings of nccl cannot be read (all ranks read them for themselves), or a
                launcher has started several ranks and this one has not joined them; before
                any group is made.
        """
        device = torch.device(device)
        ready = dist.is_initialized()
        if not ready and (size := launcher.read_environment().world_size) > 1:
            raise ValueError(
                f"WORLD_SIZE={size}, but this process has joined no world: call "
                "mcore_parallel.initialize() or torch.distributed.init_process_group() before "
                "ParallelContext.build. ParallelContext.single() describes one rank alone."
            )
        members = tuple(ranks or range(dist.get_world_size() if ready else 1))
        global_rank = dist.get_rank() if ready else 0
        if global_rank not in members:
            raise ValueError(f"ranks {list(members)} leave out rank {global_rank}, this one.")
        plan = {
            name: [tuple(members[place] for place in group) for group in groups]
            for name, groups in _group_plan(
                config, *build_grids(config, len(members)), tuple(embedding_stages)
            ).items()
        }
        settings = read_communicators(config.nccl_communicator_config_path, plan)
        # Groups of others are placeholders; axes of the same ranks and settings share one,
        # apart from _SEPARATE: nccl does what a group is given one after the other.
        made: dict[_Key, Any] = {}
        axes = {}
        uses_nccl = device.type == "cuda"
        timeout = timedelta(minutes=config.distributed_timeout_minutes)
        agreements: dict[_Key, Agreement] = {}
        clock = StepClock(device)
        for name, groups in plan.items():
            axes[name] = Axis(name, 1, 0, None, (global_rank,), clock=clock)
            wanted = settings.get(name)
            for group in groups:
                key = (group, wanted, name if name in _SEPARATE else "")
                if len(group) > 1 and key not in made:
                    made[key] = dist.new_group(
                        list(group),
                        timeout=timeout,
                        backend=_backend(name, device),
                        pg_options=wanted.options() if wanted and uses_nccl else None,
                        use_local_synchronization=bool(ranks),  # others make none
                        group_desc=name,  # what profiles and watchdogs call it
                    )
                if global_rank not in group or len(group) == 1:
                    continue
                place = group.index(global_rank)
                if compare_calls and key not in agreements:
                    agreements[key] = Agreement.of_group(
                        made[key], group, place, timeout, partial(clock.span, name)
                    )
                axes[name] = Axis(
                    name, len(group), place, made[key], group, agreements.get(key), clock
                )
        if axes["world"].group is not None:
            launcher.wait_for_all(axes["world"].group)
        mine = [group for (held, *_), group in made.items() if global_rank in held]
        return cls(config, device, global_rank, axes, mine, clock)

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> ParallelContext:
        """Describe one rank alone, whatever the world is; makes no group."""
        config = ParallelConfig()
        plan = _group_plan(config, *build_grids(config, 1))
        clock = StepClock(torch.device(device))
        axes = {name: Axis(name, 1, 0, None, (0,), clock=clock) for name in plan}
        return cls(config, torch.device(device), 0, axes, [], clock)

    def axis(self, *names: str) -> Axis:
        """Return one axis, or several of the same grid combined.

        The order of ``names`` does not matter: ranks ascend as in the grid. ``build`` has made
        the groups of all combinations; none is made here.

        Raises:
            KeyError: if the names do not belong to one grid.
        """
        key = _product_name(names)
        if key not in self._axes:
            raise KeyError(f"no axis {key}: name axes of {DENSE_AXES} or of {EXPERT_AXES}")
        return self._axes[key]

    def tp_block(self, size: int) -> Axis:
        """Return this rank's block of ``size`` neighbouring tensor ranks.

        Used where fewer parts than tensor ranks exist, such as key/value heads: the ranks of
        a block hold the same part.

        Raises:
            KeyError: if ``size`` does not divide the tensor-parallel size.
        """
        if size == self.tp.size:
            return self.tp
        return self._axes[f"tp_block_{size}"]

    def data_axes(self) -> dict[str, Axis]:
        """Return the axes over which data ranks replicate, by ``ParamLayout.data`` kind."""
        return {"dense": self.dp_cp, "expert": self.expert_dp}

    def destroy(self) -> None:
        """Destroy this context's groups; all ranks call it together."""
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups = []
        forget_meshes()


def forget_meshes() -> None:
    """Clear what DTensor keeps of layouts, each with the mesh on which it was first computed.

    Meshes over equal ranks are equal to it, so that a tensor of a new mesh would communicate
    over the groups of an old one.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


_Key = tuple[tuple[int, ...], Communicator | None, str]
"""What identifies a group: its ranks, its settings of nccl, its axis if it is _SEPARATE."""


def _product_name(names: tuple[str, ...]) -> str:
    for order in (DENSE_AXES, EXPERT_AXES):
        if set(names) <= set(order):
            return "_".join(name for name in order if name in names)
    return "_".join(names)


def _backend(name: str, device: torch.device) -> str:
    """Say what the groups of an axis communicate by; in torch's fake world nothing."""
    if dist.is_initialized() and dist.get_backend() == "fake":
        return "fake"
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if name in ("world", "tp") else "nccl"


def _group_plan(
    config: ParallelConfig, dense: Grid, expert: Grid, embedding_stages: tuple[int, ...] = ()
) -> dict[str, list[tuple[int, ...]]]:
    """List the groups of every axis over the whole world, in the one order of creation."""
    plan: dict[str, list[tuple[int, ...]]] = {"world": [tuple(range(dense.world_size))]}
    for grid, order in ((dense, DENSE_AXES), (expert, EXPERT_AXES)):
        for count in range(1, len(order) + 1):
            for names in combinations(order, count):
                plan[_product_name(names)] = grid.groups(names)
    tp = dense.size("tp")
    for size in range(1, tp):
        if tp % size == 0:
            plan[f"tp_block_{size}"] = consecutive_blocks(plan["tp"], size)
    if size := config.hierarchical_expert_parallel_size:
        plan["ep_node"] = consecutive_blocks(plan["ep"], size)
        plan["ep_nodes"] = strided_blocks(plan["ep"], size)
    if sizes := config.hierarchical_context_parallel_sizes:
        plan["cp_exchange"] = consecutive_blocks(plan["cp"], sizes[0])
        plan["cp_ring"] = strided_blocks(plan["cp"], sizes[0])
    instances = config.num_distributed_optimizer_instances
    for prefix, data in (
        ("", dense.groups(("dp", "cp"))),
        ("expert_", expert.groups(("expert_dp",))),
    ):
        shard = len(data[0]) // instances
        plan[f"{prefix}optimizer_shard"] = consecutive_blocks(data, shard)
        plan[f"{prefix}optimizer_replica"] = strided_blocks(data, shard)
    plan["embedding_ends"] = [
        tuple(g[stage] for stage in embedding_stages or (0, -1))
        for g in plan["pp"]
        if len(g) > 1
    ]
    plan["pp_back"] = plan["pp"]
    return plan
