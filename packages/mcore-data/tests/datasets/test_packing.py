import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.datasets.mock import MockDocuments
from mcore_data.datasets.packing import PackedDataset, cut_texts, pack
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter


def pack_slowly(needs, length):
    """First-fit decreasing, a text at a time; gives the row of each."""
    room, rows = [], np.zeros(len(needs), np.int64)
    for text in np.argsort(-np.array(needs), kind="stable").tolist():
        row = next((r for r, left in enumerate(room) if left >= needs[text]), len(room))
        if row == len(room):
            room.append(length)
        room[row] -= needs[text]
        rows[text] = row
    return rows


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12).flatmap(
    lambda length: st.tuples(
        st.just(length), st.lists(st.integers(1, length), min_size=1, max_size=40)
    )
))  # fmt: skip
def test_packing_by_lengths_is_first_fit_decreasing_text_by_text(case):
    length, needs = case
    pieces = np.stack([np.arange(len(needs)), np.zeros_like(needs), np.array(needs) + 1], 1)
    packed, rows = pack(pieces.astype(np.int64), length)
    row_of = np.repeat(np.arange(len(rows) - 1), np.diff(rows))
    expected = pack_slowly(needs, length)
    assert row_of[np.argsort(packed[:, 0])].tolist() == expected.tolist()
    assert np.array_equal(packed[:, 2], np.array(needs)[packed[:, 0]] + 1)


def test_texts_are_cut_dropped_or_truncated_where_they_are_too_long():
    lengths = np.array([9, 1, 4, 0, 5], np.int32)
    ids = np.arange(5)
    assert cut_texts(lengths, ids, 4, "split").tolist() == [
        [0, 0, 5],
        [0, 4, 5],
        [2, 0, 4],
        [4, 0, 5],
    ]
    assert cut_texts(lengths, ids, 4, "truncate").tolist() == [[0, 0, 5], [2, 0, 4], [4, 0, 5]]
    assert cut_texts(lengths, ids, 4, "skip").tolist() == [[2, 0, 4], [4, 0, 5]]
    with pytest.raises(ValueError, match="no text to pack"):
        cut_texts(lengths, np.array([1, 3]), 4, "split")


@pytest.fixture
def stored(tmp_path):
    """Twelve texts of 1 to 20 tokens with a mask beside each."""
    lengths = np.array([5, 1, 20, 7, 3, 9, 2, 14, 6, 11, 8, 4])
    random = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "texts", "uint16") as writer:
        writer.add_documents(np.arange(lengths.sum()) + 1, lengths)
    with IndexedWriter(tmp_path / "masks", "uint8") as writer:
        writer.add_documents(random.integers(0, 2, lengths.sum()), lengths)
    return IndexedDataset(tmp_path / "texts"), IndexedDataset(tmp_path / "masks")


def test_rows_equal_texts_laid_side_by_side(stored, tmp_path):
    texts, masks = stored
    dataset = PackedDataset(
        texts, weights=masks, sequence_length=10, num_samples=25, cache_folder=tmp_path / "c"
    )
    again = PackedDataset(texts, weights=masks, sequence_length=10, cache_folder=tmp_path / "c")
    for k in range(len(dataset)):
        tokens, labels, loss_mask, positions, borders = [], [], [], [], [0]
        for sequence, offset, count in dataset.sources(k):
            text = texts[sequence][offset : offset + count].tolist()
            mask = masks[sequence][offset : offset + count].tolist()
            for i in range(count - 1):
                tokens.append(text[i])
                labels.append(text[i + 1])
                loss_mask.append(mask[i + 1])
                positions.append(i)
            borders.append(len(tokens))
        rest = 10 - len(tokens)
        sample = dataset[k]
        assert sample["tokens"].tolist() == tokens + [0] * rest
        assert sample["labels"].tolist() == labels + [0] * rest
        assert sample["loss_mask"].tolist() == loss_mask + [0] * rest
        assert sample["position_ids"].tolist() == positions + list(range(rest))
        assert sample["cu_seqlens"].tolist() == borders + [10] * (11 - len(borders))
        if k < len(again):
            assert np.array_equal(sample["tokens"], again[k]["tokens"])
    assert dataset[None]["loss_mask"].sum() == 0


def test_every_epoch_has_every_label_once_in_another_order(stored):
    dataset = PackedDataset(stored[0], sequence_length=10, num_samples=2 * 8)
    per_epoch = dataset.per_epoch
    expected = sorted(t for text in stored[0] for t in text[1:].tolist())
    for epoch in range(2):
        rows = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        labels = [dataset[k]["labels"][dataset[k]["loss_mask"] > 0] for k in rows]
        assert sorted(np.concatenate(labels).tolist()) == expected
    assert dataset.sources(0) != dataset.sources(per_epoch)


def test_places_are_the_rows_that_hold_a_text():
    texts = MockDocuments(50_000, num_documents=1_000, max_length=64)
    dataset = PackedDataset(texts, sequence_length=64, seed=1234, num_samples=700)
    for sequence in (0, 17, 500):
        inside = [k for k in range(700) if any(s == sequence for s, _, _ in dataset.sources(k))]
        assert sorted(dataset.samples_with(sequence)) == inside


def test_masks_of_other_lengths_and_missing_samples_are_refused(stored):
    with pytest.raises(ValueError, match="differ in length"):
        PackedDataset(stored[0], weights=MockDocuments(9, num_documents=12), sequence_length=9)
    with pytest.raises(IndexError, match="sample 99 of"):
        PackedDataset(stored[0], sequence_length=10)[99]
