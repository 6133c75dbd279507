import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.datasets import sample_index
from mcore_data.datasets.sample_index import (
    SampleIndexSpec,
    build_sample_index,
    content_hash,
    cut_samples,
    load_sample_index,
)
from mcore_data.indexed.caching import cached_arrays

# Vectors of this file were produced by megatron-core 0.16 on the same toy lengths.
LENGTHS = np.array([5, 3, 7, 1, 4], np.int32)
IDS = np.arange(5, dtype=np.int32)


@pytest.mark.parametrize(
    ("extra", "drop", "rows"),
    [
        (1, True, [[0, 0], [0, 4], [1, 1], [2, 0], [3, 0]]),
        (1, False, [[0, 0], [0, 4], [1, 1], [2, 0], [3, 0], [4, 0]]),
        (0, True, [[0, 0], [0, 4], [1, 1], [1, 5], [2, 4], [4, 1]]),
    ],
)
def test_cuts_equal_the_reference_vectors(extra, drop, rows):
    spec = SampleIndexSpec(sequence_length=4, extra_tokens=extra, drop_last_partial=drop)
    samples = cut_samples(LENGTHS[[2, 0, 4, 1, 3]], spec)
    assert samples.tolist() == rows
    assert samples.dtype == np.int32


@pytest.mark.parametrize(
    ("num_samples", "documents", "shuffle"),
    [
        (0, [4, 0, 1, 2, 3], [2, 1, 3, 0]),
        (3, [4, 0, 1, 2, 3], [2, 1, 3, 0]),
        (6, [4, 0, 1, 2, 3, 3, 2, 1, 0, 4], [2, 0, 3, 1, 5, 8, 4, 6, 7]),
        (
            12,
            [3, 1, 0, 2, 4, 2, 0, 2, 1, 4, 3, 4, 0, 1, 3],
            [11, 12, 4, 3, 7, 2, 1, 9, 5, 0, 8, 13, 6, 10],
        ),
    ],
)
def test_order_equals_the_reference_vectors(num_samples, documents, shuffle):
    spec = SampleIndexSpec(sequence_length=4, num_samples=num_samples, seed=1234)
    index = build_sample_index(LENGTHS, IDS, spec)
    assert index.documents.tolist() == documents
    assert index.shuffle.tolist() == shuffle
    assert index.shuffle.dtype == np.uint32
    if num_samples == 6:
        assert index.samples.tolist() == [
            [0, 0], [1, 0], [1, 4], [3, 0], [3, 4], [5, 0], [6, 3], [7, 0], [8, 1], [9, 0],
        ]  # fmt: skip


def walk(lengths, documents, L, E, drop):
    """The rule as it is told: consume L + E tokens, step back E, again."""
    total = sum(int(lengths[d]) for d in documents)
    whole, rest = divmod(total - E, L)
    count = whole + (rest > 0 and not drop)
    rows, position, offset = [[0, 0]], 0, 0
    for _ in range(count):
        wanted = L + E
        while True:
            here = int(lengths[documents[position]]) - offset
            if wanted <= here:
                offset += wanted - E
                break
            wanted -= here
            if position == len(documents) - 1:
                offset = int(lengths[documents[position]]) - E
                break
            position, offset = position + 1, 0
        rows.append([position, offset])
    return rows


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    L=st.integers(1, 9),
    E=st.integers(0, 1),
    drop=st.booleans(),
)
def test_cuts_equal_the_walk_over_documents(lengths, L, E, drop):
    if sum(lengths) < L + E:
        return
    lengths = np.array(lengths, np.int32)
    spec = SampleIndexSpec(sequence_length=L, extra_tokens=E, drop_last_partial=drop)
    expected = walk(lengths, range(len(lengths)), L, E, drop)
    assert cut_samples(lengths, spec).tolist() == expected


@pytest.mark.parametrize("drop", [True, False])
def test_cuts_over_several_pieces_equal_the_walk(monkeypatch, drop):
    monkeypatch.setattr(sample_index, "_PIECE", 7)
    lengths = np.random.default_rng(0).integers(0, 9, 200).astype(np.int32)
    lengths[[0, -1]] = 1, 0
    spec = SampleIndexSpec(sequence_length=13, drop_last_partial=drop)
    pieces = cut_samples(lengths, spec)
    monkeypatch.setattr(sample_index, "_PIECE", 1 << 17)
    assert np.array_equal(pieces, cut_samples(lengths, spec))
    assert len(pieces) == (int(lengths.sum()) - 1) // 13 + 1 + (not drop)


def test_a_range_of_documents_is_ordered_like_the_same_ids_spelled_out():
    spec = SampleIndexSpec(sequence_length=4, num_samples=6)
    spelled = build_sample_index(LENGTHS, np.array([1, 2, 4], np.int32)[:2], spec)
    ranged = build_sample_index(LENGTHS, range(1, 3), spec)
    for name in ("documents", "samples", "shuffle"):
        assert np.array_equal(getattr(spelled, name), getattr(ranged, name))


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    L=st.integers(1, 9),
    wanted=st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_epoch_holds_every_document_once_and_samples_suffice(lengths, L, wanted, seed):
    lengths = np.array(lengths, np.int32)
    if lengths.sum() == 0:
        return
    ids = np.arange(len(lengths), dtype=np.int32)
    spec = SampleIndexSpec(sequence_length=L, num_samples=wanted, seed=seed)
    index = build_sample_index(lengths, ids, spec)
    assert len(index.shuffle) >= wanted
    assert np.array_equal(np.sort(index.shuffle), np.arange(len(index.samples) - 1))
    seen = np.bincount(index.documents, minlength=len(ids))
    assert len(set(seen.tolist())) == 1


def test_a_split_without_enough_tokens_is_refused():
    none = np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="has no tokens"):
        build_sample_index(
            none, np.arange(3, dtype=np.int32), SampleIndexSpec(sequence_length=4)
        )
    with pytest.raises(ValueError, match="20 tokens, fewer than one sample of 21"):
        build_sample_index(LENGTHS, IDS, SampleIndexSpec(sequence_length=20))


def test_a_cached_index_is_mapped_and_equal(tmp_path):
    spec = SampleIndexSpec(sequence_length=4, num_samples=6)
    built = load_sample_index(LENGTHS, IDS, spec, tmp_path)
    again = load_sample_index(LENGTHS, IDS, spec, tmp_path)
    assert isinstance(again.samples.base, np.memmap)
    for name in ("documents", "samples", "shuffle"):
        assert np.array_equal(getattr(built, name), getattr(again, name))
    assert len(list(tmp_path.iterdir())) == 3


def test_the_cache_knows_content_not_names(tmp_path):
    spec = SampleIndexSpec(sequence_length=4)
    key = content_hash(LENGTHS, IDS, spec)
    assert key == content_hash(LENGTHS.copy(), IDS.copy(), spec)
    others = [
        content_hash(LENGTHS + 1, IDS, spec),
        content_hash(LENGTHS, IDS[:4], spec),
        content_hash(LENGTHS, IDS, SampleIndexSpec(sequence_length=5)),
        content_hash(LENGTHS, IDS, SampleIndexSpec(sequence_length=4, seed=1)),
    ]
    assert len({key, *others}) == 5


def test_a_builder_that_fails_leaves_nothing_in_the_cache(tmp_path):
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached_arrays(tmp_path, "key", ["a"], fail)
    assert not list(tmp_path.iterdir())
    (made,) = cached_arrays(tmp_path, "key", ["a"], lambda: [np.arange(3)])
    assert made.tolist() == [0, 1, 2]


def test_a_damaged_file_of_the_cache_is_named(tmp_path):
    def load():
        return cached_arrays(tmp_path, "key", ["a"], lambda: [np.arange(300)])

    load()
    path = tmp_path / "key-a.npy"
    whole = path.read_bytes()
    for damage in (b"", b"junk" * 50, whole[:-1], whole[:100], b"\x93NUMPY\x01\0" + bytes(99)):
        path.write_bytes(damage)
        with pytest.raises(RuntimeError, match=r"key-a\.npy is damaged .*: remove it to build"):
            load()
    path.unlink()
    assert load()[0].tolist() == list(range(300))
