import pytest

from mcore_train.composition import compose
from mcore_train.reporting.alarms import find_alarms
from mcore_train.reporting.waterfall import AXES, PARTS, Waterfall
from mcore_train.resolution import resolve

H100 = "NVIDIA H100 80GB HBM3"
LLAMA = {
    "num_layers": 8,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 128256,
    "seq_length": 4096,
    "global_batch_size": 16,
    "train_iters": 10,
    "lr": 1e-4,
    "bf16": True,
    "mock_data": True,
}


def plan_of(world_size=4, **changes):
    return resolve(compose({**LLAMA, **changes}), world_size)


def fall(noise=0.0, num_noises=9, slow_rank=-1, **shares):
    parts = dict.fromkeys((*PARTS, *(f"exposed_{axis}" for axis in AXES)), 0.0) | shares
    parts["compute"] = 1 - sum(shares.values())
    return Waterfall(
        iteration=9,
        parts=parts,
        step_s=1.0,
        slow_rank=slow_rank,
        slow_ratio=1.5,
        gradient_noise=noise,
        num_noises=num_noises,
    )


@pytest.mark.parametrize(
    ("name", "well", "crossed"),
    [
        ("communication", fall(exposed_dp=0.29), fall(exposed_dp=0.31)),
        ("utilisation", fall(host=0.19), fall(host=0.21)),
        ("gradient noise", fall(noise=0.9), fall(noise=1.1)),
    ],
)
def test_a_bound_that_is_crossed_gives_one_alarm(name, well, crossed):
    assert find_alarms(plan_of(), well, 0.45) == []
    (alarm,) = find_alarms(plan_of(), crossed, 0.45)
    assert alarm.name == name
    assert alarm.gain


def test_a_step_paced_by_the_host_gains_no_more_than_the_peak_allows():
    (alarm,) = find_alarms(plan_of(), fall(host=0.999), 0.2, "NVIDIA Unknown")
    assert alarm.seen == "devices have work ahead for 0 % of a step; 100 % is paced by the host"
    assert alarm.gain == "at most +400 % tokens/s"


def test_waits_for_a_slow_rank_are_no_alarm_about_communication():
    assert find_alarms(plan_of(), fall(exposed_dp=0.4, slow_rank=2), 0.45) == []


def test_the_mfu_has_a_bound_where_the_peak_is_known():
    assert find_alarms(plan_of(), fall(), 0.0) == []
    assert find_alarms(plan_of(), fall(), 0.41) == []
    found = find_alarms(plan_of(), fall(), 0.39, H100)
    assert [(alarm.name, alarm.seen) for alarm in found] == [("MFU", "39 % of the peak")]
    assert found[0].gain.startswith("predicted +")


def test_the_flag_is_the_one_that_the_planner_predicts_to_gain_most():
    (alarm,) = find_alarms(plan_of(), fall(exposed_dp=0.4), 0.45, H100)
    assert alarm.flag == "--overlap-grad-reduce"
    assert alarm.gain.startswith("predicted +")
    # On a device without constants the first is named, and all that it can gain.
    (alarm,) = find_alarms(plan_of(), fall(exposed_dp=0.4), 0.45)
    assert (alarm.flag, alarm.gain) == ("--overlap-grad-reduce", "at most +67 % tokens/s")


@pytest.mark.parametrize(
    ("part", "changes", "flag"),
    [
        ("data", {}, "--num-workers 4"),
        ("checkpoint", {"save": "run", "save_interval": 5}, "--async-save"),
        ("host", {}, "--cuda-graph-impl full_iteration"),
        ("bubble", {"pipeline_model_parallel_size": 2}, "--pipeline-schedule zb-h1"),
        ("exposed_tp", {"tensor_model_parallel_size": 2}, "--sequence-parallel"),
        ("exposed_dp", {"overlap_grad_reduce": True}, "--grad-reduce-in-bf16"),
        ("exposed_cp", {"context_parallel_size": 2}, "--cp-comm-type a2a"),
    ],
)
def test_each_part_has_its_flag(part, changes, flag):
    (alarm,) = find_alarms(plan_of(**changes), fall(**{part: 0.5}), 0.45, "NVIDIA Unknown")
    assert alarm.flag.startswith(flag)
    assert alarm.gain == "at most +100 % tokens/s"


def test_an_alarm_about_noise_waits_for_some_measurements():
    assert find_alarms(plan_of(), fall(noise=3.0, num_noises=4), 0.45) == []
    (alarm,) = find_alarms(plan_of(), fall(noise=float("inf")), 0.45)
    assert alarm.flag == "--global-batch-size 64"
