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
    monkeypatch.setattr(object_store, "_BLOCKS_KEPT", 4)
    local, address = stored
    remote = IndexedDataset(address, cache_path=tmp_path / "cache")
    ours = GPTDataset(remote, sequence_length=700)
    theirs = GPTDataset(IndexedDataset(local), sequence_length=700)
    for k in range(len(theirs)):
        assert np.array_equal(ours[k]["tokens"], theirs[k]["tokens"])
    again = pickle.loads(pickle.dumps(remote))
    assert np.array_equal(again[7], remote[7])
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_blocks_are_kept_on_disk_within_a_limit_and_damaged_ones_are_fetched_again(
    stored, tmp_path, monkeypatch
):
    monkeypatch.setattr(object_store, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(object_store, "_BLOCKS_KEPT", 4)
    local, address = stored
    options = {"cache_path": tmp_path / "cache", "cache_bytes": 1 << 20}
    theirs = GPTDataset(IndexedDataset(local), sequence_length=100)

    def read_all(**changes):
        dataset = IndexedDataset(address, **{**options, **changes})
        ours = GPTDataset(dataset, sequence_length=100)
        for k in range(len(theirs)):
            assert np.array_equal(ours[k]["tokens"], theirs[k]["tokens"])
        return dataset._bin.traffic

    total = (tmp_path / "local.bin").stat().st_size
    first = read_all()
    assert first.fetched_bytes == total  # each block once
    second = read_all()
    assert (second.fetched_blocks, second.disk_blocks > 0) == (0, True)
    (block, *_) = (p for p in (tmp_path / "cache" / "blocks").rglob("*") if p.is_file())
    block.write_bytes(block.read_bytes()[:-1] + b"x")
    assert read_all().fetched_blocks == 1
    small = total // 3
    assert read_all(cache_bytes=small, cache_path=tmp_path / "small").fetched_bytes > total
    kept = [p.stat().st_size for p in (tmp_path / "small").rglob("blocks/**/*") if p.is_file()]
    assert 0 < sum(kept) <= small


def test_outputs_go_to_a_store_whole_or_in_units(stored, tmp_path, capsys):
    lines = "".join(f'{{"text": "number {i}", "id": {i}}}\n' for i in range(300))
    (tmp_path / "a.jsonl").write_text(lines)
    scratch = ["--scratch-path", str(tmp_path / "scratch")]
    options = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer-type", "ByteTokenizer"]
    options += ["--append-eod", "--keep-keys", "id"]
    assert main(["preprocess", *options, "--output-prefix", str(tmp_path / "whole")]) == 0
    store = f"memory://{uuid.uuid4().hex}"
    command = ["preprocess", *options, "--output-prefix", f"{store}/one"]
    assert main(command) == 2
    assert "give --scratch-path" in capsys.readouterr().err
    assert main([*command, *scratch]) == main([*command, *scratch]) == 0  # the same again
    units = ["--output-prefix", f"{store}/c", "--unit-size", "2KB"]
    assert main(["plan", *options, *units]) == 0
    plan = ["--plan", f"{store}/c.plan.json"]
    assert main(["preprocess", *plan, *scratch]) == 0
    assert main(["status", *plan]) == 0
    assert f"next: mcore-data merge --plan {store}/c.plan.json" in capsys.readouterr().out
    assert main(["merge", *plan, *scratch]) == 0
    system, path = fsspec.core.url_to_fs(store)
    expected = IndexedDataset(tmp_path / "whole_text_document")
    for name in ("one", "c"):
        remote = IndexedDataset(f"{store}/{name}_text_document", cache_path=tmp_path / "cache")
        assert [each.tolist() for each in remote] == [each.tolist() for each in expected]
        for kind in ("idx", "kept"):
            whole = (tmp_path / f"whole_text_document.{kind}").read_bytes()
            assert system.cat_file(f"{path}/{name}_text_document.{kind}") == whole
    assert not list((tmp_path / "scratch").rglob("*.bin"))
    assert not list((tmp_path / "scratch").rglob("*.partial"))
    unit = next(name for name in system.find(path) if name.endswith("00001_text_document.bin"))
    system.pipe_file(unit, b"cut")
    assert main(["merge", *plan, *scratch]) == 1
    assert "write the unit again" in capsys.readouterr().err


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
