from itertools import islice

import pytest

from mcore_data.loading.sampler import CyclicSampler, FullSampler, SingleSampler


def stream(kind, dp_size, consumed, steps, num_samples=50):
    """Global order of samples of some steps: all ranks of a block, one after the other."""
    ranks = [
        iter(
            kind(
                num_samples=num_samples,
                micro_batch_size=2,
                dp_rank=rank,
                dp_size=dp_size,
                consumed_samples=consumed,
            )
        )
        for rank in range(dp_size)
    ]
    return [index for _ in range(steps) for rank in ranks for index in next(rank)]


def test_single_cuts_each_block_among_the_ranks_and_drops_the_rest():
    sampler = SingleSampler(num_samples=11, micro_batch_size=2, dp_rank=1, dp_size=2)
    assert list(sampler) == [[2, 3], [6, 7]]
    assert len(sampler) == 2


@pytest.mark.parametrize("kind", [SingleSampler, CyclicSampler])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_a_run_continues_exactly_under_another_number_of_ranks(kind, dp_size):
    whole = stream(kind, 1, 0, 24)
    first = stream(kind, 2, 0, 3)
    assert first == whole[:12]
    assert stream(kind, dp_size, 12, 12 // dp_size) == whole[12 : 12 + 24 // dp_size * dp_size]


def test_cyclic_permutes_each_epoch_anew_and_steps_over_borders():
    order = list(
        islice(
            (i for batch in CyclicSampler(num_samples=7, micro_batch_size=3) for i in batch), 21
        )
    )
    epochs = [order[0:7], order[7:14], order[14:21]]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_full_gives_every_sample_once_and_fillers_at_the_end():
    ranks = [list(FullSampler(num_samples=5, dp_rank=r, dp_size=2)) for r in range(2)]
    assert ranks == [[[0], [2], [4]], [[1], [3], [None]]]
    assert len(FullSampler(num_samples=5, dp_rank=1, dp_size=2)) == 3
    pairs = {"num_samples": 5, "micro_batch_size": 2, "dp_size": 2}
    ranks = [list(FullSampler(**pairs, dp_rank=r)) for r in range(2)]
    assert ranks == [[[0, 1], [4, None]], [[2, 3], [None, None]]]
    assert len(FullSampler(**pairs)) == 2
    with pytest.raises(ValueError, match="are not valid"):
        FullSampler(**pairs, dp_rank=2)


def test_nothing_left_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match="nothing is left"):
        SingleSampler(num_samples=8, micro_batch_size=1, consumed_samples=8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_samples": 0},
        {"micro_batch_size": 0},
        {"dp_rank": 2},
        {"consumed_samples": -1},
    ],
)
def test_senseless_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match=r"no samples|are not valid|is negative"):
        CyclicSampler(**{"num_samples": 8, "micro_batch_size": 1, "dp_size": 2, **wrong})
