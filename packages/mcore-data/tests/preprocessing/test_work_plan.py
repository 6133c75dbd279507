"""A corpus written in units by workers that die is the dataset that one machine writes."""

import gzip
import json
import os
import random
import shutil
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from forks import exit_code, fork, kill

from mcore_data.config import DataConfig, PreprocessConfig, TokenizerConfig
from mcore_data.datasets.from_flags import build_gpt_datasets
from mcore_data.indexed.index_format import CorruptDatasetError
from mcore_data.indexed.inspection import find_pairs, quick_check, verify_pair
from mcore_data.indexed.merging import merge_pairs
from mcore_data.indexed.origins import Origins
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.preprocessing import plan_worker, tokenizing
from mcore_data.preprocessing.entries import next_entry
from mcore_data.preprocessing.plan_worker import work_on_plan
from mcore_data.preprocessing.preprocessing import preprocess
from mcore_data.preprocessing.sources import count_records, find_inputs
from mcore_data.preprocessing.work_plan import (
    describe_status,
    make_plan,
    merge_plan,
    read_plan,
    status_of,
)

BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")


@pytest.fixture(autouse=True)
def a_journal_many_times_a_second(monkeypatch):
    monkeypatch.setattr(tokenizing, "_JOURNAL_EVERY_S", 0.02)
    monkeypatch.setattr(tokenizing, "_SAVE_SHARE", 1)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # kills lose no page of the system


def records(first, count):
    rows = (
        {"text": f"Number {i} is here. " * (i % 9), "title": f"Nr {i}"}
        for i in range(first, first + count)
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "a.jsonl").write_bytes(records(0, 500))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(records(500, 100)))
    (folder / "c.jsonl").write_bytes(records(600, 400))
    return folder


def options(inputs, prefix, **changes):
    config = PreprocessConfig(input=(str(inputs),), output_prefix=str(prefix), append_eod=True)
    return replace(config, **changes)


def plan_of(inputs, prefix, num_units, **changes):
    config = options(inputs, prefix, **changes)
    total = sum(path.stat().st_size for path in inputs.iterdir())
    return make_plan(config, BYTES, -(-total // num_units))


def work(plan, **changes):
    return work_on_plan(read_plan(plan.path), block_bytes=1000, **changes)


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """The prefix of the datasets that one machine writes."""
    prefix = tmp_path_factory.mktemp("whole") / "c"
    preprocess(options(inputs, prefix), BYTES)
    return prefix


def content(prefix):
    """The tokens and the index as bytes."""
    tokens = b"".join(part.tobytes() for part in IndexedDataset(prefix).chunks(1000))
    return tokens, Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("num_units", [12, pytest.param(97, marks=pytest.mark.crash)])
def test_units_of_killed_workers_are_the_dataset_of_one_machine(
    tmp_path, inputs, whole, num_units
):
    plan = plan_of(inputs, tmp_path / "c", num_units)
    assert num_units - 2 <= len(plan.units) <= num_units  # a .gz longer than a unit is one
    draw = random.Random(num_units)
    for _ in range(2):
        workers = [fork(lambda: len(work(plan).failures)) for _ in range(2)]
        time.sleep(draw.uniform(0.02, 0.1))
        for worker in workers:
            kill(worker)
    workers = [fork(lambda: len(work(plan).failures)) for _ in range(2)]
    assert [exit_code(worker) for worker in workers] == [0, 0]
    logical = merge_plan(read_plan(plan.path))
    prefix, expected = tmp_path / "c_text_document", content(f"{whole}_text_document")
    assert not Path(f"{prefix}.bin").exists()
    assert logical["text"].num_documents == 1000
    assert content(prefix) == expected
    assert "checksums as in its manifest" in verify_pair(prefix)
    pair = merge_plan(read_plan(plan.path), physical=True)["text"]
    assert Path(f"{prefix}.bin").read_bytes() == expected[0]
    assert content(pair.prefix) == expected


def pages(first, count):
    for number in range(first, first + count):
        text = f"Page {number}.\r\n\r\nWords. " * (number % 7 + 1)
        head = f"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: {len(text)}\r\n\r\n"
        yield f"{head}{text}\r\n\r\n".encode()


def chopped(data, count, draw):
    """Pieces of bytes, most of which begin in the middle of a line."""
    cuts = sorted({0, len(data), *draw.choices(range(len(data)), k=count)})
    return [data[low:high] for low, high in pairwise(cuts)]


def test_units_begin_at_frames_members_and_row_groups(tmp_path):
    zstd = pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True)
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw, folder = random.Random(5), tmp_path / "in"
    folder.mkdir()
    skipped = b"\x53\x2a\x4d\x18\x03\0\0\0abc"
    torn = chopped(b"".join(pages(50, 49)), 40, draw)
    for name, data in {
        "a.jsonl.zst": skipped.join(map(zstd.compress, chopped(records(0, 400), 40, draw))),
        "b.jsonl.gz": b"".join(map(gzip.compress, chopped(records(400, 400), 40, draw))),
        "c.wet.gz": b"".join(map(gzip.compress, pages(0, 200))),
        "d.wet.zst": b"".join(map(zstd.compress, [*pages(0, 50), *torn])),
        "e.jsonl": b"",
    }.items():
        (folder / name).write_bytes(data)
    rows = pyarrow.table({"text": [f"Row {i}. " * (i % 11) for i in range(500)]})
    parquet.write_table(rows, folder / "f.parquet", row_group_size=41)
    preprocess(options(folder, tmp_path / "whole"), BYTES)
    theirs = Origins(tmp_path / "whole_text_document")
    for num_units in (7, 60):
        plan = plan_of(folder, tmp_path / f"c{num_units}", num_units)
        parts = [source for unit in plan.units for source in unit.corpus.sources]
        inner = {Path(part.path).name for part in parts if part.start}
        assert num_units == 7 or inner == {path.name for path in folder.iterdir()} - {"e.jsonl"}
        worker = fork(lambda plan=plan: len(work(plan).failures))
        time.sleep(0.1)
        kill(worker)
        assert not work(plan).failures
        prefix = merge_plan(plan)["text"].prefix
        assert content(prefix) == content(tmp_path / "whole_text_document")
        ours = Origins(prefix)
        for document in range(0, 1598, 3):
            one, other = ours.find(document), theirs.find(document)
            before = count_records(one.path, one.kind, one.start) if one.start else 0
            assert (one.path, one.record + before) == (other.path, other.record)


def test_bytes_that_look_like_a_gzip_member_are_no_entry(tmp_path):
    # Stored, not compressed: the magic bytes of a member are in the file as they are here.
    line = b'{"text": "\x1f\x8b\x08\x00 is no member"}\n' * 200
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(line, 0) + gzip.compress(line))
    (source,) = find_inputs([str(path)])
    assert next_entry(source, 100, 0) == len(gzip.compress(line, 0))


@pytest.fixture
def done(tmp_path, inputs):
    """A plan of three units, all done."""
    plan = plan_of(inputs, tmp_path / "out" / "c", 3)
    assert work(plan).num_units == len(plan.units) == 3
    return plan


def test_a_logical_dataset_reads_as_one(tmp_path, done, whole):
    merge_plan(done)
    prefix = tmp_path / "out" / "c_text_document"
    one, expected = IndexedDataset(prefix), IndexedDataset(f"{whole}_text_document")
    by_file = IndexedDataset(prefix, mmap=False)
    for number in (0, 1, 430, 500, 886, 887):
        assert one[number].tolist() == expected[number].tolist() == by_file[number].tolist()
    picked = np.array([887, 3, 501])
    ranges = picked, np.array([1, 0, 2]), np.array([4, 5, 6])
    assert one.gather(*ranges).tolist() == expected.gather(*ranges).tolist()
    assert (
        Origins(prefix).find(700).record == Origins(f"{whole}_text_document").find(700).record
    )
    path, byte = one.locate(int(one.index.pointers[500]))
    assert path.parent.name == "c.units"
    assert path.read_bytes()[byte : byte + 2] == expected[500].tobytes()[:2]
    blends = [
        build_gpt_datasets(
            DataConfig(data_path=("0.3", f"{start}_text_document", "0.7", str(path)[:-4])),
            None,
            sequence_length=32,
            seed=1,
            num_samples=(50, 5, 0),
        )[0]
        for start in (tmp_path / "out" / "c", whole)
    ]
    for sample in range(50):
        first, second = (blend[sample]["tokens"].tolist() for blend in blends)
        assert first == second
    assert quick_check(prefix).startswith("logical dataset of 3 pairs; index")
    # A folder lists it instead of its units, and it can be merged and moved with them.
    assert find_pairs(tmp_path / "out") == [str(prefix)]
    again = merge_pairs([prefix], tmp_path / "again")
    assert content(again.prefix)[0] == content(prefix)[0]
    (tmp_path / "out").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "c_text_document"
    assert verify_pair(moved)
    unit = next((tmp_path / "moved" / "c.units").glob("00001*.bin"))
    data = bytearray(unit.read_bytes())
    data[0] ^= 1
    unit.write_bytes(data)
    with pytest.raises(CorruptDatasetError, match=r"00001_text_document\.bin does not have"):
        verify_pair(moved)
    unit.unlink()
    with pytest.raises(CorruptDatasetError, match=r"00001_text_document\.bin is missing, and"):
        IndexedDataset(moved)[500]
    assert "sizes in the manifest differ" in quick_check(moved)


def test_merge_refuses_holes_and_status_shows_them(tmp_path, done):
    lock = done.units[1].lock_path
    next(done.folder.glob("00001*.manifest.json")).unlink()
    with pytest.raises(ValueError, match=r"1 of 3 units are not done: 1\. Write them with"):
        merge_plan(done)
    assert status_of(done).waiting == [1]
    lock.write_text(json.dumps({"token": "x", "host": "far", "pid": 7, "namespace": "other"}))
    assert status_of(done).running == {1: "process 7 on far"}
    lines = "\n".join(describe_status(done, status_of(done)))
    for part in ("done: 2", "unit 1: process 7 on far", " s left"):
        assert part in lines


def test_a_silent_holder_of_another_machine_is_dead_and_one_that_moves_is_not(
    tmp_path, done, monkeypatch
):
    monkeypatch.setattr(plan_worker, "_LONGEST_PAUSE_S", 0.05)
    next(done.folder.glob("00001*.manifest.json")).unlink()
    lock = done.units[1].lock_path
    lock.write_text(json.dumps({"token": "x", "host": "far", "pid": 7, "namespace": "other"}))

    def move():
        for _ in range(8):
            os.utime(lock)
            time.sleep(0.05)

    began = time.monotonic()
    other = fork(move)
    assert work(done, claim_timeout_s=0.2).num_units == 1
    assert time.monotonic() - began > 0.5  # the last move and the timeout
    assert exit_code(other) == 0
    assert not lock.exists()


def test_a_worker_that_lost_its_claim_leaves_the_unit(done, monkeypatch, caplog):
    monkeypatch.setattr(plan_worker, "_LONGEST_PAUSE_S", 0.05)
    next(done.folder.glob("00001*.manifest.json")).unlink()
    lock, calls = done.units[1].lock_path, []

    def take_away(progress):
        calls.append(progress)
        if len(calls) == 1:
            lock.write_text(json.dumps({"token": "x", "host": "far", "namespace": "other"}))

    report = work(done, claim_timeout_s=0.1, on_progress=take_away)
    assert "unit 1 was taken over by another worker" in caplog.text
    assert report.num_units == 1  # after the other one was silent
    assert merge_plan(done)["text"].num_documents == 1000


def test_a_corpus_without_records_is_one_empty_unit(tmp_path):
    (tmp_path / "a.jsonl").touch()
    config = PreprocessConfig(
        input=(str(tmp_path / "a.jsonl"),), output_prefix=str(tmp_path / "c")
    )
    plan = make_plan(config, BYTES, 1000)
    assert work(plan).num_units == 1
    assert merge_plan(plan)["text"].num_tokens == 0
    assert verify_pair(tmp_path / "c_text_document")


def test_a_changed_input_stops_the_worker(tmp_path, inputs):
    copy = tmp_path / "in"
    copy.mkdir()
    for path in inputs.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    plan = plan_of(copy, tmp_path / "c", 12)
    with (copy / "a.jsonl").open("ab") as file:
        file.write(records(0, 1))
    with pytest.raises(
        RuntimeError, match=r"changed since .*plan\.json was made: .*a\.jsonl had"
    ):
        work(plan)
    assert not status_of(plan).failed
    with pytest.raises(ValueError, match=r"plan\.json exists for other inputs"):
        plan_of(copy, tmp_path / "c", 12)
    again = plan_of(copy, tmp_path / "c", 12, overwrite=True)
    assert work(again).failures == {}
    assert merge_plan(again)["text"].num_documents == 1001


def test_a_unit_that_fails_is_named_and_tried_again(tmp_path, inputs):
    copy = tmp_path / "in"
    copy.mkdir()
    (copy / "a.jsonl").write_bytes(records(0, 50) + b"no record\n" + records(50, 50))
    plan = plan_of(copy, tmp_path / "c", 4)
    report = work(plan)
    assert report.num_units == 3
    (number,) = report.failures
    assert "a.jsonl, line 51" in report.failures[number]
    assert list(status_of(plan).failed) == [number]
    with pytest.raises(ValueError, match=rf"Unit {number} failed: .*line 51"):
        merge_plan(plan)
    assert work(plan, on_bad_record="skip").num_units == 1
    assert not status_of(plan).failed
    assert merge_plan(plan)["text"].num_documents == 100


def test_a_plan_holds_its_settings_and_is_made_once(tmp_path, inputs):
    config = options(inputs, tmp_path / "c")
    plan = plan_of(inputs, tmp_path / "c", 5)
    before = plan.path.stat().st_mtime_ns
    assert plan_of(inputs, tmp_path / "c", 5).path.stat().st_mtime_ns == before
    stored = read_plan(plan.path).units
    assert [(unit.work, unit.corpus) for unit in stored] == [
        (unit.work, unit.corpus) for unit in plan.units
    ]
    with pytest.raises(ValueError, match="exists for other inputs or options"):
        plan_of(inputs, tmp_path / "c", 5, append_eod=False)
    with pytest.raises(ValueError, match="--workers and --partitions: not an option of a plan"):
        make_plan(replace(config, workers=2, partitions=3), BYTES, 1000)
    text = plan.path.read_text()
    plan.path.write_text(text.replace("a.jsonl", "x.jsonl"))
    with pytest.raises(CorruptDatasetError, match="damaged"):
        read_plan(plan.path)
    with pytest.raises(FileNotFoundError, match="make it with mcore-data plan"):
        read_plan(tmp_path / "d.plan.json")


def test_another_tokenizer_is_refused(tmp_path, corpus, bpe_folder):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for path in bpe_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tokenizer = TokenizerConfig(tokenizer_model=str(folder))
    config = PreprocessConfig(input=(str(corpus),), output_prefix=str(tmp_path / "c"))
    plan = make_plan(config, tokenizer, 1000)
    file = folder / "tokenizer.json"
    vocabulary = json.loads(file.read_text())
    vocabulary["added_tokens"].append(
        {**vocabulary["added_tokens"][-1], "id": 300, "content": "<x>"}
    )
    file.write_text(json.dumps(vocabulary))
    with pytest.raises(ValueError, match="the tokenizer changed since the plan was made"):
        work(plan)


def damaged(data, rng):
    """Return bytes cut, flipped, overwritten, a line longer or shorter, or of another kind."""
    lines, at = data.splitlines(keepends=True), rng.randrange(len(data))
    line = rng.randrange(len(lines))
    flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
    return rng.choice(
        [
            data[:at],
            data[:at] + flipped + data[at + 1 :],
            data[:at] + rng.randbytes(8) + data[at + 8 :],
            b"".join([*lines[: line + 1], *lines[line:]]),
            b"".join(lines[:line] + lines[line + 1 :]),
            rng.choice([b"", b"{}", b"null", b"[" * 5000, b"\xff\xfe"]),
        ]
    )


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_a_damaged_file_of_a_stopped_plan_is_named_or_changes_no_byte(tmp_path, count):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(records(0, 60))
    stopped, copy = tmp_path / "stopped", tmp_path / "copy"
    stopped.mkdir()
    plan = plan_of(tmp_path / "in", stopped / "out", 3, keep_keys=("title",))
    progress = iter(range(8))

    def stop_at_the_eighth(_):
        if next(progress, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work_on_plan(plan, block_bytes=400, on_progress=stop_at_the_eighth)

    def finish():
        plan = read_plan(copy / "out.plan.json")
        report = work_on_plan(plan, block_bytes=400)
        assert not report.failures, report.failures
        merge_plan(plan)
        status_of(plan)
        return {path.name: path.read_bytes() for path in copy.glob("out_text_document.*")}

    shutil.copytree(stopped, copy)
    whole = finish()
    names = [path.relative_to(stopped) for path in stopped.rglob("*") if path.is_file()]
    assert {".bin", ".partial", ".json", ".kept", ".origins"} <= {n.suffix for n in names}
    rng = random.Random(count)
    for name in rng.choices(sorted(names), k=count):
        shutil.rmtree(copy)
        shutil.copytree(stopped, copy)
        data = (copy / name).read_bytes() or b"x"
        # Tokens have no checksum before the manifest, and are read by training alone after it.
        is_plain = name.suffix in (".bin", ".partial")
        (copy / name).write_bytes(data[:-1] if is_plain else damaged(data, rng))
        try:
            assert finish() == whole, name
        except (RuntimeError, ValueError, AssertionError) as error:
            assert name.name.removesuffix(".partial") in str(error), (name, error)  # noqa: PT017
