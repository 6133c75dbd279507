"""Implements ``--moe-wgrad-micro-batches auto`` by the planner's time and memory.

The choice follows from the options, the constants of the GPU and its memory alone, so a plan
and a run of one layout choose the same number. On a CPU the number is 1: float32 and float64
add each micro-batch in turn whatever the number is, and the sums have the same bits.
"""

from dataclasses import replace

from mcore_base.options import find_faults
from mcore_models.families import FAMILIES, Family
from mcore_train.composition import TrainConfig, parts
from mcore_train.planning.memory import CONTEXT_GIB, GIB, predict_memory
from mcore_train.planning.step_time import predict_step
from mcore_train.planning.system import System
from mcore_train.resolution import ExpertWgrads, count_microbatches

_NUMBERS = (2, 4, 8)
LEAST_GAIN = 0.02
"""Least predicted gain, as a share of the step, of a larger number over a smaller one."""
MOST_MEMORY = 0.93
"""Largest predicted share of the GPU's memory. The planner's error is up to 5 % of a peak, and
a choice that the user did not make must not exhaust the memory."""


def choose_expert_wgrads(
    config: TrainConfig,
    family: Family,
    world_size: int,
    vocab_size: int,
    system: System,
    limit_bytes: float,
) -> ExpertWgrads | None:
    """Return the number of micro-batches that experts add at once, and the reason.

    The number is the smallest whose predicted step is within ``LEAST_GAIN`` of the fastest
    that fits; numbers with which the options exclude each other are left out.

    Args:
        config: all options; its layout must be possible.
        family: of the model.
        world_size: ranks.
        vocab_size: tokens of the model.
        system: constants of the GPU.
        limit_bytes: memory of the device.

    Returns:
        None if the model has no experts or the user gave a number.
    """
    if not is_automatic(config):
        return None
    if reason := reason_for_one(config, world_size):
        return ExpertWgrads(1, reason)
    if family.name not in FAMILIES:
        return ExpertWgrads(1, f"the planner has no times of the family {family.name}")
    run = family, world_size, vocab_size, system
    limit_bytes = MOST_MEMORY * limit_bytes - CONTEXT_GIB * GIB
    num_microbatches = count_microbatches(config, world_size)
    numbers = sorted({1, *(min(number, num_microbatches) for number in _NUMBERS)})
    tried = {number: with_number(config, number) for number in numbers}
    needed = {number: predict_memory(each, *run).total for number, each in tried.items()}
    step_s = {
        number: predict_step(each, *run, simulates=False).total
        for number, each in tried.items()
        if number == 1 or needed[number] <= limit_bytes
    }
    memory = f"{needed[numbers[1]] / GIB:.1f} GiB of {limit_bytes / GIB:.1f}"
    if len(step_s) == 1:
        return ExpertWgrads(1, f"{numbers[1]} would need {memory}")
    fastest = min(step_s.values())
    number = next(n for n, each_s in step_s.items() if each_s <= (1 + LEAST_GAIN) * fastest)
    gain = step_s[1] / step_s[number] - 1
    if number == 1:
        return ExpertWgrads(1, f"more would save {step_s[1] / fastest - 1:.1%} of a step")
    return ExpertWgrads(
        number,
        f"predicted {gain:.1%} faster than one by one, for "
        f"{(needed[number] - needed[1]) / GIB:.1f} GiB more: {needed[number] / GIB:.1f} of "
        f"{limit_bytes / GIB:.1f}",
    )


def is_automatic(config: TrainConfig) -> bool:
    """Return whether the number is to be chosen: there are experts, and no number is set."""
    return config.experts.num_experts > 0 and config.experts.moe_wgrad_micro_batches == "auto"


def reason_for_one(config: TrainConfig, world_size: int) -> str:
    """Return why a number above 1 is excluded or cannot gain; empty: it may gain."""
    if not config.precision.bf16:
        return "only GEMMs in bf16 gain by more"
    if count_microbatches(config, world_size) == 1:
        return "a step has one micro-batch"
    if (objective := config.objective.objective) not in ("pretrain", "sft"):
        return f"--objective {objective} may hold further models, which the planner leaves out"
    faults = find_faults(*parts(with_number(config, 2)))
    return faults[0].removeprefix("--moe-wgrad-micro-batches 2 and ") if faults else ""


def with_chosen_wgrads(
    config: TrainConfig, family: Family, world_size: int, vocab_size: int, system: System
) -> TrainConfig:
    """Return the config with ``auto`` replaced by the choice for a GPU of the system."""
    memory_bytes = system.memory_gib * GIB
    chosen = choose_expert_wgrads(config, family, world_size, vocab_size, system, memory_bytes)
    return with_number(config, chosen.num_together) if chosen else config


def with_number(config: TrainConfig, number: int) -> TrainConfig:
    """Return the config with a number of micro-batches that experts add at once."""
    return replace(config, experts=replace(config.experts, moe_wgrad_micro_batches=number))
