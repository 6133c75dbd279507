import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_train.batches.batch_ramp import BatchRamp, build_ramp
from mcore_train.config import BatchConfig, OptimizerConfig, ScheduleConfig
from mcore_train.updating.lr_schedule import (
    LRSchedule,
    build_lr_schedule,
    learning_rate,
    reconcile,
    weight_decay,
)

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


def schedule(style="linear", **fields):
    wsd = {"wsd_decay_samples": 20} if style == "WSD" else {}
    return LRSchedule(
        **{
            "max_lr": 1.0,
            "min_lr": 0.1,
            "warmup_samples": 10,
            "decay_samples": 110,
            "decay_style": style,
            **wsd,
            **fields,
        }
    )


def test_warm_up_is_linear_from_its_first_value():
    rates = [learning_rate(schedule(warmup_init_lr=0.5), t) for t in (0, 5, 10)]
    assert rates == pytest.approx([0.5, 0.75, 1.0])


@pytest.mark.parametrize(
    ("style", "halfway"),
    [
        ("constant", 1.0),
        ("linear", 0.1 + 0.9 * 0.5),
        ("cosine", 0.1 + 0.9 * 0.5),
        ("inverse-square-root", math.sqrt(10) / math.sqrt(60)),
        ("WSD", 1.0),
    ],
)
def test_each_style_halfway_between_warm_up_and_end(style, halfway):
    assert learning_rate(schedule(style), 60) == pytest.approx(halfway)


@pytest.mark.parametrize(
    ("style", "quarter"),
    [
        ("linear", 0.75),
        ("cosine", 0.5 * (math.cos(math.pi / 4) + 1)),
        ("exponential", 2 * 0.5**0.25 - 1),
        ("minus_sqrt", 0.5),
    ],
)
def test_each_wsd_style_after_a_quarter_of_its_fall(style, quarter):
    rate = learning_rate(schedule("WSD", wsd_decay_style=style), 95)
    assert rate == pytest.approx(0.1 + 0.9 * quarter)


@given(st.sampled_from(STYLES), st.integers(0, 300))
def test_rates_stay_between_lowest_and_highest_and_never_rise_after_warm_up(style, samples):
    one, two = (
        learning_rate(schedule(style), samples),
        learning_rate(schedule(style), samples + 1),
    )
    assert 0.0 <= one <= 1.0
    if samples >= 10:
        assert two <= one + 1e-12
        assert two >= 0.1 - 1e-12


def test_everything_given_in_steps_is_counted_in_samples():
    built = build_lr_schedule(
        OptimizerConfig(lr=1e-3, min_lr=1e-4),
        ScheduleConfig(lr_decay_style="cosine", lr_warmup_iters=5),
        BatchConfig(train_iters=100),
        BatchRamp(8),
    )
    assert (built.warmup_samples, built.decay_samples) == (40, 800)
    by_share = build_lr_schedule(
        OptimizerConfig(lr=1e-3),
        ScheduleConfig(lr_warmup_fraction=0.05),
        BatchConfig(train_samples=800),
        BatchRamp(8),
    )
    assert by_share.warmup_samples == 40


@pytest.mark.parametrize("past", [(), ((4, 3), (3, 5))], ids=["ramp", "continued"])
def test_lengths_in_steps_last_so_many_steps_under_a_ramp(past):
    ramp = replace(build_ramp((2, 2, 90), 8), past=past)
    flags = ScheduleConfig(lr_warmup_iters=3, lr_decay_iters=30, lr_decay_style="WSD",
                           lr_wsd_decay_iters=5)  # fmt: skip
    built = build_lr_schedule(
        OptimizerConfig(lr=1.0, min_lr=0.1), flags, BatchConfig(train_samples=300), ramp
    )
    rates = [learning_rate(built, ramp.samples_before(step)) for step in range(1, 40)]
    assert rates[0] == 0.0
    assert rates[2] < 1.0
    assert rates[3:26] == [1.0] * 23  # warm-up is over after 3 steps, the decay begins after 25
    assert 0.1 < rates[26] < 1.0
    assert rates[29] > 0.1
    assert rates[30:] == pytest.approx([0.1] * 9)


def test_weight_decay_moves_from_its_start_to_its_end():
    moving = schedule(
        start_weight_decay=0.1,
        end_weight_decay=0.3,
        weight_decay_samples=100,
        weight_decay_style="linear",
    )
    assert [weight_decay(moving, t) for t in (0, 50, 100, 500)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.3]
    )


def test_a_warm_up_as_long_as_the_decay_is_refused():
    with pytest.raises(ValueError, match="--lr-warmup-iters"):
        schedule(warmup_samples=110)


def test_a_resumed_schedule_must_be_that_of_the_flags_unless_told_which_wins():
    saved = {"max_lr": 2.0, "min_lr": 0.1}
    flags = schedule()
    rates = r"--override-opt-param.* of 5\.000000E-01\).*--use-checkpoint.*\(1\.000000E\+00\)"
    with pytest.raises(ValueError, match=rf"max_lr: 2.0 there, 1.0 here.*{rates}"):
        reconcile(saved, flags, ScheduleConfig(), 5)
    override = ScheduleConfig(override_opt_param_scheduler=True)
    assert reconcile(saved, flags, override) == flags
    keep = ScheduleConfig(use_checkpoint_opt_param_scheduler=True)
    assert reconcile(saved, flags, keep).max_lr == 2.0
    assert reconcile({"max_lr": 1.0}, flags, ScheduleConfig()) == flags


@pytest.mark.parametrize(
    ("there", "here", "samples"),
    [
        ({"weight_decay_samples": 100}, {"weight_decay_samples": 200}, 50),
        ({"style": "constant", "decay_samples": 110}, {"style": "constant"}, 50),
        ({"style": "constant", "warmup_samples": 20}, {"style": "constant"}, 21),
        ({"warmup_init_lr": 0.5}, {}, 11),
        ({"warmup_samples": 0, "warmup_init_lr": 0.5}, {"warmup_samples": 0}, 0),
    ],
)
def test_schedules_that_differ_only_in_what_has_no_effect_any_more_are_one(
    there, here, samples
):
    flags = schedule(**{"decay_samples": 220, **here} if "style" in here else here)
    saved = schedule(**there)
    assert reconcile(asdict(saved), flags, ScheduleConfig(), samples) == flags
    for later in range(samples, 400):
        assert learning_rate(saved, later) == learning_rate(flags, later)
        assert weight_decay(saved, later) == weight_decay(flags, later)


@pytest.mark.parametrize(
    ("there", "samples", "told"),
    [
        ({"style": "WSD"}, 50, "decay_style: WSD there, linear here"),
        ({"decay_samples": 220}, 50, "decay_samples: 220 there, 110 here"),
        ({"warmup_init_lr": 0.5}, 9, "warmup_init_lr: 0.5 there"),
        ({"warmup_samples": 20}, 50, "warmup_samples: 20 there, 10 here"),
        ({"end_weight_decay": 0.1}, 50, "end_weight_decay: 0.1 there, 0.0 here"),
    ],
)
def test_schedules_that_differ_from_here_on_are_refused(there, samples, told):
    with pytest.raises(ValueError, match=told):
        reconcile(asdict(schedule(**there)), schedule(), ScheduleConfig(), samples)
