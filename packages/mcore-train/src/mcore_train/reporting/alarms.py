"""Raises alarms on the waterfall of a step: which bound is exceeded, and one flag to try.

The cause of an exceeded bound is the largest part of the step that contributes to it. Of the
flags that reduce this part, the alarm names the one with the largest gain predicted by the
planner. If the planner has no constants of the device or does not model the part, the alarm
names the first flag that is valid for the run, and the upper limit of its gain: the whole part.
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
"""Smallest share of the device's peak."""
MOST_COMMUNICATION = 0.3
"""Largest share of the step in which ranks wait for communication."""
LEAST_UTILISATION = 0.8
"""Smallest share of the step in which devices compute or communicate."""
MOST_NOISE = 1.0
"""Largest gradient noise scale over the batch size."""
LEAST_NOISES = 5
"""Measurements of the noise scale before an alarm, since a single one may be far off."""

_MODELED = ("bubble", "compute", "exposed_dp", "exposed_tp")
"""Parts whose flags the planner predicts."""
_CHANGES_NUMBERS = {"global_batch_size", "grad_reduce_in_bf16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """One exceeded bound."""

    name: str
    seen: str
    """Numbers that show the problem."""
    flag: str
    """Option to try; "" if no option of the run helps."""
    gain: str
    """Predicted gain of the option, or its upper limit."""

    def line(self) -> str:
        """Format the alarm as one line."""
        remedy = f"try {self.flag}: {self.gain}" if self.flag else self.gain
        return f"{self.name}: {self.seen}; {remedy}"


def find_alarms(
    plan: Plan, waterfall: Waterfall, mfu: float, device_name: str = ""
) -> list[Alarm]:
    """Return an alarm for each bound that a waterfall exceeds.

    Args:
        plan: plan of the run.
        waterfall: waterfall of one step.
        mfu: share of the device's peak; 0 if the peak is not known.
        device_name: name of the GPU by its driver; "" for a CPU.
    """
    parts, step_s = waterfall.parts, waterfall.step_s
    alarm = partial(_alarm, plan=plan, device_name=device_name)
    alarms = []
    share = waterfall.communication_share
    # Ranks wait in communication for a slow rank, which guards.stragglers reports.
    if share > MOST_COMMUNICATION and waterfall.slow_rank < 0:
        part = max((f"exposed_{axis}" for axis in AXES), key=lambda name: parts[name])
        seen = f"{_percent(share)} of a step is exposed, most of it over {part[8:]}"
        alarms.append(alarm("communication", seen, part, share=parts[part] / step_s))
    if waterfall.utilisation < LEAST_UTILISATION:
        part = max(("bubble", "data", "host", "checkpoint"), key=lambda name: parts[name])
        seen = (
            f"devices have work ahead for {_percent(waterfall.utilisation)} of a step; "
            f"{_percent(parts[part] / step_s)} is {_WORDS[part]}"
        )
        # Part of the host's time overlaps with kernels: at peak speed a step takes mfu *
        # step_s, so at most the rest can be saved.
        share = min(parts[part] / step_s, 1 - mfu)
        alarms.append(alarm("utilisation", seen, part, share=share))
    if 0 < mfu < LEAST_MFU and not alarms:
        alarms.append(alarm("MFU", f"{_percent(mfu)} of the peak", "compute"))
    if waterfall.gradient_noise > MOST_NOISE and waterfall.num_noises >= LEAST_NOISES:
        noise = waterfall.gradient_noise
        size = plan.global_batch_size * min(4, max(2, round(noise) if noise < 4 else 4))
        alarms.append(
            Alarm(
                name="gradient noise",
                seen=f"the noise scale is {noise:.3g} times the batch",
                flag=f"--global-batch-size {size}",
                gain="the variance of a step's gradient falls as the batch grows",
            )
        )
    return alarms


_WORDS = {
    "bubble": "pipeline bubble",
    "data": "waiting for data",
    "host": "paced by the host",
    "checkpoint": "saves",
}


def _alarm(
    name: str, seen: str, part: str, *, plan: Plan, device_name: str, share: float = 0.0
) -> Alarm:
    """Return the alarm of a part with the flag that reduces it; ``share`` is of the step."""
    config = plan.config
    candidates = [
        changes
        for changes in _against(part, config, has_graphs=bool(device_name))
        if not changes.items() <= flat(config).items()
    ]
    system = system_of_device(device_name)
    if system is not None and part in _MODELED:
        run = plan.family, plan.world_size, plan.vocab_size, system
        # Changes that alter the run's numbers are named only if no other change helps.
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
    """Yield changes of options that may shorten a part, the most likely first."""
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
    """Whether the changed options are valid for the run."""
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
