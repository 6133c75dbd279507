import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.datasets.arrangement import SampleOptions
from mcore_data.datasets.blending import (
    BlendedDataset,
    blend_all,
    blend_by_weight,
    draw_slowly,
    normalize_weights,
)
from mcore_data.datasets.epochs import EpochsDataset
from mcore_data.datasets.mock import MockGPTDataset


# Vectors produced by megatron-core 0.16.
@pytest.mark.parametrize(
    ("weights", "size", "datasets", "samples"),
    [
        (
            [0.5, 0.25, 0.25],
            12,
            [0, 1, 2, 0, 0, 1, 2, 0, 0, 1, 2, 0],
            [0, 0, 0, 1, 2, 1, 1, 3, 4, 2, 2, 5],
        ),
        ([0.7, 0.3], 10, [0, 1, 0, 0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 2, 1, 3, 4, 2, 5, 6]),
    ],
)
def test_order_equals_the_reference_vectors(weights, size, datasets, samples):
    dataset_index, sample_index = blend_by_weight(weights, size)
    assert dataset_index.tolist() == datasets
    assert sample_index.tolist() == samples
    assert (dataset_index.dtype, sample_index.dtype) == (np.int16, np.int64)


def test_using_all_equals_the_reference_vector():
    dataset_index, sample_index = blend_all([3, 2, 1])
    assert dataset_index.tolist() == [0, 1, 2, 0, 1, 0]
    assert sample_index.tolist() == [0, 0, 0, 1, 1, 2]


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=6), size=st.integers(1, 300))
def test_no_dataset_strays_from_its_share_and_each_gives_in_order(weights, size):
    dataset_index, sample_index = blend_by_weight(weights, size)
    share = np.array(weights) / np.sum(weights)
    for d in range(len(weights)):
        mine = sample_index[dataset_index == d]
        assert mine.tolist() == list(range(len(mine)))
        assert abs(len(mine) - share[d] * size) <= len(weights)


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(
        st.sampled_from([0, 0.001, 0.1, 0.25, 1 / 3, 0.7, 2, 5]), min_size=1, max_size=9
    ).filter(any),
    size=st.integers(1, 2500),
)
def test_drawing_many_stretches_at_once_equals_the_rule_step_by_step(weights, size):
    shares = normalize_weights(weights)
    dataset_index, _ = blend_by_weight(weights, size)
    assert np.array_equal(dataset_index, draw_slowly(shares, size))
    assert (shares[dataset_index] > 0).all()


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 400), min_size=1, max_size=6).filter(sum))
def test_using_all_equals_the_rule_with_used_up_datasets_retired(sizes):
    dataset_index, sample_index = blend_all(sizes)
    counts = np.array(sizes)
    slow = draw_slowly(normalize_weights(sizes), sum(sizes), counts)
    assert np.array_equal(dataset_index, slow)
    for d in range(len(sizes)):
        assert sample_index[dataset_index == d].tolist() == list(range(sizes[d]))


def test_samples_say_where_they_come_from():
    parts = [MockGPTDataset(8, vocab_size=v, num_samples=20) for v in (50, 60)]
    blend = BlendedDataset(parts, [3, 1], 20)
    assert len(blend) == 20
    for k in range(20):
        number = int(blend.dataset_index[k])
        sample = blend[k]
        assert sample["dataset_id"] == number
        expected = parts[number][int(blend.sample_index[k])]["tokens"]
        assert np.array_equal(sample["tokens"], expected)
    assert blend[None]["loss_mask"].sum() == 0


@pytest.mark.parametrize("other", [{}, {"eod_mask_loss": True}], ids=["in place", "copied"])
def test_a_batch_is_its_samples_one_by_one(other):
    datasets = [
        MockGPTDataset(
            8,
            vocab_size=9,
            seed=seed,
            num_samples=30,
            options=SampleOptions(inter_document_masking=True, **options),
        )
        for seed, options in enumerate([other, {}, {}])
    ]
    epochs = EpochsDataset(lambda number: datasets[1 + number % 2], 60)
    blend = BlendedDataset([datasets[0], epochs], [1, 2], 60)
    places = [59, 0, 7, *range(30, 56)]
    batch = blend.batch(places)
    for key, values in batch.items():
        assert np.array_equal(values, np.stack([blend[place][key] for place in places]))
    assert np.shares_memory(batch["tokens"], batch["labels"]) == (not other)


def test_a_dataset_that_is_too_short_is_named():
    parts = [MockGPTDataset(8, num_samples=5), MockGPTDataset(8, num_samples=50)]
    with pytest.raises(ValueError, match=r"10 samples from dataset 0, which has 5"):
        BlendedDataset(parts, [1, 1], 20)


@pytest.mark.parametrize("weights", [[], [-1, 2], [0, 0], [float("nan")]])
def test_weights_that_make_no_shares_are_refused(weights):
    with pytest.raises(ValueError, match="blend"):
        blend_by_weight(weights, 3)
