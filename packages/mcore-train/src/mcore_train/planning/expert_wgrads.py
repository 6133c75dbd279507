"""Chooses ``--moe-wgrad-micro-batches auto`` by the planner's estimates of time and memory.

The choice depends only on the options, and on the constants and the memory of the GPU, so a
plan and a run of one layout choose the same number. On a CPU the number is 1; there every
number gives the same bits, because float32 and float64 add micro-batches one by one.
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
    """Choose how many micro-batches one weight-gradient GEMM of experts adds.

    Of the numbers whose memory fits, takes the smallest whose predicted step is at most
    ``LEAST_GAIN`` slower than the fastest.

    Args:
        config: all options; its layout must be possible.
        family: of the model.
        world_size: ranks.
        vocab_size: tokens of the model.
        system: constants of the GPU.
        limit_bytes: memory of the device.

    Returns:
        The number and its reason; None if the model has no experts or the user gave a number.
    """
    if not has_automatic_wgrads(config):
        return None
    if reason := exclusion_reason(config, world_size):
        return ExpertWgrads(1, reason)
    if family.name not in FAMILIES:
        return ExpertWgrads(1, f"the planner has no times of the family {family.name}")
    run = family, world_size, vocab_size, system
    limit_bytes = MOST_MEMORY * limit_bytes - CONTEXT_GIB * GIB
    num_microbatches = count_microbatches(config, world_size)
    numbers = sorted({1, *(min(number, num_microbatches) for number in _NUMBERS)})
    configs = {number: set_wgrad_micro_batches(config, number) for number in numbers}
    needed_bytes = {n: predict_memory(tried, *run).total for n, tried in configs.items()}
    step_s = {
        number: predict_step(tried, *run, simulates=False).total
        for number, tried in configs.items()
        if number == 1 or needed_bytes[number] <= limit_bytes
    }
    limit = f"{limit_bytes / GIB:.1f} GiB"
    if len(step_s) == 1:
        needed = f"{needed_bytes[numbers[1]] / GIB:.1f}"
        return ExpertWgrads(1, f"{numbers[1]} would need {needed} of {limit}")
    fastest_s = min(step_s.values())
    number = next(n for n, time_s in step_s.items() if time_s <= (1 + LEAST_GAIN) * fastest_s)
    if number == 1:
        return ExpertWgrads(1, f"more would save {step_s[1] / fastest_s - 1:.1%} of a step")
    gain = step_s[1] / step_s[number] - 1
    added = f"{(needed_bytes[number] - needed_bytes[1]) / GIB:.1f} GiB"
    needed = f"{needed_bytes[number] / GIB:.1f}"
    return ExpertWgrads(
        number,
        f"predicted {gain:.1%} faster than one at a time, with {added} more memory: {needed} "
        f"of {limit}",
    )


def has_automatic_wgrads(config: TrainConfig) -> bool:
    """Return whether the number is to be chosen: there are experts, and no number is set."""
    return config.experts.num_experts > 0 and config.experts.moe_wgrad_micro_batches == "auto"


def exclusion_reason(config: TrainConfig, world_size: int) -> str:
    """Return why a number above 1 is impossible or cannot be faster; empty: it may be."""
    if not config.precision.bf16:
        return "only GEMMs in bf16 are faster with more"
    if count_microbatches(config, world_size) == 1:
        return "a step has one micro-batch"
    if (objective := config.objective.objective) not in ("pretrain", "sft"):
        return f"--objective {objective} may hold further models, which the planner leaves out"
    faults = find_faults(*parts(set_wgrad_micro_batches(config, 2)))
    return faults[0].removeprefix("--moe-wgrad-micro-batches 2 and ") if faults else ""


def with_chosen_wgrads(
    config: TrainConfig, family: Family, world_size: int, vocab_size: int, system: System
) -> TrainConfig:
    """Return the config with ``auto`` replaced by the choice for a GPU of the system."""
    memory_bytes = system.memory_gib * GIB
    chosen = choose_expert_wgrads(config, family, world_size, vocab_size, system, memory_bytes)
    return set_wgrad_micro_batches(config, chosen.num_together) if chosen else config


def set_wgrad_micro_batches(config: TrainConfig, number: int) -> TrainConfig:
    """Return the config with ``--moe-wgrad-micro-batches`` set to ``number``."""
    return replace(config, experts=replace(config.experts, moe_wgrad_micro_batches=number))
