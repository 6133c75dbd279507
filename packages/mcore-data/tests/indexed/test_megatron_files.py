"""Pairs that megatron-core writes are read here, and those written here are read there."""

import warnings

import numpy as np
import pytest

from mcore_data.indexed.index_format import DTYPES, bin_path, idx_path
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore"),  # of what megatron-core misses or does here
]

# Tokens of each sequence of each document: an empty document and an empty sequence too.
DOCUMENTS = [[[1, 2, 3], [4]], [], [[5]], [[], [6, 7]], [[100] * 50]]
MODES = [[0, 1], [], [1], [0, 1], [0]]


@pytest.fixture(scope="module")
def theirs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what megatron-core misses here
        return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def flat(document):
    return [token for sequence in document for token in sequence]


def write_theirs(theirs, prefix, dtype, multimodal):
    import torch

    builder = theirs.IndexedDatasetBuilder(str(bin_path(prefix)), dtype.type, multimodal)
    for document, modes in zip(DOCUMENTS, MODES, strict=True):
        tokens = torch.tensor(flat(document), dtype=torch.float64)
        lengths = [len(sequence) for sequence in document]
        builder.add_document(tokens, lengths, modes if multimodal else None)
    builder.finalize(str(idx_path(prefix)))


def write_ours(prefix, dtype, multimodal):
    with IndexedWriter(prefix, dtype, multimodal=multimodal) as writer:
        for document, modes in zip(DOCUMENTS, MODES, strict=True):
            lengths = [len(sequence) for sequence in document]
            tokens = np.array(flat(document), dtype)
            writer.add_document(tokens, lengths, modes if multimodal else None)


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("code", sorted(DTYPES))
def test_both_write_the_same_bytes_and_read_each_others(theirs, tmp_path, code, multimodal):
    dtype = DTYPES[code]
    write_ours(tmp_path / "ours", dtype, multimodal)
    write_theirs(theirs, tmp_path / "theirs", dtype, multimodal)
    for path in (bin_path, idx_path):
        assert path(tmp_path / "ours").read_bytes() == path(tmp_path / "theirs").read_bytes()
    sequences = [sequence for document in DOCUMENTS for sequence in document]
    modes = [mode for document in MODES for mode in document]
    for mmap in (True, False):
        here = IndexedDataset(tmp_path / "theirs", mmap=mmap)
        there = theirs.IndexedDataset(str(tmp_path / "ours"), multimodal, mmap)
        assert here.documents.tolist() == there.document_indices.tolist() == [0, 2, 2, 3, 5, 6]
        for number, sequence in enumerate(sequences):
            for dataset in (here, there):
                found, mode = dataset[number] if multimodal else (dataset[number], 0)
                assert found.dtype == dtype
                assert found.tolist() == sequence
                assert mode == (modes[number] if multimodal else 0)


def test_what_they_join_is_what_we_join(theirs, tmp_path):
    dtype = np.dtype("<u2")
    write_ours(tmp_path / "a", dtype, multimodal=False)
    builder = theirs.IndexedDatasetBuilder(str(bin_path(tmp_path / "theirs")), dtype.type)
    with IndexedWriter(tmp_path / "ours", dtype) as writer:
        for _ in range(2):
            writer.add_index(tmp_path / "a")
            builder.add_index(str(tmp_path / "a"))
    builder.finalize(str(idx_path(tmp_path / "theirs")))
    for path in (bin_path, idx_path):
        assert path(tmp_path / "ours").read_bytes() == path(tmp_path / "theirs").read_bytes()
