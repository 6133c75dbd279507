import bz2
import gzip
import hashlib
import io
import json
import logging
import lzma
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.indexed.manifest import read_manifest, replace_json
from mcore_data.indexed.merging import merge_pairs
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter
from mcore_data.preprocessing.preprocessing import preprocess
from mcore_data.preprocessing.records import BadRecordError
from mcore_data.preprocessing.tokenizing import limit_workers
from mcore_data.tokenizers.building import load_tokenizer

BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")
EOD = 256
FILES = {f"_text_document.{kind}" for kind in ("bin", "idx", "origins")}


def run(prefix, *inputs, tokenizer=BYTES, on_progress=None, **options):
    config = PreprocessConfig(
        input=tuple(map(str, inputs)), output_prefix=str(prefix), **options
    )
    return preprocess(config, tokenizer, on_progress, block_bytes=300)


def texts_of(path, key="text"):
    return [json.loads(line)[key] for line in path.read_text().splitlines()]


def outputs(prefix):
    """Content of every file of a prefix but the manifests, by what follows it."""
    return {
        path.name.removeprefix(prefix.name): path.read_bytes()
        for path in prefix.parent.glob(prefix.name + "*")
        if not path.name.endswith(".manifest.json")
    }


def test_documents_end_with_eod_and_empty_ones_keep_their_place(corpus, tmp_path, bpe_folder):
    tokenizer_config = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(bpe_folder)
    )
    report = run(tmp_path / "out", corpus, tokenizer=tokenizer_config, append_eod=True)
    assert report.prefixes == {"text": tmp_path / "out_text_document"}
    dataset = IndexedDataset(tmp_path / "out_text_document")
    texts = texts_of(corpus)
    assert report.num_documents == dataset.num_documents == len(texts)
    assert report.num_tokens == {"text": dataset.num_tokens}
    assert "" in texts
    tokenizer = load_tokenizer(bpe_folder)
    for j, text in enumerate(texts):
        sequences = dataset[int(dataset.documents[j]) : int(dataset.documents[j + 1])]
        expected = [[*tokenizer.encode(text), tokenizer.eod]] if text else []
        assert [sequence.tolist() for sequence in sequences] == expected


def test_each_key_has_its_dataset_and_lists_are_sentences(corpus, tmp_path):
    run(f"{tmp_path}/new/", corpus, json_keys=("title", "parts"), append_eod=True)
    titles = IndexedDataset(tmp_path / "new/_title_document")
    assert bytes(titles[7][:-1].tolist()).decode() == "Nr 7"
    parts = IndexedDataset(tmp_path / "new/_parts_document")
    borders = parts.documents
    sentences = texts_of(corpus, "parts")[7]
    stored = parts[int(borders[7]) : int(borders[8])]
    assert [bytes(s[s < EOD].tolist()).decode() for s in stored] == sentences
    assert [int(s[-1] == EOD) for s in stored] == [0, 0, 1]


def test_sentences_become_sequences_of_their_document(tmp_path):
    source = tmp_path / "in.jsonl"
    texts = ["One is here. Two is there.", "", "Only one"]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    report = run(tmp_path / "out", source, split_sentences=True, workers=2)
    assert report.prefixes == {"text": tmp_path / "out_text_sentence"}
    dataset = IndexedDataset(tmp_path / "out_text_sentence")
    assert dataset.documents.tolist() == [0, 2, 2, 3]
    assert [bytes(s.tolist()).decode() for s in dataset] == [
        "One is here.", "Two is there.", "Only one",
    ]  # fmt: skip


def test_folders_and_patterns_stand_for_their_files_by_name(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "b.jsonl").write_text('{"text": "b"}\n')
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (folder / "notes.txt").write_text("not data")
    for prefix, word in (("folder", folder), ("pattern", folder / "*.jsonl*")):
        assert run(tmp_path / prefix, word).num_documents == 2
        dataset = IndexedDataset(tmp_path / f"{prefix}_text_document")
        assert [bytes(tokens.tolist()) for tokens in dataset] == [b"a", b"b"]
        left_out = read_manifest(tmp_path / f"{prefix}_text_document")["left_out"]
        assert left_out == ([f"{folder}/notes.txt"] if prefix == "folder" else [])


CHANGES = {
    "cut": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "written anew": lambda path, data: path.write_bytes(data.swapcase()),
    "appended to": lambda path, data: path.write_bytes(data + data),
    "replaced": lambda path, data: (path.unlink(), path.write_bytes(data.swapcase())),
    "removed": lambda path, data: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.txt"])
def test_an_input_that_changes_while_it_is_read_ends_the_run(tmp_path, name, change):
    source = tmp_path / name
    pack = gzip.compress if name.endswith(".gz") else bytes
    data = pack(b'{"text": "the beginning"}\n' * 2000)
    source.write_bytes(data)
    os.utime(source, (0, 0))
    changed = []

    def interfere(progress):
        if not changed:
            changed.append(CHANGES[change](source, data))

    options = {"on_bad_record": "skip", "text_lines": True}
    with pytest.raises(RuntimeError, match=r"in\..* (changed while|was truncated|was removed)"):
        run(tmp_path / "out", source, on_progress=interfere, **options)
    assert not [*tmp_path.glob("out*.bin"), *tmp_path.glob("out*.idx")]
    source.write_bytes(pack(b'{"text": "whole"}\n' * 3))
    assert run(tmp_path / "out", source, **options).num_documents == 3


def test_an_input_cut_between_its_lines_ends_a_run_of_workers(tmp_path):
    """Blocks of the part that is gone are read by workers, or not cut at all."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "line"}\n' * 20000)

    def cut(progress):
        os.truncate(source, 17 * 10000)

    with pytest.raises(RuntimeError, match=r"was truncated|changed while it was read"):
        run(tmp_path / "out", source, workers=2, on_progress=cut)
    assert not [*tmp_path.glob("out*.bin"), *tmp_path.glob("out*.idx")]


def test_keeping_newlines_needs_sentences(corpus, tmp_path):
    with pytest.raises(ValueError, match="no effect without --split-sentences"):
        run(tmp_path / "out", corpus, keep_newlines=True)


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
def test_compressed_input_gives_the_same_bytes(corpus, tmp_path, suffix, compress):
    packed = tmp_path / f"corpus.jsonl{suffix}"
    packed.write_bytes(compress(corpus.read_bytes()))
    run(tmp_path / "plain", corpus, corpus)
    run(tmp_path / "packed", packed, corpus)
    assert outputs(tmp_path / "plain") == outputs(tmp_path / "packed")


def test_workers_are_as_many_as_wanted_up_to_a_multiple_of_the_cores(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert (limit_workers(5), caplog.text) == (5, "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert limit_workers(50) == 12
    assert "--workers 50 exceeds the limit of 12 for 3 cores" in caplog.text
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert limit_workers(50) == 50


def test_as_many_processes_encode_as_workers_are_asked_for(corpus, tmp_path):
    def children():
        return {child.pid for child in multiprocessing.active_children()}

    before, processes = children(), set()  # other tests of this process may have some

    def look(_progress):
        processes.update(children() - before)

    run(tmp_path / "out", corpus, workers=8, on_progress=look)
    assert len(processes) == 8


def test_worker_processes_give_the_same_bytes_in_order(corpus, tmp_path):
    run(tmp_path / "one", corpus, append_eod=True)
    run(tmp_path / "two", corpus, append_eod=True, workers=2)
    assert outputs(tmp_path / "one") == outputs(tmp_path / "two")
    assert set(outputs(tmp_path / "one")) == FILES


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "line 3: the line is empty"),
        (b'{"text": "cut of', "line 3: truncated JSON"),
        (b'{"text": "a",', "line 3: truncated JSON"),
        (b"plain words", "line 3: not JSON"),
        (b'["text"]', "line 3: a JSON list, not an object"),
        (b'{"body": "a"}', r"line 3: no key 'text' \(keys: body\)"),
        (b'{"text": 7}', "line 3: key 'text' holds int, not text"),
        (b'{"text": "\\ud800"}', "line 3: a lone surrogate"),
        (b'{"text": "\xff"}', "line 3: not UTF-8"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_number_or_skipped(tmp_path, caplog, line, reason):
    good = b'{"text": "good"}'
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join([good, good, line, good]) + b"\n")
    with pytest.raises(BadRecordError, match=rf"in\.jsonl, {reason}.*--on-bad-record skip"):
        run(tmp_path / "out", source)
    assert not (tmp_path / "out_text_document.idx").exists()
    with caplog.at_level(logging.WARNING):
        report = run(tmp_path / "out", source, on_bad_record="skip")
    assert report.num_documents == 3
    assert report.num_bad_records == 1
    assert "line 3" in report.bad_records[0]
    assert "line 3" in caplog.text
    assert set(outputs(tmp_path / "out")) == FILES


def test_line_numbers_count_over_blocks(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "some good words"}\n' * 50 + b"oops\n")
    with pytest.raises(BadRecordError, match="line 51"):
        run(tmp_path / "out", source)
    with pytest.raises(BadRecordError, match="line 51"):
        run(tmp_path / "out", source)  # continues, and counts on


def test_a_last_line_without_a_line_end_counts(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "a"}\n{"text": "b"}')
    assert run(tmp_path / "out", source).num_documents == 2


def test_a_truncated_archive_is_named(corpus, tmp_path):
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes())[:-200])
    with pytest.raises(RuntimeError, match=r"corpus\.jsonl\.gz is truncated or damaged"):
        run(tmp_path / "out", packed)
    assert not (tmp_path / "out_text_document.bin").exists()


@pytest.mark.parametrize("stop_after", [1, 5, 12])
def test_a_stopped_run_continues_to_the_same_bytes(corpus, tmp_path, stop_after):
    run(tmp_path / "whole", corpus, corpus, json_keys=("text", "title"))
    seen = []

    def stop(progress):
        seen.append(progress)
        if len(seen) == stop_after:
            raise KeyboardInterrupt

    again = {"json_keys": ("text", "title"), "on_progress": seen.append}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", corpus, corpus, **{**again, "on_progress": stop})
    total = seen[0].total_bytes
    assert total == 2 * corpus.stat().st_size
    seen.clear()
    run(tmp_path / "stopped", corpus, corpus, **again)
    assert outputs(tmp_path / "whole") == outputs(tmp_path / "stopped")
    assert seen[-1].done_bytes == total
    assert seen[0].done_bytes > stop_after * 300  # it did not begin again


def test_a_journal_of_other_options_is_not_continued(corpus, tmp_path):
    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", corpus, on_progress=stop)
    run(tmp_path / "out", corpus, append_eod=True)
    run(tmp_path / "other", corpus, append_eod=True)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "other")


def test_a_damaged_journal_is_named_and_nothing_is_written(corpus, tmp_path):
    run(tmp_path / "whole", corpus)
    seen = []

    def stop(progress):
        seen.append(progress)
        if len(seen) == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", corpus, on_progress=stop)
    journal = tmp_path / "out.journal.json"
    data = journal.read_bytes()
    fields = json.loads(data)
    before = outputs(tmp_path / "out")
    unknown = tmp_path / "unknown.json"
    replace_json(unknown, {**fields, "unknown": 1})
    damages = [b"", b"{}", b"[]", b"null", b"\xff", data[:-2], unknown.read_bytes()]
    changes = {"start": fields["start"] + 300, "outputs": {}, "fingerprint": 3}
    damages += [json.dumps({**fields, name: to}).encode() for name, to in changes.items()]
    for damage in damages:
        journal.write_bytes(damage)
        with pytest.raises(
            RuntimeError, match=r"out\.journal\.json, the progress of an .* Remove"
        ):
            run(tmp_path / "out", corpus)
        assert outputs(tmp_path / "out") == before | {".journal.json": damage}
    journal.write_bytes(data)
    run(tmp_path / "out", corpus)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")


def test_what_a_finished_run_renames_is_flushed_to_the_disk_before(
    corpus, tmp_path, monkeypatch
):
    """The order of system calls: a file is flushed, renamed, then its folder is flushed."""
    calls = []

    def note(name):
        real = getattr(os, name)

        def wrapper(first, *rest):
            path = os.readlink(f"/proc/self/fd/{first}") if name == "fsync" else str(first)
            calls.append((name, path.removeprefix(str(tmp_path)).lstrip("/"), *map(str, rest)))
            return real(first, *rest)

        monkeypatch.setattr(os, name, wrapper)

    note("fsync")
    note("replace")
    run(tmp_path / "out", corpus)
    renames = [call for call in calls if call[0] == "replace"]
    finals = {call[2].rsplit(".", 1)[1] for call in renames}
    assert finals == {"bin", "idx", "origins", "json"}
    saved = max(at for at, call in enumerate(calls) if call[-1].endswith("out.journal.json"))
    for rename in renames:
        at = calls.index(rename)
        assert ("fsync", rename[1]) in calls[0 if "journal" in rename[1] else saved : at]
        assert ("fsync", "") in calls[at:]
    journal = next(at for at, call in enumerate(calls) if "out.journal" in call[1])
    flushed = {call[1].split(".", 1)[1] for call in calls[:journal]}
    assert {f"{kind}.partial" for kind in ("bin", "lengths", "borders", "origins")} <= flushed


def test_a_kill_between_the_two_renames_is_mended(corpus, tmp_path):
    run(tmp_path / "whole", corpus, json_keys=("text", "title"))
    seen = []

    def stop_at_the_end(progress):
        if progress.done_bytes == progress.total_bytes:
            raise KeyboardInterrupt

    keys = {"json_keys": ("text", "title")}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", corpus, **keys, on_progress=stop_at_the_end)
    prefix = tmp_path / "cut_text_document"
    (tmp_path / "cut_text_document.bin.partial").rename(f"{prefix}.bin")
    run(tmp_path / "cut", corpus, **keys, on_progress=seen.append)
    assert outputs(tmp_path / "whole") == outputs(tmp_path / "cut")
    assert seen == []  # nothing was left to read


def test_append_eod_needs_a_tokenizer_that_has_one(corpus, tmp_path, bpe_folder):
    raw = json.loads(
        (bpe_folder / "tokenizer.json").read_text().replace("<|endoftext|>", "<x>")
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    nameless = TokenizerConfig(tokenizer_model=str(tmp_path))
    with pytest.raises(ValueError, match=r"--append-eod: .* no end-of-document token"):
        run(tmp_path / "out", corpus, tokenizer=nameless, append_eod=True)


def test_a_missing_input_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--input .*none\.jsonl is not a file"):
        run(tmp_path / "out", tmp_path / "none.jsonl")


def test_a_vocabulary_of_70000_is_stored_as_int32(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "69999 1"}\n')
    null = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=70000)
    run(tmp_path / "out", source, tokenizer=null, append_eod=True)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.dtype == np.int32
    assert dataset[0].tolist() == [69999, 1, 70000]


def test_the_manifest_says_what_was_read_made_and_verified(corpus, tmp_path, bpe_folder):
    tokenizer_config = TokenizerConfig(tokenizer_model=str(bpe_folder))
    options = {"tokenizer": tokenizer_config, "append_eod": True, "verify": "full"}
    report = run(tmp_path / "out", corpus, **options)
    prefix = report.prefixes["text"]
    facts = read_manifest(prefix)
    dataset = IndexedDataset(prefix)
    tokenizer = load_tokenizer(bpe_folder)
    assert (facts["documents"], facts["tokens"]) == (60, dataset.num_tokens)
    assert facts["tokenizer"]["sha256"] == tokenizer.fingerprint()
    assert facts["eod"] == tokenizer.eod
    assert facts["sentence_splitter"] == "none"
    assert facts["bad_records"] == {"skipped": 0, "first": []}
    assert facts["inputs"][0]["path"] == str(corpus)
    assert facts["inputs"][0]["size"] == corpus.stat().st_size
    checked = facts["verification"]
    assert checked["texts"] == checked["checked_texts"] == 60
    assert checked["checked_characters"] == sum(map(len, texts_of(corpus)))
    for kind in ("bin", "idx"):
        data = Path(f"{prefix}.{kind}").read_bytes()
        assert facts["files"][f"out_text_document.{kind}"] == {
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }


@pytest.mark.parametrize("workers", [1, 2])
def test_the_engine_gives_what_the_tokenizer_gives(corpus, tmp_path, bpe_folder, workers):
    pytest.importorskip("gigatoken")
    options = {
        "tokenizer": TokenizerConfig(tokenizer_model=str(bpe_folder)),
        "workers": workers,
    }
    engine = run(tmp_path / "a", corpus, **options, verify="full")
    assert read_manifest(engine.prefixes["text"])["tokenizer"]["engine"].startswith("gigatoken")
    exact = run(tmp_path / "b", corpus, **options, engine="reference")
    facts = read_manifest(exact.prefixes["text"])
    assert facts["verification"]["mode"] == "reference"
    assert outputs(tmp_path / "a") == outputs(tmp_path / "b")


@pytest.mark.parametrize("partitions", [2, 5])
def test_parts_are_joined_to_the_pair_of_an_undivided_run(corpus, tmp_path, partitions):
    keys = {"json_keys": ("text", "title"), "append_eod": True}
    run(tmp_path / "whole", corpus, corpus, **keys)
    seen = []
    parts = {**keys, "partitions": partitions, "on_progress": seen.append}
    report = run(tmp_path / "parts" / "out", corpus, corpus, **parts)
    assert report.num_documents == 120
    for key in keys["json_keys"]:
        for kind in ("bin", "idx"):
            name = f"{key}_document.{kind}"
            joined = (tmp_path / "parts" / f"out_{name}").read_bytes()
            assert joined == (tmp_path / f"whole_{name}").read_bytes()
        facts = read_manifest(tmp_path / "parts" / f"out_{key}_document")
        assert facts["verification"]["texts"] == 240  # of both keys
        assert [one["pair"] for one in facts["merged_from"]] == [
            f"out_{part}_{key}_document" for part in range(partitions)
        ]
    seen.clear()
    again = run(tmp_path / "parts" / "out", corpus, corpus, **parts)
    assert seen == []  # finished parts are left as they are
    assert again == report


def test_one_part_on_each_host_is_the_same_once_merged(corpus, tmp_path):
    run(tmp_path / "whole", corpus)
    for part in (1, 0, 2):
        run(tmp_path / "parts" / "out", corpus, partitions=3, partition=part)
    names = [tmp_path / "parts" / f"out_{part}_text_document" for part in range(3)]
    merge_pairs(names, tmp_path / "merged")
    for kind in ("bin", "idx"):
        whole = (tmp_path / f"whole_text_document.{kind}").read_bytes()
        assert (tmp_path / f"merged.{kind}").read_bytes() == whole


def test_a_bad_line_in_a_later_part_has_its_number_in_the_file(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "some good words"}\n' * 50 + b"oops\n")
    with pytest.raises(BadRecordError, match="line 51"):
        run(tmp_path / "out", source, partitions=3)


def test_parts_are_counted_from_0(corpus, tmp_path):
    with pytest.raises(ValueError, match="counted from 0"):
        run(tmp_path / "out", corpus, partitions=2, partition=2)
    with pytest.raises(ValueError, match="no effect without --partitions"):
        run(tmp_path / "out", corpus, partition=0)
    with pytest.raises(ValueError, match="--lang german has no effect"):
        run(tmp_path / "out", corpus, lang="german")


def test_a_text_has_one_key(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(ValueError, match=r"--json-keys text title: .*a\.txt is plain text"):
        run(tmp_path / "out", tmp_path / "a.txt", json_keys=("text", "title"))


def test_a_kill_before_the_manifest_is_mended(corpus, tmp_path):
    whole = run(tmp_path / "whole", corpus)

    def stop_at_the_end(progress):
        if progress.done_bytes == progress.total_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", corpus, on_progress=stop_at_the_end)
    stand = json.loads((tmp_path / "cut.journal.json").read_text())["outputs"]["text"]
    IndexedWriter(tmp_path / "cut_text_document", "uint16", resume_at=stand).finalize()
    run(tmp_path / "cut", corpus)
    assert outputs(tmp_path / "whole") == outputs(tmp_path / "cut")
    facts = [read_manifest(tmp_path / f"{name}_text_document") for name in ("whole", "cut")]
    hashes = [[file["sha256"] for file in one["files"].values()] for one in facts]
    assert hashes[0] == hashes[1]
    assert whole.num_documents == facts[1]["documents"]


def test_what_came_by_standard_input_begins_anew(corpus, tmp_path, monkeypatch):
    run(tmp_path / "whole", corpus)

    def stop(progress):
        raise KeyboardInterrupt

    for on_progress in (stop, None):

        class Stdin:
            buffer = io.BytesIO(corpus.read_bytes())

        monkeypatch.setattr(sys, "stdin", Stdin)
        try:
            run(tmp_path / "out", "-", on_progress=on_progress)
        except KeyboardInterrupt:
            assert on_progress is stop
    assert outputs(tmp_path / "whole") == outputs(tmp_path / "out")
