"""The checker: wrong schedules are refused, whatever is wrong with them."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.pipeline_parallel.actions import Action, Kind, with_messages
from mcore_parallel.pipeline_parallel.schedule import (
    dualpipe_v,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)
from mcore_parallel.pipeline_parallel.simulator import simulate

SCHEDULES = {
    "1f1b": (one_f_one_b(3, 4), 4, 1),
    "interleaved": (interleaved(2, 4, 2), 4, 2),
    "zb-h1": (zero_bubble_h1(3, 4), 4, 1),
    "dualpipev": (dualpipe_v(2, 4), 4, 2, True),
}
each_schedule = pytest.mark.parametrize(
    ("schedule", "places"),
    [(first, rest) for first, *rest in SCHEDULES.values()],
    ids=SCHEDULES.keys(),
)


def mutant(schedule, rank, actions):
    return [actions if r == rank else list(a) for r, a in enumerate(schedule)]


def refused(schedule, num_microbatches, num_chunks, v_shaped=False, match="rank"):
    options = {"num_microbatches": num_microbatches, "num_chunks": num_chunks}
    with pytest.raises(ValueError, match=match):
        simulate(schedule, **options, v_shaped=v_shaped)


@each_schedule
def test_a_dropped_action_is_refused(schedule, places):
    for rank, actions in enumerate(schedule):
        for i in range(len(actions)):
            wrong = mutant(schedule, rank, actions[:i] + actions[i + 1 :])
            refused(wrong, *places, match="never does")


@each_schedule
def test_a_doubled_action_is_refused(schedule, places):
    for rank, actions in enumerate(schedule):
        for i in range(len(actions)):
            wrong = mutant(schedule, rank, actions[: i + 1] + actions[i:])
            refused(wrong, *places, match="2 times")


@each_schedule
def test_an_action_swapped_with_what_it_needs_is_refused(schedule, places):
    num_refused = 0
    for rank, actions in enumerate(schedule):
        for i, j in combinations(range(len(actions)), 2):
            first, second = actions[i], actions[j]
            same = (first.microbatch, first.chunk) == (second.microbatch, second.chunk)
            # What follows a send does not need it.
            if same and first.kind not in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                swapped = list(actions)
                swapped[i], swapped[j] = second, first
                num_refused += 1
                refused(mutant(schedule, rank, swapped), *places)
    assert num_refused > 10


@each_schedule
def test_messages_of_two_microbatches_swapped_at_one_end_are_refused(schedule, places):
    # Each tensor has the right shape, so nothing but the order tells them apart.
    for rank, actions in enumerate(schedule):
        for kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
            at = [i for i, a in enumerate(actions) if a.kind is kind]
            for i, j in pairwise(at):
                swapped = list(actions)
                swapped[i], swapped[j] = actions[j], actions[i]
                refused(mutant(schedule, rank, swapped), *places)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_schedule_with_an_action_lost_doubled_moved_or_too_early_is_refused(data):
    pp, vpp = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 3))
    num_microbatches = pp * data.draw(st.integers(1, 3))
    schedule, num_chunks = data.draw(
        st.sampled_from(
            [
                (one_f_one_b(pp, num_microbatches), 1),
                (zero_bubble_h1(pp, num_microbatches), 1),
                (interleaved(pp, num_microbatches, vpp), vpp),
                (zero_bubble_v(pp, num_microbatches), 2),
            ]
        )
    )
    kind = {action.kind for action in schedule[0]}
    places = num_microbatches, num_chunks, num_chunks == 2 and Kind.BACKWARD_INPUT in kind
    names = ("num_microbatches", "num_chunks", "v_shaped")
    simulate(schedule, **dict(zip(names, places, strict=True)))
    rank = data.draw(st.integers(0, pp - 1))
    place = data.draw(st.integers(0, len(schedule[rank]) - 1))
    wrong = [list(actions) for actions in schedule]
    action = wrong[rank].pop(place)
    how = data.draw(st.sampled_from(["lost", "doubled", "moved", "too early"]))
    if how == "doubled":
        wrong[rank] += [action, action]
    elif how == "moved":
        wrong[(rank + 1) % pp].insert(0, action)
    elif how == "too early":
        # Before everything: only what waits for nothing may stand there.
        if action.kind in (Kind.FORWARD, Kind.RECEIVE_FORWARD):
            return
        wrong[rank].insert(0, action)
        if action.kind is Kind.RECEIVE_BACKWARD:
            refused(wrong, *places, match="deadlock|is expected")
            return
    refused(wrong, *places)


def test_an_action_that_is_not_the_ranks_task_is_refused():
    first, last = one_f_one_b(2, 2)
    refused(
        [[*first, Action(Kind.FORWARD, 2)], last], 2, 1, match="rank 0 does F2, which is not"
    )


def test_a_microbatch_that_no_rank_runs_is_refused():
    refused(one_f_one_b(2, 2), 3, 1, match="never does")


def read(text):
    return [Action(Kind(word[:-1]), int(word[-1])) for word in text.split()]


def test_ranks_that_wait_in_a_circle_are_refused():
    # Each rank first sends and only then, after some work, receives what the other sends.
    first = read("F0 SF0 F1 SF1 F2 RB0 I0 W0 SF2 RB1 I1 W1 RB2 I2 W2")
    last = read("RF0 F0 I0 SB0 W0 RF1 F1 I1 SB1 W1 RF2 F2 I2 SB2 W2")
    refused([first, last], 3, 1, match="deadlock: rank 0 in SF1; rank 1 in SB0")


def test_messages_in_one_batch_do_not_wait_for_each_other():
    first = read("F0 SF0 F1 SF1 RB0 I0 W0 F2 SF2 RB1 I1 W1 RB2 I2 W2")
    last = read("RF0 F0 I0 SB0 RF1 W0 F1 I1 SB1 RF2 W1 F2 I2 SB2 W2")
    simulate([first, last], num_microbatches=3)


def test_longer_backwards_are_timed():
    found = simulate(
        one_f_one_b(2, 3),
        num_microbatches=3,
        durations={Kind.FORWARD: 1.0, Kind.BACKWARD: 3.0},
    )
    assert found.makespan == 3 * 4.0 + 4.0
    assert found.bubble_fraction == pytest.approx(1 / 3)


def test_stages_may_take_unequal_times():
    # The second rank is twice as slow, so it is never idle once its first input has come.
    simulation = simulate(
        one_f_one_b(2, 4),
        num_microbatches=4,
        durations=lambda rank, action: float(rank + 1),
    )
    assert simulation.makespan == 1 + 4 * (2 + 2) + 1


def test_pairs_of_one_micro_batch_are_refused():
    pair = [Action(Kind.FORWARD, 0, is_paired=True), Action(Kind.BACKWARD, 0)]
    refused([pair], 1, 1, match="rank 0 does B0 before its F")
    with pytest.raises(ValueError, match="wait for each other"):
        with_messages([pair])
    lonely = [Action(Kind.FORWARD, 0, is_paired=True), Action(Kind.FORWARD, 1)]
    refused([lonely], 2, 1, match="pairs F0& with F1, no backward")
