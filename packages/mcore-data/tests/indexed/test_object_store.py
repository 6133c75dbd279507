import pickle
import sys
import uuid

import fsspec
import numpy as np
import pytest

from mcore_data.cli import main
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.indexed import object_store
from mcore_data.indexed.index_format import CorruptDatasetError
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter


@pytest.fixture
def stored(tmp_path):
    """A pair on disk, and the same in a store in memory."""
    lengths = np.random.default_rng(0).integers(0, 60, 200)
    with IndexedWriter(tmp_path / "local", "uint16") as writer:
        writer.add_documents(np.arange(lengths.sum()) % 60_000, lengths)
    address = f"memory://{uuid.uuid4().hex}/pair"
    system, path = fsspec.core.url_to_fs(address)
    for kind in ("bin", "idx"):
        system.pipe_file(f"{path}.{kind}", (tmp_path / f"local.{kind}").read_bytes())
    return tmp_path / "local", address


def test_samples_from_a_store_equal_those_from_disk(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "_BLOCK_BYTES", 1000)  # ranges over several blocks
    monkeypatch.setattr(object_store, "_BLOCKS_KEPT", 2)
    local, address = stored
    remote = IndexedDataset(address, cache_path=tmp_path / "cache")
    ours = GPTDataset(remote, sequence_length=700)
    theirs = GPTDataset(IndexedDataset(local), sequence_length=700)
    for k in range(len(theirs)):
        assert np.array_equal(ours[k]["tokens"], theirs[k]["tokens"])
    again = pickle.loads(pickle.dumps(remote))
    assert np.array_equal(again[7], remote[7])
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_store_needs_a_folder_for_its_index(stored):
    with pytest.raises(ValueError, match="give --object-storage-cache-path"):
        IndexedDataset(stored[1])


def test_a_missing_or_cut_file_of_a_store_is_named(stored, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"memory://nowhere.idx does not exist"):
        IndexedDataset("memory://nowhere", cache_path=tmp_path)
    system, path = fsspec.core.url_to_fs(stored[1])
    system.pipe_file(f"{path}.bin", system.cat_file(f"{path}.bin")[:-2])
    with pytest.raises(CorruptDatasetError, match="does not match"):
        IndexedDataset(stored[1], cache_path=tmp_path)


def test_a_pair_in_a_store_is_looked_at_where_it_is(stored, tmp_path, capsys):
    cache = ["--object-storage-cache-path", str(tmp_path / "cache")]
    assert main(["inspect", stored[1], *cache]) == 0
    remote = capsys.readouterr().out
    assert main(["inspect", str(stored[0])]) == 0
    assert remote == capsys.readouterr().out


def test_a_store_without_fsspec_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r"pip install 'mcore-base\[s3\]'"):
        IndexedDataset("s3://bucket/pair", cache_path=tmp_path)
