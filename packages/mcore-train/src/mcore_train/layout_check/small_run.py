"""Builds a small run from the real one: other sizes, the same branches of the code.

Features that the run does not use stay off, and switches keep their values; ``shrinking``
chooses the sizes. Eight ranks then train the small run on two CPU cores in seconds. Differences
in branches are listed in ``notes``. No torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from mcore_base.options import flag
from mcore_models.families import Family
from mcore_train.checkpoints.origin import start_kind
from mcore_train.composition import TrainConfig, compose, flat, without_idle_options
from mcore_train.config import (
    LoadConfig,
)
from mcore_train.layout_check.relations import (
    compare_relations,
)
from mcore_train.layout_check.shrinking import Shrinking
from mcore_train.layout_check.small_layout import describe_layout, shrink_layout
from mcore_train.resolution import Plan, resolve


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallRun:
    """A run small enough to compute twice, and its differences from the real one."""

    config: TrainConfig
    family: Family
    noisy: TrainConfig | None
    """The config with dropout, router jitter and dropped tokens, which differ between layouts
    by design; None if the real run has none of these."""
    world_size: int
    chosen: frozenset[str]
    """Options whose values differ from the real run's."""
    uncovered: Mapping[str, tuple[str, str]]
    """Branches that the small run does not take: the deciding relation, in the real and the
    small run."""
    notes: tuple[str, ...]
    """Descriptions of what is not checked, one line each."""
    start: Literal["", "weights", "run"] = ""
    """Kind of checkpoint that is loaded before the first step, see ``start_kind``; made for the
    small run."""
    loading: LoadConfig = field(default_factory=LoadConfig)
    """Loading options of the real run."""


def build_small_run(plan: Plan, max_ranks: int) -> SmallRun:
    """Return a small run of at most ``max_ranks`` ranks for the plan of a real run.

    Args:
        plan: of the real run.
        max_ranks: of the small run; larger degrees are halved, but split axes stay split.

    Raises:
        ValueError: if the layout needs more ranks to split all its axes.
    """
    config, real = plan.config, flat(plan.config)
    layout, world_size = shrink_layout(config.parallelism, plan.world_size, max_ranks)
    small = Shrinking(plan, layout, world_size)
    # ``compare_relations`` compares what these options amount to.
    related = {f.name: getattr(layout, f.name) for f in fields(layout)}
    related |= small.layers() | small.stages() | small.vocabulary()
    sizes = (
        small.constants() | small.heads_and_widths() | small.recurrent_heads() | small.experts()
    )
    sizes |= small.batch() | small.buckets() | small.shares_of_layers() | small.thresholds()
    chosen = small.data_and_rates() | related | sizes
    # Sizes of parts that this model does not have go back to their defaults.
    shrunk = without_idle_options(compose(real | chosen, type(config)))
    resolved = resolve(shrunk, world_size, family=plan.family)
    uncovered = _changed_switches(real, flat(shrunk), sizes)
    uncovered |= compare_relations(plan, resolved)
    return SmallRun(
        config=shrunk,
        family=plan.family,
        noisy=_noise(shrunk, real),
        world_size=world_size,
        chosen=frozenset(chosen),
        uncovered=uncovered,
        notes=tuple(_notes(plan, resolved, uncovered)),
        start=start_kind(config),
        loading=config.loading,
    )


def _noise(shrunk: TrainConfig, real: Mapping[str, Any]) -> TrainConfig | None:
    """Return the config with the real run's noise and capacity; None without these."""
    dropout = ("hidden_dropout", "attention_dropout", "lora_dropout")
    routing = ("moe_input_jitter_eps", "moe_expert_capacity_factor")
    noisy = dropout + (routing if real["num_experts"] else ())
    if not any(real[name] for name in noisy):
        return None
    names = (*noisy, *(("moe_pad_expert_input_to_capacity",) if real["num_experts"] else ()))
    values = flat(shrunk) | {name: real[name] for name in names}
    return compose(values, type(shrunk))


def _changed_switches(
    real: Mapping[str, Any], small: Mapping[str, Any], sizes: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Return the options among ``sizes`` that the small run switches off or changes."""
    changed = {}
    for name in sizes:
        before, after = real[name], small[name]
        if isinstance(before, str) and before != after:
            changed[flag(name)] = before, after
        elif before and not after:
            changed[flag(name)] = "on", "off"
    return changed


BY_DESIGN = {
    "--hidden-dropout": "dropout: its numbers, as masks differ between layouts by design "
    "(which ranks share a mask, and that a continued run goes on with it, is checked)",
    "--attention-dropout": "dropout of attention weights: its numbers, likewise",
    "--lora-dropout": "dropout before adapters: its numbers, likewise",
    "--moe-expert-capacity-factor": "dropping of tokens over capacity: it depends on the ranks "
    "by design",
    "--moe-input-jitter-eps": "router jitter: its numbers, as they are random on each rank",
    "--moe-router-load-balancing-type": "the global balancing loss: what it has seen of a step "
    "before a micro-batch depends on the data ranks by design, so aux_loss is used instead",
}
"""Differences of every small run, and the reasons."""


def _notes(plan: Plan, small: Plan, uncovered: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """List what the small run does not check."""
    before, layout = plan.config.parallelism, small.config.parallelism
    yield "sizes: the small run is small; overflow, memory and speed at full size"
    yield "your data, tokenizer and learning-rate schedule: made-up rows, a constant rate"
    if (objective := plan.config.objective.objective) not in ("pretrain", "sft"):
        yield f"--objective {objective}: the small run trains by the model's own loss"
    if start_kind(plan.config):
        yield "the files that --load names: made-up weights of one rank stand in for them"
    if small.world_size != plan.world_size or layout != before:
        yield (
            f"degrees: {describe_layout(before, plan.world_size)} shrank to "
            f"{describe_layout(layout, small.world_size)}"
        )
    if layout.pipeline_model_parallel_size != before.pipeline_model_parallel_size:
        yield "the real split of layers: stages in the middle were left out"
    for what, (real_way, small_way) in uncovered.items():
        note = f"{what}: {real_way} in the run, {small_way} in the small run"
        yield BY_DESIGN.get(what, note)
