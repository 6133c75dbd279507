"""The schedules against the papers' figures, and against the simulator for many sizes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.pipeline_parallel.actions import (
    Action,
    Kind,
    message_peer,
    with_messages,
)
from mcore_parallel.pipeline_parallel.config import V_SHAPED, PipelineConfig
from mcore_parallel.pipeline_parallel.schedule import (
    build_schedule,
    check_schedule,
    dualpipe_v,
    forward_only,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)
from mcore_parallel.pipeline_parallel.simulator import simulate


def computations(actions):
    return " ".join(str(a) for a in actions if not a.kind.is_message)


def test_1f1b_is_the_order_of_the_paper():
    first, second, third, last = one_f_one_b(4, 5)
    assert computations(first) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert computations(second) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert computations(third) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert computations(last) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


def test_one_rank_has_no_messages():
    (actions,) = one_f_one_b(1, 3)
    assert " ".join(map(str, actions)) == "F0 B0 F1 B1 F2 B2"


def test_neighbours_that_exchange_both_ways_post_both_messages_together():
    first, last = one_f_one_b(2, 3)
    assert " ".join(map(str, first)) == "F0 SF0 F1 SF1 RB0 B0 F2 SF2 RB1 B1 RB2 B2"
    assert " ".join(map(str, last)) == "RF0 F0 RF1 B0 SB0 F1 B1 RF2 SB1 F2 B2 SB2"


@pytest.mark.parametrize(
    ("num_microbatches", "group", "expected"),
    [
        (5, 3, "F0 F1 F2 F0.1 F1.1 F2.1 F3 F4 F3.1 F4.1"),
        (4, 2, "F0 F1 F0.1 F1.1 F2 F3 F2.1 F3.1"),
    ],
)
def test_interleaved_passes_groups_of_microbatches_through_the_chunks(
    num_microbatches, group, expected
):
    # The orders were read off a run of Megatron-LM of August 2026.
    for actions in interleaved(2, num_microbatches, 2, group):
        forwards = [a for a in actions if a.kind is Kind.FORWARD]
        assert " ".join(map(str, forwards)) == expected
        backwards = [a for a in actions if a.kind is Kind.BACKWARD]
        assert [(a.microbatch, 1 - a.chunk) for a in backwards] == [
            (a.microbatch, a.chunk) for a in forwards
        ]


@pytest.mark.parametrize(("rank", "warmup"), [(0, 10), (1, 8), (2, 6), (3, 4)])
def test_interleaved_warms_up_two_forwards_more_for_each_rank_before_the_last(rank, warmup):
    kinds = [a.kind for a in interleaved(4, 8, 2)[rank] if not a.kind.is_message]
    assert kinds.index(Kind.BACKWARD) == warmup + 1


def test_zero_bubble_h1_runs_weight_halves_behind_by_the_rank():
    first, second, third = zero_bubble_h1(3, 4)
    assert computations(first) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert computations(second) == "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
    assert computations(third) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


@settings(max_examples=12, deadline=None)
@given(pp=st.integers(1, 8), num_microbatches=st.integers(1, 20))
def test_1f1b_has_the_bubble_and_the_memory_of_theory(pp, num_microbatches):
    found = simulate(one_f_one_b(pp, num_microbatches), num_microbatches=num_microbatches)
    assert found.bubble_fraction == pytest.approx((pp - 1) / num_microbatches)
    assert found.peak_activations == [min(pp - r, num_microbatches) for r in range(pp)]


@settings(max_examples=12, deadline=None)
@given(pp=st.integers(2, 4), groups=st.integers(1, 3), vpp=st.integers(1, 3))
def test_interleaving_divides_the_bubble_and_holds_a_warm_up_more(pp, groups, vpp):
    num_microbatches = groups * pp
    found = simulate(
        interleaved(pp, num_microbatches, vpp),
        num_microbatches=num_microbatches,
        num_chunks=vpp,
    )
    assert found.bubble_fraction == pytest.approx((pp - 1) / (num_microbatches * vpp))
    warmup = [2 * (pp - rank - 1) + (vpp - 1) * pp for rank in range(pp)]
    assert found.peak_activations == [min(n + 1, num_microbatches * vpp) for n in warmup]


def refusal(function, *arguments):
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return ""


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["", "1f1b", "zb-h1", *V_SHAPED]),
    pp=st.integers(1, 5),
    vpp=st.integers(1, 3),
    group=st.integers(0, 7),
    num_microbatches=st.integers(1, 15),
    paired=st.booleans(),
)
def test_checking_refuses_what_building_refuses(name, pp, vpp, group, num_microbatches, paired):
    config = PipelineConfig(
        pipeline_schedule=name,
        overlap_moe_expert_parallel_comm=paired and not name.startswith("zb"),
        num_virtual_stages_per_pipeline_rank=1 if name else vpp,
        microbatch_group_size_per_virtual_pipeline_stage=0 if name or vpp == 1 else group,
    )
    case = config, pp, num_microbatches
    assert refusal(check_schedule, *case) == refusal(build_schedule, *case)


@settings(max_examples=12, deadline=None)
@given(
    pp=st.integers(2, 4),
    vpp=st.integers(2, 3),
    wider=st.integers(0, 3),
    groups=st.integers(1, 2),
    rest=st.integers(0, 5),
)
def test_interleaved_schedules_of_any_group_size_are_sound(pp, vpp, wider, groups, rest):
    group = pp + wider
    num_microbatches = groups * group + (rest if pp <= rest < group else 0)
    schedule = interleaved(pp, num_microbatches, vpp, group)
    simulate(schedule, num_microbatches=num_microbatches, num_chunks=vpp)


@settings(max_examples=12, deadline=None)
@given(pp=st.integers(1, 6), more=st.integers(0, 6))
def test_zero_bubble_h1_keeps_a_third_of_the_bubble_and_the_memory_of_1f1b(pp, more):
    num_microbatches = 2 * pp + more
    found = simulate(zero_bubble_h1(pp, num_microbatches), num_microbatches=num_microbatches)
    assert found.bubble_fraction == pytest.approx((pp - 1) / (3 * num_microbatches))
    assert found.peak_activations == [pp] * pp


@settings(max_examples=8, deadline=None)
@given(pp=st.integers(1, 6), num_microbatches=st.integers(1, 5))
def test_zero_bubble_h1_is_sound_with_few_microbatches(pp, num_microbatches):
    simulate(zero_bubble_h1(pp, num_microbatches), num_microbatches=num_microbatches)


def test_zero_bubble_v_is_the_order_of_the_paper():
    first, last = zero_bubble_v(2, 4)
    assert computations(first) == (
        "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 F3 I0 W0 F2.1 I2.1 W2.1 I1 W1 F3.1 I3.1 W3.1 "
        "I2 W2 I3 W3"
    )
    assert computations(last) == (
        "F0 F0.1 F1 F1.1 I0.1 W0.1 F2 I0 W0 F2.1 I1.1 W1.1 F3 I1 W1 F3.1 I2.1 W2.1 I2 I3.1 "
        "I3 W2 W3.1 W3"
    )
    # At the turn a chunk hands over to the other without a message.
    messages = {str(a) for a in last if a.kind.is_message and a.microbatch == 0}
    assert messages == {"RF0", "SF0.1", "RB0.1", "SB0"}


def test_dualpipe_v_puts_whole_backwards_beside_forwards_and_halves_at_both_ends():
    first, last = dualpipe_v(2, 5)
    assert computations(first) == (
        "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 F3 B1.1 F2.1 B0 F4 B2.1 F3.1 B1 B3.1 F4.1 B2 B4.1 I3 "
        "W3 I4 W4"
    )
    assert computations(last) == (
        "F0 F0.1 F1 F1.1 F2 B0.1 F2.1 B0 F3 B1.1 F3.1 B1 F4 B2.1 F4.1 B2 B3.1 B3 I4.1 I4 "
        "W4.1 W4"
    )


@settings(max_examples=12, deadline=None)
@given(pp=st.integers(2, 6), more=st.integers(0, 6), name=st.sampled_from(V_SHAPED))
def test_schedules_in_a_v_wait_only_for_their_first_input_and_fill_all_ranks_alike(
    pp, more, name
):
    num_microbatches = 2 * pp + more
    schedule = build_schedule(PipelineConfig(pipeline_schedule=name), pp, num_microbatches)
    found = simulate(schedule, num_microbatches=num_microbatches, num_chunks=2, v_shaped=True)
    # A chunk's forward takes one unit: each rank has 6 a micro-batch to do.
    assert found.makespan == 6 * num_microbatches + pp - 1
    # No rank is idle between its first and last action under zb-v.
    busy = [rank[-1].end - rank[0].start for rank in found.spans]
    assert name != "zb-v" or max(busy) == 6 * num_microbatches
    assert found.peak_activations == [2 * pp + (name == "dualpipev")] * pp


@settings(max_examples=8, deadline=None)
@given(pp=st.integers(2, 6), num_microbatches=st.integers(1, 9))
def test_zero_bubble_v_is_sound_with_few_microbatches(pp, num_microbatches):
    schedule = zero_bubble_v(pp, num_microbatches)
    simulate(schedule, num_microbatches=num_microbatches, num_chunks=2, v_shaped=True)


def messages_meet_one_by_one(schedule, v_shaped=False):
    """Whether every message is met where each rank waits for one before it posts the next."""
    pp = len(schedule)
    left = [[a for a in reversed(actions) if a.kind.is_message] for actions in schedule]
    other = {
        Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD,
        Kind.RECEIVE_FORWARD: Kind.SEND_FORWARD,
        Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD,
        Kind.RECEIVE_BACKWARD: Kind.SEND_BACKWARD,
    }
    met = True
    while met:
        met = False
        for rank, actions in enumerate(left):
            if not actions:
                continue
            peer = message_peer(actions[-1], rank, pp, v_shaped)
            theirs = left[peer][-1] if left[peer] else None
            if theirs is not None and (theirs.kind, theirs.microbatch) == (
                other[actions[-1].kind],
                actions[-1].microbatch,
            ):
                actions.pop()
                left[peer].pop()
                met = True
    return not any(left)


@settings(max_examples=12, deadline=None)
@given(
    pp=st.integers(2, 5),
    groups=st.integers(1, 3),
    vpp=st.integers(1, 3),
    build=st.sampled_from(["1f1b", "interleaved", "zb-h1", "forward only", *V_SHAPED]),
)
def test_messages_may_be_posted_one_by_one(pp, groups, vpp, build):
    schedule = {
        "1f1b": lambda: one_f_one_b(pp, groups * pp),
        "interleaved": lambda: interleaved(pp, groups * pp, vpp),
        "zb-h1": lambda: zero_bubble_h1(pp, groups * pp),
        "forward only": lambda: forward_only(pp, groups * pp, vpp),
        "zb-v": lambda: zero_bubble_v(pp, groups * pp),
        "dualpipev": lambda: dualpipe_v(pp, (groups + 1) * pp),
    }[build]()
    assert messages_meet_one_by_one(schedule, build in V_SHAPED)


def test_messages_that_cross_cannot_be_posted_one_by_one():
    first, last = one_f_one_b(2, 3)
    sends_first = [*first[:3], first[4], first[3], *first[5:]]
    assert not messages_meet_one_by_one([sends_first, last])


@settings(max_examples=8, deadline=None)
@given(
    pp=st.integers(2, 5),
    num_microbatches=st.integers(1, 9),
    vpp=st.integers(1, 3),
    v_shaped=st.booleans(),
)
def test_forward_only_schedules_are_sound(pp, num_microbatches, vpp, v_shaped):
    schedule = forward_only(pp, num_microbatches, vpp, v_shaped)
    places = {"num_chunks": vpp, "v_shaped": v_shaped}
    found = simulate(schedule, num_microbatches=num_microbatches, **places)
    assert found.peak_activations == [0] * pp


def test_the_config_names_the_schedule():
    assert build_schedule(PipelineConfig(), 2, 4) == one_f_one_b(2, 4)
    chunks = PipelineConfig(num_virtual_stages_per_pipeline_rank=2)
    assert build_schedule(chunks, 2, 4) == interleaved(2, 4, 2)
    for name, build in (
        ("zb-h1", zero_bubble_h1),
        ("zb-v", zero_bubble_v),
        ("dualpipev", dualpipe_v),
    ):
        assert build_schedule(PipelineConfig(pipeline_schedule=name), 2, 4) == build(2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 8, 2, 3), "group-size-per-virtual-pipeline-stage 3 must be at least"),
        ((4, 3, 2), "3 micro-batches in groups of 4 leave a group of 3"),
        ((4, 9, 2, 6), "leave a group of 3"),
        ((1, 4, 2), "needs --pipeline-model-parallel-size 2"),
    ],
)
def test_interleaving_refuses_what_cannot_fill_the_pipeline(arguments, message):
    with pytest.raises(ValueError, match=message):
        interleaved(*arguments)


def test_orders_that_wait_for_each_other_are_refused():
    first = [Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0), Action(Kind.FORWARD, 1)]
    last = [Action(Kind.FORWARD, 1), Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0)]
    with pytest.raises(ValueError, match="rank 0 at B0, rank 1 at F1"):
        with_messages([first, last])


def test_pairs_warm_up_one_forward_more_and_hide_what_they_are_said_to():
    beside = {"overlap_moe_expert_parallel_comm": True}
    (alone,) = build_schedule(PipelineConfig(**beside), 1, 3)
    assert computations(alone) == "F0 F1& B0 F2& B1 B2"
    first, last = build_schedule(PipelineConfig(**beside), 2, 5)
    assert computations(first) == "F0 F1 F2 F3& B0 F4& B1 B2 B3 B4"
    assert computations(last) == "F0 F1& B0 F2& B1 F3& B2 F4& B3 B4"
    found = simulate([first, last], num_microbatches=5, hidden_share=0.5)
    assert found.makespan == 12.5
    assert found.peak_activations == [4, 2]


@settings(max_examples=12, deadline=None)
@given(
    pp=st.integers(1, 4),
    groups=st.integers(2, 3),
    vpp=st.integers(1, 3),
    name=st.sampled_from(["1f1b", "interleaved", "dualpipev"]),
)
def test_schedules_in_pairs_are_sound_and_take_no_longer_where_nothing_is_hidden(
    pp, groups, vpp, name
):
    pp += name != "1f1b" and pp == 1
    config = PipelineConfig(
        pipeline_schedule=name,
        num_virtual_stages_per_pipeline_rank=vpp if name == "interleaved" else 1,
        overlap_moe_expert_parallel_comm=True,
    )
    count = groups * pp
    chunks = {"num_chunks": config.num_chunks, "v_shaped": config.v_shaped}
    schedule = build_schedule(config, pp, count)
    assert messages_meet_one_by_one(schedule, config.v_shaped)
    found = simulate(schedule, num_microbatches=count, **chunks)
    plain = build_schedule(replace(config, overlap_moe_expert_parallel_comm=False), pp, count)
    one_by_one = simulate(plain, num_microbatches=count, **chunks)
    # A pair ends as a whole: what another rank waits for may come a forward later.
    assert found.makespan <= one_by_one.makespan + 2 * pp
    hiding = simulate(schedule, num_microbatches=count, hidden_share=0.3, **chunks)
    assert hiding.makespan < found.makespan
