"""Learning rate and weight decay as pure functions of the samples seen so far.

Everything is counted in sequences. Lengths that flags give in steps are converted to the
sequences of these steps, by the batch ramp and, in a run that continues with another batch
size, by the batch sizes of its earlier steps. The first update has the values at zero samples.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcore_train.batches.batch_ramp import BatchRamp
from mcore_train.config import (
    BatchConfig,
    DecayStyle,
    IncreaseStyle,
    OptimizerConfig,
    ScheduleConfig,
    WsdDecayStyle,
)

_FALL: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: 0.5 * (math.cos(math.pi * x) + 1),
    "exponential": lambda x: 2 * 0.5**x - 1,
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
}
"""Shapes of a decay: from 1 at x = 0 to 0 at x = 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LRSchedule:
    """Parameters of the learning rate and weight decay over a run, in sequences."""

    max_lr: float
    min_lr: float = 0.0
    warmup_init_lr: float = 0.0
    warmup_samples: int = 0
    decay_samples: int
    decay_style: DecayStyle = "linear"
    wsd_decay_samples: int = 0
    wsd_decay_style: WsdDecayStyle = "exponential"
    power: float = 0.5
    power_samples: int = 0
    stages: tuple[tuple[str, int, float], ...] = ()
    """For style ``stages``: shape, sequences and last rate as a share of ``max_lr``."""
    start_weight_decay: float = 0.0
    end_weight_decay: float = 0.0
    weight_decay_samples: int = 0
    weight_decay_style: IncreaseStyle = "constant"

    def __post_init__(self) -> None:
        if self.warmup_samples >= self.decay_samples:
            raise ValueError(
                f"the warm-up of {self.warmup_samples} sequences is not shorter than the decay "
                f"of {self.decay_samples}: lower --lr-warmup-iters, or raise --lr-decay-iters "
                "or --train-iters."
            )
        if self.wsd_decay_samples > self.decay_samples - self.warmup_samples:
            raise ValueError(
                f"--lr-wsd-decay-iters ({self.wsd_decay_samples} sequences) is longer than the "
                f"decay after the warm-up ({self.decay_samples - self.warmup_samples}): lower "
                "it, or --lr-warmup-iters."
            )


def build_lr_schedule(
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    batch: BatchConfig,
    ramp: BatchRamp,
) -> LRSchedule:
    """Return the ``LRSchedule`` of the flags, with all lengths converted to sequences.

    Raises:
        ValueError: if the lengths do not fit each other.
    """

    def samples_of(steps: int) -> int:
        return ramp.samples_before(steps + 1)

    train_samples = batch.train_samples or samples_of(batch.train_iters)
    decay = schedule.lr_decay_samples or samples_of(schedule.lr_decay_iters) or train_samples
    warmup = schedule.lr_warmup_samples or samples_of(schedule.lr_warmup_iters)
    wsd_decay = schedule.lr_wsd_decay_samples
    if schedule.lr_wsd_decay_iters:  # the last steps of the decay, not the first of the run
        steps = ramp.num_steps(decay)
        before = max(0, steps - schedule.lr_wsd_decay_iters)
        wsd_decay = samples_of(steps) - samples_of(before)
    if schedule.lr_warmup_fraction:
        warmup = int(schedule.lr_warmup_fraction * decay)
    stages, done = [], 0
    for style, steps, factor in read_stages(schedule.lr_stages):
        stages.append((style, samples_of(done + steps) - samples_of(done), factor))
        done += steps
    constant = optimizer.weight_decay_incr_style == "constant"
    return LRSchedule(
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        warmup_init_lr=schedule.lr_warmup_init,
        warmup_samples=warmup,
        decay_samples=decay,
        decay_style=schedule.lr_decay_style,
        wsd_decay_samples=wsd_decay,
        wsd_decay_style=schedule.lr_wsd_decay_style,
        power=schedule.lr_power,
        power_samples=samples_of(schedule.lr_power_iters),
        stages=tuple(stages),
        start_weight_decay=optimizer.weight_decay if constant else optimizer.start_weight_decay,
        end_weight_decay=optimizer.weight_decay if constant else optimizer.end_weight_decay,
        weight_decay_samples=train_samples,
        weight_decay_style=optimizer.weight_decay_incr_style,
    )


def learning_rate(schedule: LRSchedule, samples: int) -> float:
    """Learning rate of the update that follows ``samples`` sequences.

    Reference:
        Loshchilov & Hutter 2017, arXiv:1608.03983 (cosine); Hu et al. 2024,
        arXiv:2404.06395 (WSD); Vaswani et al. 2017, arXiv:1706.03762 (inverse square root);
        Shen et al. 2024, arXiv:2408.13359 (power).
    """
    low, high, warmup = schedule.min_lr, schedule.max_lr, schedule.warmup_samples
    if schedule.decay_style == "stages":
        return _stage_rate(schedule, samples)
    if warmup and samples <= warmup:
        start = schedule.warmup_init_lr
        return start + (high - start) * samples / warmup
    if schedule.decay_style == "constant":
        return high
    if samples > schedule.decay_samples:
        return low
    if schedule.decay_style == "inverse-square-root":
        return max(low, high * math.sqrt(max(warmup, 1)) / math.sqrt(max(samples, 1)))
    if schedule.decay_style == "power":
        return _power_rate(schedule, samples)
    return low + (high - low) * _height(schedule, samples)


def batch_lr_factor(batch: BatchConfig, size: int, largest: int) -> float:
    """Return the factor of ``--batch-size-lr-scaling`` for a step of ``size`` sequences."""
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[batch.batch_size_lr_scaling]
    return (size / largest) ** power


def read_stages(texts: Sequence[str]) -> list[tuple[str, int, float]]:
    """Read ``--lr-stages``: shape, steps and last factor of each stage.

    Raises:
        ValueError: with the stage that cannot be read.
    """
    parsed = []
    for text in texts:
        try:
            style, steps, factor = text.split(":")
            stage = style, int(steps), float(factor)
        except ValueError:
            stage = "", 0, 0.0
        if stage[0] not in ("constant", *_FALL) or stage[1] < 1 or stage[2] < 0:
            raise ValueError(
                f"--lr-stages {text} is not STYLE:STEPS:FACTOR with a style of constant, "
                f"{', '.join(_FALL)}, such as cosine:1000:0.1."
            )
        parsed.append(stage)
    return parsed


def _stage_rate(schedule: LRSchedule, samples: int) -> float:
    """Return the learning rate after ``samples`` sequences under style ``stages``."""
    rate = schedule.warmup_init_lr
    for style, length, factor in schedule.stages:
        end = schedule.max_lr * factor
        if samples < length:
            return (
                end
                if style == "constant"
                else end + (rate - end) * _FALL[style](samples / length)
            )
        rate, samples = end, samples - length
    return rate


def _power_rate(schedule: LRSchedule, samples: int) -> float:
    """Return max_lr (samples / start)^-power, and its fall to min_lr at the end."""
    start = max(1, schedule.warmup_samples, schedule.power_samples)
    anneal = schedule.decay_samples - schedule.wsd_decay_samples
    reached = max(start, min(samples, anneal) if schedule.wsd_decay_samples else samples)
    low = schedule.min_lr
    rate = max(low, schedule.max_lr * (reached / start) ** -schedule.power)
    if schedule.wsd_decay_samples and samples > anneal:
        fall = _FALL[schedule.wsd_decay_style]((samples - anneal) / schedule.wsd_decay_samples)
        rate = low + (rate - low) * fall
    return rate


def weight_decay(schedule: LRSchedule, samples: int) -> float:
    """Weight decay of the update that follows ``samples`` sequences."""
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    if schedule.weight_decay_style == "constant" or samples >= schedule.weight_decay_samples:
        return end
    progress = samples / schedule.weight_decay_samples
    rise = (
        progress if schedule.weight_decay_style == "linear" else 1 - _FALL["cosine"](progress)
    )
    return start + (end - start) * rise


def _height(schedule: LRSchedule, samples: int) -> float:
    """Return the height of a decay, from 1 (highest rate) to 0 (lowest)."""
    if schedule.decay_style != "WSD":
        length = schedule.decay_samples - schedule.warmup_samples
        return _FALL[schedule.decay_style]((samples - schedule.warmup_samples) / length)
    anneal = schedule.decay_samples - schedule.wsd_decay_samples
    if samples <= anneal:
        return 1.0
    return _FALL[schedule.wsd_decay_style]((samples - anneal) / schedule.wsd_decay_samples)


def reconcile(
    saved: dict[str, Any],
    flags: LRSchedule,
    options: ScheduleConfig,
    samples: int = 0,
) -> LRSchedule:
    """Return the schedule of a resumed run; raise if checkpoint and flags differ from here on.

    Args:
        saved: the checkpoint's schedule, ``asdict`` of a ``LRSchedule``.
        flags: the schedule of this run's flags.
        options: which of the two is used if they differ.
        samples: sequences that the schedule has counted; differences before them are ignored.
    """
    now, then = asdict(flags), parse_schedule(saved, flags)
    if options.use_checkpoint_opt_param_scheduler:
        return then
    saved_values, flag_values = _in_effect(then, samples), _in_effect(flags, samples)
    if saved_values != flag_values and not options.override_opt_param_scheduler:
        differences = ", ".join(
            f"{name}: {getattr(then, name)} in the checkpoint, {now[name]} here"
            for name in sorted(saved_values.keys() | flag_values.keys())
            if getattr(then, name) != now[name]
        )
        raise ValueError(
            f"the checkpoint's schedule differs from the flags ({differences}). Give "
            "--override-opt-param-scheduler to follow the flags (the next step has a learning "
            f"rate of {learning_rate(flags, samples):.6E}), or "
            "--use-checkpoint-opt-param-scheduler to follow the checkpoint "
            f"({learning_rate(then, samples):.6E})."
        )
    return flags


def parse_schedule(saved: dict[str, Any], flags: LRSchedule) -> LRSchedule:
    """Return a checkpoint's schedule; missing fields are those of the flags."""
    now = asdict(flags)
    then: dict[str, Any] = {**now, **{n: saved[n] for n in now if n in saved}}
    then["stages"] = tuple(tuple(stage) for stage in then["stages"])  # JSON has lists
    return LRSchedule(**then)


def _in_effect(schedule: LRSchedule, samples: int) -> dict[str, Any]:
    """Return the fields that change a value after ``samples`` sequences."""
    ignored = set()
    if schedule.decay_style == "constant":
        ignored |= {"min_lr", "decay_samples"}
    if schedule.decay_style not in ("WSD", "power"):
        ignored |= {"wsd_decay_samples", "wsd_decay_style"}
    if schedule.decay_style != "power":
        ignored |= {"power", "power_samples"}
    if schedule.decay_style == "stages":
        ignored |= {"min_lr", "warmup_samples", "decay_samples"}
    else:
        ignored |= {"stages"}
    if samples > schedule.warmup_samples or not schedule.warmup_samples:
        ignored |= {"warmup_init_lr"}
        if schedule.decay_style in ("constant", "WSD"):
            ignored |= {"warmup_samples"}
    if (
        schedule.weight_decay_style == "constant"
        or schedule.start_weight_decay == schedule.end_weight_decay
    ):
        ignored |= {"start_weight_decay", "weight_decay_samples", "weight_decay_style"}
    return {name: value for name, value in asdict(schedule).items() if name not in ignored}
