"""Alarms on the waterfall of a step: what is beyond its bound, and the one flag to try.

A bound that is crossed is traced to the largest part behind it. Of the flags against that part
the planner names the one that gains most, with its prediction; where it has no constants of the
device, or does not model the part, the first flag that the run would accept is named, with what
the step would gain at most: all of the part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcore_train.composition import TrainConfig, compose, flat
from mcore_train.options.recipe import to_flags
from mcore_train.planning.gain import (
    Changes,
    faster_changes,
    predict_gains,
    shorter_bubbles,
)
from mcore_train.planning.system import system_of_device
from mcore_train.reporting.waterfall import AXES, Waterfall
from mcore_train.resolution import Plan, resolve

LEAST_MFU = 0.4
"""Share of the device's peak."""
MOST_COMMUNICATION = 0.3
"""Share of the step in which ranks wait for communication."""
LEAST_UTILISATION = 0.8
"""Share of the step in which devices compute or communicate."""
MOST_NOISE = 1.0
"""Gradient noise scale over the batch size."""
LEAST_NOISES = 5
"""Measurements of it before an alarm: one alone may be far off."""

_MODELED = ("bubble", "compute", "exposed_dp", "exposed_tp")
"""Parts whose flags the planner predicts."""
_CHANGES_NUMBERS = {"global_batch_size", "grad_reduce_in_bf16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """One bound that is crossed."""

    name: str
    seen: str
    """The numbers that show it."""
    flag: str
    """Option to try; empty: no option of the run helps."""
    gain: str
    """What it gains: as predicted, or at most."""

    def line(self) -> str:
        """Write the alarm for a person."""
        remedy = f"try {self.flag}: {self.gain}" if self.flag else self.gain
        return f"{self.name}: {self.seen}; {remedy}"


def find_alarms(
    plan: Plan, waterfall: Waterfall, mfu: float, device_name: str = ""
) -> list[Alarm]:
    """Hold a waterfall to the bounds.

    Args:
        plan: of the run.
        waterfall: of one of its steps.
        mfu: share of the device's peak; 0: the peak is not known.
        device_name: of the GPU, as its driver gives it; empty: a CPU.
    """
    parts, step_s = waterfall.parts, waterfall.step_s
    alarm = partial(_alarm, plan=plan, device_name=device_name)
    found = []
    share = waterfall.communication_share
    # Ranks wait in communication for a slow rank, which guards.stragglers names.
    if share > MOST_COMMUNICATION and waterfall.slow_rank < 0:
        part = max((f"exposed_{axis}" for axis in AXES), key=lambda name: parts[name])
        seen = f"{_percent(share)} of a step is exposed, most of it over {part[8:]}"
        found.append(alarm("communication", seen, part, share=parts[part] / step_s))
    if waterfall.utilisation < LEAST_UTILISATION:
        part = max(("bubble", "data", "host", "checkpoint"), key=lambda name: parts[name])
        seen = (
            f"devices have work ahead for {_percent(waterfall.utilisation)} of a step; "
            f"{_percent(parts[part] / step_s)} is {_WORDS[part]}"
        )
        # Kernels run also while the host paces them: at the peak a step takes mfu * step_s.
        share = min(parts[part] / step_s, 1 - mfu)
        found.append(alarm("utilisation", seen, part, share=share))
    if 0 < mfu < LEAST_MFU and not found:
        found.append(alarm("MFU", f"{_percent(mfu)} of the peak", "compute"))
    if waterfall.gradient_noise > MOST_NOISE and waterfall.num_noises >= LEAST_NOISES:
        noise = waterfall.gradient_noise
        size = plan.global_batch_size * min(4, max(2, round(noise) if noise < 4 else 4))
        found.append(
            Alarm(
                name="gradient noise",
                seen=f"the noise scale is {noise:.3g} times the batch",
                flag=f"--global-batch-size {size}",
                gain="the variance of a step's gradient falls as the batch grows",
            )
        )
    return found


_WORDS = {
    "bubble": "pipeline bubble",
    "data": "waiting for data",
    "host": "paced by the host",
    "checkpoint": "saves",
}


def _alarm(
    name: str, seen: str, part: str, *, plan: Plan, device_name: str, share: float = 0.0
) -> Alarm:
    """Name the flag against a part that takes a share of the step."""
    config = plan.config
    candidates = [
        changes
        for changes in _against(part, config, has_graphs=bool(device_name))
        if not changes.items() <= flat(config).items()
    ]
    system = system_of_device(device_name)
    if system is not None and part in _MODELED:
        run = plan.family, plan.world_size, plan.vocab_size, system
        # What changes the numbers of a run is named only where nothing else helps.
        same = [changes for changes in candidates if not _CHANGES_NUMBERS & set(changes)]
        gains = [g for g in predict_gains(config, same, *run) if g.fits and g.faster > 0]
        if gains:
            return Alarm(name=name, seen=seen, flag=gains[0].flags, gain=gains[0].describe())
    for changes in candidates:
        if _accepts(plan, changes):
            at_most = share / (1 - share) if share < 1 else float("inf")
            gain = f"at most {100 * at_most:+.0f} % tokens/s" if share else "not predicted here"
            return Alarm(name=name, seen=seen, flag=_words(changes), gain=gain)
    return Alarm(name=name, seen=seen, flag="", gain="no option of this run is known to help")


def _against(part: str, config: TrainConfig, *, has_graphs: bool) -> Iterator[Changes]:
    """Yield changes that shorten a part, the likeliest first."""
    sequences = config.batch.global_batch_size or config.batch.micro_batch_size
    larger: Changes = {"global_batch_size": 2 * sequences}
    match part:
        case "data":
            yield {"num_workers": max(2, 2 * config.data.num_workers)}
        case "host":
            if has_graphs:
                yield {"cuda_graph_impl": "full_iteration"}
                yield {"cuda_graph_impl": "local"}
            yield {"micro_batch_size": 2 * config.batch.micro_batch_size}
            yield {"manual_gc_interval": 100}
        case "checkpoint":
            yield {"async_save": True}
            yield {"save_interval": 2 * config.saving.save_interval}
        case "bubble":
            yield from shorter_bubbles(config)
            yield larger
        case "exposed_dp":
            yield {"overlap_grad_reduce": True}
            yield {"overlap_param_gather": True}
            yield {"grad_reduce_in_bf16": True}
            yield larger
        case "exposed_tp":
            yield {"sequence_parallel": True}
            tp = config.parallelism.tensor_model_parallel_size
            yield {"tensor_model_parallel_size": tp // 2, "sequence_parallel": tp > 2}
        case "exposed_cp":
            yield {"cp_comm_type": "a2a"}
            yield {"cp_comm_type": "p2p"}
        case "exposed_ep":
            yield {"overlap_moe_expert_parallel_comm": True}
            yield {"moe_shared_expert_overlap": True}
            ep = config.parallelism.expert_model_parallel_size
            yield {"expert_model_parallel_size": ep // 2}
        case "exposed_pp":
            yield {"overlap_p2p_communication": True}
            yield from shorter_bubbles(config)
        case _:
            yield from faster_changes(config)


def _accepts(plan: Plan, changes: Changes) -> bool:
    """Whether a run with some options changed would start."""
    try:
        changed = compose({**flat(plan.config), **changes}, type(plan.config))
        resolve(
            changed,
            plan.world_size,
            family=plan.family,
            tokenizer_vocab_size=plan.vocab_size,
        )
    except ValueError:
        return False
    return True


def _words(changes: Changes) -> str:
    table: dict[str, Any] = dict(changes)
    return " ".join(to_flags(table))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
