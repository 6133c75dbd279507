import pytest

from mcore_data.tracing.data_plan import BatchSizePhase
from mcore_train.batches.batch_ramp import BatchRamp, build_ramp


def test_without_a_ramp_the_size_is_one():
    ramp = build_ramp((), 8)
    assert ramp.sizes() == (8,)
    assert ramp.size_at(0) == ramp.size_at(10**9) == 8
    assert ramp.num_steps(20) == 2
    assert ramp.samples_before(3) == 16


def test_the_size_grows_by_equal_increments_over_the_samples():
    ramp = build_ramp((2, 2, 30), 8)  # three increments, each after 10 samples
    sizes, consumed = [], 0
    for _ in range(12):
        sizes.append(ramp.size_at(consumed))
        consumed += sizes[-1]
    assert sizes == [2, 2, 2, 2, 2, 4, 4, 4, 6, 6, 8, 8]
    assert ramp.sizes() == (2, 4, 6, 8)


PHASES = [BatchSizePhase(1, 0, 3), BatchSizePhase(5, 12, 5)]  # of seven steps, 27 sequences


@pytest.mark.parametrize(
    "ramp",
    [
        BatchRamp(8),
        build_ramp((2, 2, 30), 8),
        build_ramp((8, 2, 30), 8),
        BatchRamp(8).continue_after(PHASES, 7),
        build_ramp((2, 2, 60), 8).continue_after(PHASES, 7),
    ],
)
def test_counting_steps_and_samples_agrees_with_walking(ramp):
    consumed = 0
    for step in range(1, 40):
        assert ramp.samples_before(step) == consumed
        assert ramp.num_steps(consumed) == step - 1
        consumed += ramp.size_at(consumed)
        assert ramp.num_steps(consumed - 1) == step - 1


def test_batch_sizes_of_before_stand_in_front_of_a_ramp_that_has_others():
    ramp = build_ramp((2, 2, 30), 8)
    continued = ramp.continue_after(PHASES, 7)
    assert continued.past == ((4, 3), (3, 5))
    assert continued.samples_before(8) == 27
    assert continued.size_at(27) == ramp.size_at(27)
    own = [BatchSizePhase(1, 0, 2), BatchSizePhase(6, 10, 4)]
    assert ramp.continue_after(own, 7) is ramp  # its own past changes nothing
    assert ramp.continue_after([], 7) is ramp.continue_after(PHASES[1:], 7) is ramp


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((9, 1, 30), "give a first size from 1"),
        ((2, 0, 30), "an increment"),
        ((3, 2, 30), "8 - 3 must be a multiple of 2"),
    ],
)
def test_a_ramp_that_does_not_end_at_the_batch_size_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        build_ramp(words, 8)
