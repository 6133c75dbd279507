"""Sample order is megatron-core's: its own index builders on the same lengths, bit for bit."""

import warnings
from itertools import pairwise

import numpy as np
import pytest

from mcore_data.datasets.blending import blend_all, blend_by_weight
from mcore_data.datasets.sample_index import SampleIndexSpec, build_sample_index

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def theirs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what megatron-core misses here
        return pytest.importorskip("megatron.core.datasets.helpers_cpp")


@pytest.mark.parametrize(
    ("num_samples", "num_epochs", "separate"),
    [(0, 1, False), (700, 1, False), (1500, 2, True), (2700, 3, False)],
)
@pytest.mark.parametrize("drop", [True, False])
def test_gpt_order_is_theirs(theirs, num_samples, num_epochs, separate, drop):
    lengths = np.random.default_rng(0).integers(1, 200, 900).astype(np.int32)
    L = 97
    spec = SampleIndexSpec(
        sequence_length=L, num_samples=num_samples, seed=1234, drop_last_partial=drop
    )
    ours = build_sample_index(lengths, range(len(lengths)), spec)
    random = np.random.RandomState(1234)
    documents = np.arange(len(lengths), dtype=np.int32)
    if separate:
        parts = [np.tile(documents, num_epochs - 1), documents.copy()]
    else:
        parts = [np.tile(documents, num_epochs)]
    for part in parts:
        random.shuffle(part)
    documents = np.concatenate(parts)
    assert np.array_equal(ours.documents, documents)
    per_epoch = int(lengths.sum())
    rows = theirs.build_sample_idx_int32(lengths, documents, L, num_epochs, per_epoch, drop, 1)
    assert np.array_equal(ours.samples, rows)
    before = ((num_epochs - 1) * per_epoch - 1) // L
    borders = [0, before, len(rows) - 1] if separate else [0, len(rows) - 1]
    shuffled = [np.arange(a, b) for a, b in pairwise(borders)]
    for part in shuffled:
        random.shuffle(part)
    assert np.array_equal(ours.shuffle, np.concatenate(shuffled))


@pytest.mark.parametrize("seed", range(12))
def test_blends_are_theirs(theirs, seed):
    random = np.random.default_rng(seed)
    weights = random.random(random.integers(1, 30)) ** random.integers(1, 5) + 1e-9
    size = 20_000
    dataset_index = np.zeros(size, np.int16)
    sample_index = np.zeros(size, np.int64)
    theirs.build_blending_indices(
        dataset_index, sample_index, weights / weights.sum(), len(weights), size, False
    )
    ours = blend_by_weight(weights.tolist(), size)
    assert np.array_equal(ours[0], dataset_index)
    assert np.array_equal(ours[1], sample_index)


def test_using_all_is_theirs(theirs):
    sizes = np.array([300, 7, 1, 950, 42])
    dataset_index = np.zeros(sizes.sum(), np.int16)
    sample_index = np.zeros(sizes.sum(), np.int64)
    theirs.build_exhaustive_blending_indices(dataset_index, sample_index, sizes, len(sizes))
    ours = blend_all(sizes.tolist())
    assert np.array_equal(ours[0], dataset_index)
    assert np.array_equal(ours[1], sample_index)
