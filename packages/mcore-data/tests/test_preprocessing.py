import bz2
import gzip
import json
import logging
import lzma

import numpy as np
import pytest

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.indexed import IndexedDataset
from mcore_data.preprocessing import preprocess
from mcore_data.records import BadRecordError
from mcore_data.tokenizer import load_tokenizer

BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")
EOD = 256


def run(prefix, *inputs, tokenizer=BYTES, on_progress=None, **options):
    config = PreprocessConfig(
        input=tuple(map(str, inputs)), output_prefix=str(prefix), **options
    )
    return preprocess(config, tokenizer, on_progress, block_bytes=300)


def texts_of(path, key="text"):
    return [json.loads(line)[key] for line in path.read_text().splitlines()]


def outputs(prefix):
    """Content of every file that belongs to a prefix, by what follows it."""
    return {
        path.name.removeprefix(prefix.name): path.read_bytes()
        for path in prefix.parent.glob(prefix.name + "*")
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
    run(tmp_path / "out", corpus, json_keys=("title", "parts"), append_eod=True)
    titles = IndexedDataset(tmp_path / "out_title_document")
    assert bytes(titles[7][:-1].tolist()).decode() == "Nr 7"
    parts = IndexedDataset(tmp_path / "out_parts_document")
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


def test_worker_processes_give_the_same_bytes_in_order(corpus, tmp_path):
    run(tmp_path / "one", corpus, append_eod=True)
    run(tmp_path / "two", corpus, append_eod=True, workers=2)
    assert outputs(tmp_path / "one") == outputs(tmp_path / "two")
    assert set(outputs(tmp_path / "one")) == {"_text_document.bin", "_text_document.idx"}


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
        (b'{"text": "\\ud800"}', "line 3: half of a surrogate pair"),
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
    assert set(outputs(tmp_path / "out")) == {"_text_document.bin", "_text_document.idx"}


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
