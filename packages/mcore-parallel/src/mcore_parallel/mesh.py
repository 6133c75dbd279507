"""This rank's coordinates and process groups: ``Axis`` and ``ParallelContext``.

A context is an object, built once from a ``ParallelConfig`` and passed down; several may
exist in one process. Layers take an ``Axis``, models take the context. ``build`` makes every
process group, in one order on all ranks. An axis of one rank has no group: collectives return
before they would pass ``None`` to torch.distributed, which takes it for the whole world.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

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
    """The ranks along one axis of the rank grid, or a product of axes, through this rank."""

    name: str
    """Name in error messages: ``tp``, ``cp_dp``."""
    size: int
    """Number of ranks along the axis."""
    rank: int
    """Index of this rank on the axis, ``0 <= rank < size``."""
    group: dist.ProcessGroup | None
    """None exactly when ``size == 1``, where layers neither split nor communicate."""
    ranks: tuple[int, ...]
    """Global ranks along the axis, in order; ``ranks[rank]`` is this rank."""
    agreement: Agreement | None = None
    """Compares the first collective calls of all ranks; None without ``compare_calls``."""
    clock: StepClock | None = None
    """Times waits for the other ranks; None for an axis that belongs to no context."""

    def __post_init__(self) -> None:
        if self.group is None:
            return
        group_rank, group_size = self.group.rank(), self.group.size()
        fits = (group_rank, group_size) == (self.rank, self.size)
        if not fits or len(self.ranks) != self.size:
            raise ValueError(
                f"axis {self.name}: rank {self.rank} of {self.size}, ranks {self.ranks}, but "
                f"its group has this process as rank {group_rank} of {group_size} (new_group "
                "sorts the ranks that it is given)."
            )

    def __deepcopy__(self, memo: object) -> Axis:
        """Return the axis, not a copy: copies of a layer communicate over the same group."""
        return self

    def waiting(self) -> AbstractContextManager[None]:
        """Return the context in which this rank waits for others: a span of the clock."""
        if self.clock is None or self.size == 1:
            return nullcontext()
        return self.clock.span(self.name)

    @property
    def group_name(self) -> str:
        """Name under which torch registered the group, for functional collectives."""
        if self.group is None:
            ranks = "one rank" if self.size == 1 else f"{self.size} ranks"
            raise ValueError(f"axis {self.name} has {ranks} and no group")
        return self.group.group_name


_SEPARATE = ("pp_back",)
"""Axes with a group of their own even if another axis has the same ranks."""
SINGLE = Axis("single", 1, 0, None, (0,))
"""The axis of a layer that is not parallel."""


class ParallelContext:
    """All axes of one rank grid, and the device this rank computes on.

    Attributes:
        config: degrees of the rank grid.
        clock: times steps, and the waits over all axes within a step.
        device: device of this rank's tensors.
        global_rank: rank of this process in the world.
        world: every rank of the job as one axis.
        tp, cp, pp, dp: axes of the dense grid. Dense gradients are summed over ``dp_cp``.
        expert_tp, ep, expert_dp: axes of the expert grid. Expert gradients are summed over
            ``expert_dp``.
        ep_nodes, ep_node: ``ep`` factored into ranks across nodes and ranks of one node; single
            ranks without ``--hierarchical-expert-parallel-size``.
        cp_exchange, cp_ring: ``cp`` factored into consecutive ranks that exchange heads, and
            the ranks with equal index in these groups; single ranks without
            ``--hierarchical-context-parallel-sizes``.
        optimizer_shard, optimizer_replica: ``dp_cp`` factored into the consecutive ranks that
            shard one instance of the optimizer, and the ranks with equal index in all
            instances.
        expert_optimizer_shard, expert_optimizer_replica: ``expert_dp`` factored alike.
        embedding_ends: pipeline ranks that hold copies of one embedding, by default the first
            and the last; a single rank on all other pipeline ranks.
        pp_back: the ranks of ``pp`` with a second group, for messages to lower ranks.
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
        """Build the rank grid, with all its groups, over the world or some of its ranks.

        All ranks of the grid must call ``build`` together, with equal configs, after
        ``launcher.initialize`` (or ``torch.distributed.init_process_group``). Without an
        initialised world the grid has one rank. Returns once every rank is connected to all
        members of its groups.

        Args:
            config: the degrees; data-parallel sizes follow from the world size.
            device: device of this rank; groups use nccl for ``cuda`` and gloo for ``cpu``.
                On ``cuda``, the groups of ``world`` and ``tp`` have both backends, so that
                ranks can exchange numbers on the host without the GPU.
            compare_calls: let the ranks of each group compare their first calls through the
                world's store, so that an error names ranks that disagree (``call_checks``).
            embedding_stages: pipeline ranks of ``embedding_ends``, ascending; empty: the first
                and the last. Multi-token prediction on a stage of its own adds that stage.
            ranks: global ranks that form the grid; empty: all. Other ranks must not call
                ``build``; ``world`` is then an axis over ``ranks``.

        Raises:
            ValueError: before any group is made, if the degrees do not fit the number of ranks,
                ``ranks`` does not contain this rank, the nccl settings cannot be read (every
                rank reads the file), or a launcher has started several ranks but this process
                has not joined the world.
        """
        device = torch.device(device)
        is_initialized = dist.is_initialized()
        if not is_initialized and (size := launcher.read_environment().world_size) > 1:
            raise ValueError(
                f"WORLD_SIZE={size}, but this process has joined no world: call "
                "mcore_parallel.initialize() or torch.distributed.init_process_group() before "
                "ParallelContext.build. ParallelContext.single() describes one rank alone."
            )
        members = tuple(ranks or range(dist.get_world_size() if is_initialized else 1))
        global_rank = dist.get_rank() if is_initialized else 0
        if global_rank not in members:
            raise ValueError(
                f"ranks {list(members)} leave out rank {global_rank}, which called build: add "
                "it, or call build on those ranks only."
            )
        # The grid counts from 0; ``members`` maps its ranks to global ranks.
        plan = {
            name: [tuple(members[rank] for rank in group) for group in groups]
            for name, groups in _group_plan(
                config, *build_grids(config, len(members)), tuple(embedding_stages)
            ).items()
        }
        settings = read_communicators(config.nccl_communicator_config_path, plan)
        # Every rank calls new_group for every group, also for groups without this rank, where
        # torch returns a placeholder. Axes with equal ranks and settings share one group,
        # except _SEPARATE: nccl runs the operations of one group one after the other.
        process_groups: dict[_Key, Any] = {}
        axes = {}
        uses_nccl = device.type == "cuda"
        timeout = timedelta(minutes=config.distributed_timeout_minutes)
        agreements: dict[_Key, Agreement] = {}
        clock = StepClock(device)
        grid = _grid_name(members) if ranks else ""
        for name, groups in plan.items():
            axes[name] = Axis(name, 1, 0, None, (global_rank,), clock=clock)
            communicator = settings.get(name)
            for group in groups:
                key = (group, communicator, name if name in _SEPARATE else "")
                if len(group) > 1 and key not in process_groups:
                    options = communicator.options() if communicator and uses_nccl else None
                    backend = _backend(name, device)
                    if not ranks:
                        process_groups[key] = dist.new_group(
                            list(group),
                            timeout=timeout,
                            backend=backend,
                            pg_options=options,
                            group_desc=name,  # shown in profiles and by watchdogs
                        )
                    elif global_rank in group:
                        process_groups[key] = _new_local_group(
                            group, f"{grid}.{name}", timeout, backend, options
                        )
                if global_rank not in group or len(group) == 1:
                    continue
                index, process_group = group.index(global_rank), process_groups[key]
                if compare_calls and key not in agreements:
                    agreements[key] = Agreement.of_group(
                        process_group, group, index, timeout, partial(clock.span, name)
                    )
                axes[name] = Axis(
                    name, len(group), index, process_group, group, agreements.get(key), clock
                )
        if axes["world"].group is not None:
            launcher.wait_for_all(axes["world"].group)
        own_groups = [g for (group, *_), g in process_groups.items() if global_rank in group]
        return cls(config, device, global_rank, axes, own_groups, clock)

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> ParallelContext:
        """Build the context of a grid of one rank, without any group, in any world."""
        config = ParallelConfig()
        plan = _group_plan(config, *build_grids(config, 1))
        clock = StepClock(torch.device(device))
        axes = {name: Axis(name, 1, 0, None, (0,), clock=clock) for name in plan}
        return cls(config, torch.device(device), 0, axes, [], clock)

    @classmethod
    def of_tensor_ranks(cls, tp: Axis, device: torch.device) -> ParallelContext:
        """Build a context in which only ``tp`` has several ranks, without new groups.

        ``tp_block(1)`` exists; larger blocks would need groups.
        """
        one = cls.single(device)
        config = ParallelConfig(tensor_model_parallel_size=tp.size)
        axes = one._axes | {"tp": tp, "tp_block_1": SINGLE}
        return cls(config, device, tp.rank, axes, [], one.clock)

    def axis(self, *names: str) -> Axis:
        """Return one axis, or the product of several axes of the same grid.

        The order of ``names`` does not matter: ranks ascend as in the grid. ``build`` has made
        the groups of all products, so ``axis`` may be called on any rank at any time.

        Raises:
            KeyError: if the names do not belong to one grid.
        """
        key = _product_name(names)
        if key not in self._axes:
            raise KeyError(f"no axis {key}: name axes of {DENSE_AXES} or of {EXPERT_AXES}")
        return self._axes[key]

    def tp_block(self, size: int) -> Axis:
        """Return the axis of ``size`` consecutive tensor ranks that contains this rank.

        Key/value heads fewer than tensor ranks are replicated over such a block.

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
    """Clear DTensor's cache of sharding decisions, whose entries hold device meshes.

    DTensor treats meshes over equal ranks as equal, so a tensor on a new mesh would get a
    cached entry and communicate over the groups of the old mesh.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


_Key = tuple[tuple[int, ...], Communicator | None, str]
"""Identity of a group: its ranks, its nccl settings, and its axis if that is _SEPARATE."""


def _product_name(names: tuple[str, ...]) -> str:
    for order in (DENSE_AXES, EXPERT_AXES):
        if set(names) <= set(order):
            return "_".join(name for name in order if name in names)
    return "_".join(names)


def _grid_name(members: Sequence[int]) -> str:
    """Return a name that no earlier grid over these ranks has had; all these ranks call it."""
    key = "_".join(map(str, members))
    # ``build`` returns once all members have called it, so that each adds once per grid.
    count = distributed_c10d._get_default_store().add(f"mcore_grids_{key}", 1)
    return f"{key}.{(count - 1) // len(members)}"


def _new_local_group(
    ranks: tuple[int, ...], name: str, timeout: timedelta, backend: str, options: Any
) -> dist.ProcessGroup:
    """Create a process group with the given name; only the ranks of the group call it.

    ``dist.new_group(use_local_synchronization=True)`` names a group by its ranks and by the
    number of groups that this process has. After ``destroy`` it would reuse a name, and ranks
    would connect to addresses that the old group left in the store; and ranks that are in
    different numbers of groups would wait under different names.
    """
    group_and_store = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        distributed_c10d._get_default_store(),
        distributed_c10d.GroupName(name),
        backend_options=options,
        timeout=timeout,
        group_desc=name,
    )
    group = cast("dist.ProcessGroup", group_and_store[0])
    distributed_c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(ranks)}
    return group


def _backend(name: str, device: torch.device) -> str:
    """Return the torch backend for the groups of an axis; "fake" in torch's fake world."""
    if dist.is_initialized() and dist.get_backend() == "fake":
        return "fake"
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if name in ("world", "tp") else "nccl"


def _group_plan(
    config: ParallelConfig, dense: Grid, expert: Grid, embedding_stages: tuple[int, ...] = ()
) -> dict[str, list[tuple[int, ...]]]:
    """Return the groups of every axis by name, in the order in which all ranks create them."""
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
