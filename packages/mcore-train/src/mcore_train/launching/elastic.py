"""Chooses the layouts of an elastic job for fewer hosts than ``--nodes``, before it starts.

The global batch and the order of the samples do not depend on the number of data ranks, so a
run continues with any number. For each number of hosts the command's own layout is used if it
is valid; then only the number of data ranks changes. Otherwise the planner ranks the layouts
that differ in ``--elastic-options``, and the host script uses the fastest layout that the run's
checks accept. A number of hosts without a valid layout is not used.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from mcore_base.options import flag
from mcore_models.families import Family
from mcore_train.composition import TrainConfig, flat
from mcore_train.launching.config import JobConfig
from mcore_train.options.recipe import to_flags
from mcore_train.planning.command import chosen_system
from mcore_train.planning.config import PlanConfig
from mcore_train.planning.search import search_layouts
from mcore_train.resolution import Plan

log = logging.getLogger(__name__)

CANDIDATES = 5
"""Number of the planner's layouts that are checked for one number of hosts."""

IsValid = Callable[[Sequence[str], int], bool]
"""Whether the command with additional flags is valid for a number of ranks."""


def layouts_by_hosts(
    config: JobConfig, train: TrainConfig, plan: Plan, family: Family, is_valid: IsValid
) -> Mapping[int, tuple[str, ...]]:
    """Choose the flags to add to a command for each number of hosts.

    Args:
        config: options of the job; ``nodes`` is the largest number of hosts.
        train: options of the command.
        plan: plan of the command on all hosts.
        family: family of the model.
        is_valid: checks a command as a run does.

    Raises:
        ValueError: if no number of hosts below ``nodes`` has a layout.
    """
    allowed = {name.strip("-").replace("-", "_") for name in config.elastic_options}
    if unknown := allowed - flat(train).keys():
        raise ValueError(
            f"--elastic-options {', '.join(sorted(unknown))}: mcore-train gpt has no such "
            "option. Remove it."
        )
    layouts: dict[int, tuple[str, ...]] = {}
    for hosts in range(config.min_nodes, config.nodes):
        world_size = hosts * config.nproc_per_node
        if is_valid((), world_size):
            layouts[hosts] = ()
        elif (flags := _planned(config, train, plan, family, world_size, is_valid)) is not None:
            layouts[hosts] = flags
            log.info("layout for %d hosts: %s", hosts, " ".join(flags))
    if not layouts:
        raise ValueError(
            f"--min-nodes {config.min_nodes}: no valid layout for fewer than {config.nodes} "
            f"hosts differs only in {', '.join(flag(name) for name in sorted(allowed))}. Add "
            "options to --elastic-options, or leave --min-nodes out."
        )
    if unused := sorted(set(range(config.min_nodes, config.nodes)) - layouts.keys()):
        log.info("no valid layout for %s hosts: these numbers are not used", unused)
    return {**layouts, config.nodes: ()}


def _planned(
    config: JobConfig,
    train: TrainConfig,
    plan: Plan,
    family: Family,
    world_size: int,
    is_valid: IsValid,
) -> tuple[str, ...] | None:
    """Return the flags of the fastest layout that is valid; None: no layout is valid."""
    options = flat(train)
    allowed = {name.strip("-").replace("-", "_") for name in config.elastic_options}
    system = chosen_system(
        PlanConfig(gpus=world_size, gpu=config.elastic_gpu, nodes_of=config.nproc_per_node)
    )
    pinned = tuple(name for name in options if name not in allowed)
    try:
        search = search_layouts(
            train, family, world_size, plan.vocab_size, system, pinned, top=CANDIDATES
        )
    except ValueError:
        return None
    for row in search.rows:
        changed = {n: value for n, value in flat(row.config).items() if value != options[n]}
        flags = tuple(to_flags(changed))
        if is_valid(flags, world_size):
            return flags
    return None
