import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_train.batches.batch_ramp import (
    BatchRamp,
    build_ramp,
    build_step_schedule,
    piece_length,
)
from mcore_train.batches.micro_batches import cut_rows
from mcore_train.config import BatchConfig, OptimizerConfig, ScheduleConfig
from mcore_train.updating.lr_schedule import (
    LRSchedule,
    batch_lr_factor,
    build_lr_schedule,
    learning_rate,
    read_stages,
    reconcile,
    weight_decay,
)

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD", "power")


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
        ("power", math.sqrt(10) / math.sqrt(60)),
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


def test_a_power_law_begins_where_it_is_told_and_falls_at_the_end():
    power = schedule("power", power=0.7, power_samples=40, wsd_decay_samples=20,
                     wsd_decay_style="linear")  # fmt: skip
    rates = [learning_rate(power, samples) for samples in (40, 60, 90, 100, 110)]
    last = (90 / 40) ** -0.7
    assert rates == pytest.approx([1.0, (60 / 40) ** -0.7, last, 0.1 + (last - 0.1) * 0.5, 0.1])


def test_stages_follow_each_other_and_survive_a_checkpoint():
    flags = ScheduleConfig(
        lr_decay_style="stages",
        lr_stages=("linear:5:1", "constant:10:1", "cosine:10:0.5", "minus_sqrt:4:0"),
    )
    built = build_lr_schedule(
        OptimizerConfig(lr=2.0), flags, BatchConfig(train_iters=40), BatchRamp(8)
    )
    rates = [learning_rate(built, 8 * step) for step in range(40)]
    assert rates[:5] == pytest.approx([0.0, 0.4, 0.8, 1.2, 1.6])
    assert rates[5:15] == [2.0] * 10
    assert rates[20] == pytest.approx(1.5)
    assert rates[26] == pytest.approx(1.0 * (1 - math.sqrt(0.25)))
    assert rates[29:] == [0.0] * 11
    saved = json.loads(json.dumps(asdict(built)))
    assert reconcile(saved, built, ScheduleConfig()) == built
    with pytest.raises(ValueError, match="stages"):
        reconcile(saved, replace(built, stages=built.stages[:2]), ScheduleConfig())


@pytest.mark.parametrize("text", ["linear:5", "wild:5:1", "linear:0:1", "linear:5:-1"])
def test_stages_that_cannot_be_read_are_refused(text):
    with pytest.raises(ValueError, match=f"--lr-stages {text} is not STYLE:STEPS:FACTOR"):
        read_stages((text,))


def test_batch_sizes_by_tokens_and_the_rate_that_follows_them():
    ramp = build_step_schedule("0:2 0.1K:4 160:8", 8, seq_length=10)
    sizes, consumed = [], 0
    for _ in range(9):
        sizes.append(ramp.size_at(consumed))
        consumed += sizes[-1]
    assert sizes == [2, 2, 2, 2, 2, 4, 4, 8, 8]
    assert ramp.sizes() == (2, 4, 8)
    assert [ramp.samples_before(step) for step in (1, 6, 8, 9)] == [0, 10, 18, 26]
    assert ramp.num_steps(26) == 8
    options = BatchConfig(step_batch_size_schedule="0:2 80:8", batch_size_lr_scaling="sqrt")
    assert batch_lr_factor(options, 2, 8) == 0.5
    assert batch_lr_factor(replace(options, batch_size_lr_scaling="linear"), 2, 8) == 0.25
    assert batch_lr_factor(BatchConfig(), 2, 8) == 1.0


@pytest.mark.parametrize(
    ("text", "final", "message"),
    [
        ("5:2 9:4", 4, "begin with 0:NUMBER"),
        ("0:2 11:4 15:4", 4, "let the tokens"),
        ("0:2 x:4", 4, "x:4 is not TOKENS:NUMBER"),
        ("0:2 1K:4", 8, "largest size must be --global-batch-size 8"),
    ],
)
def test_batch_sizes_that_do_not_fit_are_refused(text, final, message):
    with pytest.raises(ValueError, match=message):
        build_step_schedule(text, final, seq_length=10)


def test_lengths_by_tokens_end_with_whole_rows():
    text = "0:4 30:6 0.1K:10"
    lengths = [piece_length(text, 10, consumed) for consumed in (0, 2, 3, 9, 10)]
    assert lengths == [4, 4, 6, 6, 10]
    assert piece_length("", 10, 0) == 10
    with pytest.raises(
        ValueError, match="its last length, the longest, must be --seq-length 10"
    ):
        piece_length("0:4 30:6", 10, 0)


def test_pieces_of_rows_see_neither_each_other_nor_other_documents():
    batch = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]]),
        "cu_seqlens": torch.tensor([[0, 3, 8, 8], [0, 8, 8, 8]], dtype=torch.int32),
        "tokens": torch.zeros(2, 8),
    }
    cut = cut_rows(batch, 4)
    assert cut["cu_seqlens"][:, :5].tolist() == [[0, 3, 4, 8, 8], [0, 4, 8, 8, 8]]
    assert cut["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3] * 2]
    assert cut["tokens"] is batch["tokens"]
    assert cut_rows(batch, 8) is batch


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
    with pytest.raises(ValueError, match=rf"max_lr: 2.0 in the checkpoint, 1.0 here.*{rates}"):
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
        ({"style": "WSD"}, 50, "decay_style: WSD in the checkpoint, linear here"),
        ({"decay_samples": 220}, 50, "decay_samples: 220 in the checkpoint, 110 here"),
        ({"warmup_init_lr": 0.5}, 9, "warmup_init_lr: 0.5 in the checkpoint"),
        ({"warmup_samples": 20}, 50, "warmup_samples: 20 in the checkpoint, 10 here"),
        ({"end_weight_decay": 0.1}, 50, "end_weight_decay: 0.1 in the checkpoint, 0.0 here"),
    ],
)
def test_schedules_that_differ_from_here_on_are_refused(there, samples, told):
    with pytest.raises(ValueError, match=told):
        reconcile(asdict(schedule(**there)), schedule(), ScheduleConfig(), samples)
