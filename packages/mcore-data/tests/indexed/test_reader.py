import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.indexed.index_format import (
    DTYPES,
    CorruptDatasetError,
    bin_path,
    idx_path,
    token_dtype,
)
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter

# Written by megatron-core 0.16 for uint16 documents of 5, 3, 7, 1, 4 tokens, tokens 1..20.
HEADER = bytes.fromhex("4d4d4944494458000001000000000000000805000000000000000600000000000000")
LENGTHS = [5, 3, 7, 1, 4]


def write_toy(prefix, dtype="uint16"):
    tokens = np.arange(1, 21)
    with IndexedWriter(prefix, dtype) as writer:
        for part in np.split(tokens, np.cumsum(LENGTHS)[:-1]):
            writer.add_document(part)


def test_index_bytes_equal_the_reference_vector(tmp_path):
    write_toy(tmp_path / "toy")
    expected = (
        HEADER
        + np.array(LENGTHS, "<i4").tobytes()
        + np.array([0, 10, 16, 30, 32], "<i8").tobytes()
        + np.arange(6, dtype="<i8").tobytes()
    )
    assert len(expected) == 142
    assert idx_path(tmp_path / "toy").read_bytes() == expected
    assert bin_path(tmp_path / "toy").read_bytes() == np.arange(1, 21, dtype="<u2").tobytes()


@pytest.mark.parametrize("code", sorted(DTYPES))
@pytest.mark.parametrize("mmap", [True, False])
def test_every_dtype_comes_back_by_map_and_by_file(tmp_path, code, mmap):
    write_toy(tmp_path / "toy", DTYPES[code])
    dataset = IndexedDataset(tmp_path / "toy", mmap=mmap)
    assert dataset.dtype == DTYPES[code]
    assert [list(sequence) for sequence in dataset] == [
        [1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [16], [17, 18, 19, 20],
    ]  # fmt: skip
    assert dataset.get(2, 1, 3).tolist() == [10, 11, 12]
    assert [part.tolist() for part in dataset[1:3]] == [[6, 7, 8], list(range(9, 16))]
    again = pickle.loads(pickle.dumps(dataset))
    assert again[4].tolist() == [17, 18, 19, 20]


@pytest.mark.parametrize("mmap", [True, False])
@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), max_size=6
    )
)
def test_documents_of_any_shape_come_back(tmp_path_factory, mmap, documents):
    prefix = tmp_path_factory.mktemp("any") / "set"
    with IndexedWriter(prefix, "uint16") as writer:
        for sentences in documents:
            flat = [token for sentence in sentences for token in sentence]
            writer.add_document(flat, [len(sentence) for sentence in sentences])
    dataset = IndexedDataset(prefix, mmap=mmap)
    assert dataset.num_documents == len(documents)
    read = [
        [dataset[i].tolist() for i in range(dataset.documents[j], dataset.documents[j + 1])]
        for j in range(len(documents))
    ]
    assert read == documents


def test_many_documents_at_once_equal_one_at_a_time(tmp_path):
    lengths = np.array([2, 0, 3, 1])
    with IndexedWriter(tmp_path / "bulk", "int32") as writer:
        writer.add_documents(np.arange(6), lengths, np.array([1, 0, 2, 1]))
        writer.add_documents(np.arange(2), np.array([2]))
    with IndexedWriter(tmp_path / "single", "int32") as writer:
        writer.add_document([0, 1])
        writer.add_document([], [])
        writer.add_item([])
        writer.add_item([2, 3, 4])
        writer.end_document()
        writer.add_document([5])
        writer.add_document([0, 1])
    assert (
        idx_path(tmp_path / "bulk").read_bytes() == idx_path(tmp_path / "single").read_bytes()
    )
    assert (
        bin_path(tmp_path / "bulk").read_bytes() == bin_path(tmp_path / "single").read_bytes()
    )


def test_multimodal_files_carry_modes_and_are_recognised_by_size(tmp_path):
    with IndexedWriter(tmp_path / "mm", "int32", multimodal=True) as writer:
        writer.add_document([1, 2, 3], [1, 2], [0, 1])
        writer.add_item([7])
        writer.end_document()
    dataset = IndexedDataset(tmp_path / "mm")
    assert [(tokens.tolist(), mode) for tokens, mode in dataset] == [
        ([1], 0),
        ([2, 3], 1),
        ([7], 0),
    ]


def test_appending_an_index_shifts_borders_and_pointers(tmp_path):
    write_toy(tmp_path / "toy")
    with IndexedWriter(tmp_path / "both", "uint16") as writer:
        writer.add_index(tmp_path / "toy")
        writer.add_index(tmp_path / "toy")
    both = IndexedDataset(tmp_path / "both")
    assert both.documents.tolist() == list(range(11))
    assert both[7].tolist() == list(range(9, 16))


def test_appending_another_dtype_is_refused(tmp_path):
    write_toy(tmp_path / "toy", "int32")
    writer = IndexedWriter(tmp_path / "both", "uint16")
    with pytest.raises(ValueError, match=r"int32.*cannot be appended.*uint16"):
        writer.add_index(tmp_path / "toy")
    writer.abandon()


def test_an_exception_leaves_no_file_under_a_final_name_nor_a_partial_one(tmp_path):
    def fail_in_the_middle():
        with IndexedWriter(tmp_path / "x", "uint16") as writer:
            writer.add_document([1])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle()
    assert list(tmp_path.iterdir()) == []


def test_nothing_stands_under_a_final_name_before_finalize(tmp_path):
    writer = IndexedWriter(tmp_path / "x", "uint16")
    writer.add_document([1])
    assert {path.name for path in tmp_path.iterdir()} == {
        "x.bin.partial", "x.lengths.partial", "x.borders.partial", "x.origins.partial",
        "x.kept.partial",
    }  # fmt: skip
    writer.finalize()
    assert {path.name for path in tmp_path.iterdir()} == {"x.bin", "x.idx"}


def test_a_writer_continues_where_it_said_it_stood(tmp_path):
    writer = IndexedWriter(tmp_path / "x", "uint16")
    writer.add_document([1, 2])
    stand = writer.position()
    writer.add_document([9, 9, 9])  # lost with the process
    writer.suspend()
    with IndexedWriter(tmp_path / "x", "uint16", resume_at=stand) as again:
        again.add_document([3])
    assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "x")] == [[1, 2], [3]]


def test_token_ids_beyond_the_dtype_are_refused_not_wrapped(tmp_path):
    writer = IndexedWriter(tmp_path / "x", "uint16")
    with pytest.raises(ValueError, match="70000 do not fit uint16"):
        writer.add_document([1, 70000])
    writer.abandon()


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(65499, "uint16"), (65500, "int32"), (70000, "int32")]
)
def test_dtype_follows_the_vocabulary(vocab_size, name):
    assert token_dtype(vocab_size).name == name


def corrupt(path, at, value):
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"X", "is not an index"),
        (9, b"\x02", "index version 2"),
        (17, b"\x09", "dtype code 9"),
        (18, b"\x06", "does not fit its header"),
        (34, b"\x06", "sequence 1 has length 3 and byte offset 10"),
        (38, b"\xff\xff\xff\xff", "sequence 1 has length -1"),
        (34 + 20 + 8, b"\x0b", "sequence 1 has length 3 and byte offset 11"),
        (34 + 60 + 8, b"\x09", "document borders"),
        (17, b"\x04", "sequence 1 has length 3 and byte offset 10"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, at, value, message):
    write_toy(tmp_path / "toy")
    corrupt(idx_path(tmp_path / "toy"), at, value)
    with pytest.raises(CorruptDatasetError, match=message):
        IndexedDataset(tmp_path / "toy")


def test_an_index_that_does_not_match_its_bin_is_named(tmp_path):
    write_toy(tmp_path / "toy")
    path = bin_path(tmp_path / "toy")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(CorruptDatasetError, match=r"40 bytes of uint16, the .bin has 38"):
        IndexedDataset(tmp_path / "toy")


@pytest.mark.parametrize("keep", [0, 10, 33, 34, 100, 141])
def test_a_truncated_index_is_named(tmp_path, keep):
    write_toy(tmp_path / "toy")
    path = idx_path(tmp_path / "toy")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptDatasetError, match="truncated"):
        IndexedDataset(tmp_path / "toy")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_an_error_or_harmless(tmp_path_factory, data):
    prefix = tmp_path_factory.mktemp("fuzz") / "toy"
    write_toy(prefix)
    at = data.draw(st.integers(0, 141))
    corrupt(idx_path(prefix), at, bytes([data.draw(st.integers(0, 255))]))
    try:
        dataset = IndexedDataset(prefix)
    except CorruptDatasetError:
        return
    assert dataset.lengths.tolist() == LENGTHS  # only inner borders and the sign may differ
    assert np.concatenate(list(dataset)).astype("<u2").tolist() == list(range(1, 21))


def test_a_missing_half_is_named(tmp_path):
    write_toy(tmp_path / "toy")
    bin_path(tmp_path / "toy").unlink()
    with pytest.raises(FileNotFoundError, match=r"toy\.bin does not exist"):
        IndexedDataset(tmp_path / "toy")


def test_reading_outside_a_sequence_is_refused(tmp_path):
    write_toy(tmp_path / "toy")
    dataset = IndexedDataset(tmp_path / "toy")
    with pytest.raises(ValueError, match="which has 3"):
        dataset.get(1, 2, 2)
    with pytest.raises(IndexError, match="sequence 5 of 5"):
        dataset[5]
    with pytest.raises(ValueError, match="only step 1"):
        dataset[::2]


def test_an_empty_dataset_is_fine(tmp_path):
    with IndexedWriter(tmp_path / "none", "uint16"):
        pass
    dataset = IndexedDataset(tmp_path / "none")
    assert len(dataset) == 0
    assert dataset.num_documents == 0
    assert dataset.num_tokens == 0
