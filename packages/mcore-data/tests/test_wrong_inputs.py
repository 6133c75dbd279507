"""What users get wrong, and the one line that tells them what to change."""

import numpy as np
import pytest

from mcore_data.cli import main
from mcore_data.indexed.writer import IndexedWriter

GOOD = '{"text": "good"}\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a few right and many wrong files."""
    monkeypatch.chdir(tmp_path)
    files = {
        "good.jsonl": GOOD,
        "empty.jsonl": "",
        "list.jsonl": GOOD + '["a"]\n',
        "array.json": '[{"text": "a"}, {"text": "b"}]',
        "pretty.json": '{\n  "text": "a"\n}\n',
        "number.jsonl": '{"text": 5}\n',
        "half.jsonl": '{"text": "a\\ud800b"}\n',
        "nul.jsonl": GOOD + "\0\0\n",
        "zipped.jsonl": b"\x1f\x8b\x08\x00",
        "plain.jsonl.gz": GOOD,
        "utf16.jsonl": GOOD.encode("utf-16"),
        "latin.jsonl": b'{"text": "\xe9"}\n',
        "words.txt": "just words",
        "names.json": '["a_text_document"]',
        "chats.jsonl": '{"messages": [{"role": "assistant"}]}\n',
    }
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
    for name in ("a_text_document", "b_text_document"):
        with IndexedWriter(name, "uint16") as writer:
            writer.add_documents(np.arange(100), np.full(10, 10))
    (tmp_path / "none").mkdir()
    return tmp_path


PREPROCESS = ("preprocess", "--output-prefix", "out", "--tokenizer-type", "ByteTokenizer")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "list.jsonl",
            "line 2: a JSON list, not an object; a record is one object on one line",
        ),
        (
            "array.json",
            "line 1: a JSON list, not an object; a record is one object on one line",
        ),
        ("pretty.json", "line 1: truncated JSON"),
        ("number.jsonl", "line 1: key 'text' holds int, not text"),
        ("half.jsonl", "line 1: a lone surrogate"),
        ("nul.jsonl", "line 2: not JSON"),
        (
            "zipped.jsonl",
            "line 1: not UTF-8 but gzip's bytes: name the file .gz, or unpack it into the pipe",
        ),
        ("plain.jsonl.gz", "plain.jsonl.gz is truncated or damaged: gzip: Error -3"),
        ("utf16.jsonl", "line 1: not UTF-8 but UTF-16: convert the file"),
        ("latin.jsonl", "line 1: not UTF-8 (invalid continuation byte at byte 10)"),
        ("none", "--input none is not a file, and not a folder"),
        ("part-*.jsonl", "--input part-*.jsonl is not a file, and not a folder"),
    ],
)
def test_a_wrong_input_is_told_in_one_line(folder, capsys, name, message):
    assert main([*PREPROCESS, "--input", name]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mcore-data: error: ")
    assert message in line
    assert not list(folder.glob("out*.bin"))


def test_inputs_without_a_record_are_warned_of(folder, capsys):
    assert main([*PREPROCESS, "--input", "empty.jsonl"]) == 0
    assert "warning: the inputs hold no record" in capsys.readouterr().err


def test_a_skipped_record_is_named_once_and_all_are_counted(folder, capsys, caplog):
    (folder / "two.jsonl").write_text('{"text": "good"}\nnone\n{"text": "good"}\nnor here\n')
    words = ["--output-prefix", "two", "--on-bad-record", "skip", *typed("ByteTokenizer")]
    assert main(["preprocess", "--input", "two.jsonl", *words]) == 0
    told = [record.message for record in caplog.records]
    assert [line.split(":")[1] for line in told] == [" two.jsonl, line 2", " two.jsonl, line 4"]
    assert capsys.readouterr().err.splitlines() == ["bad records skipped in all: 2"]


def test_marks_and_line_ends_of_other_systems_are_read(folder, capsys):
    (folder / "windows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "bc"}\r\n')
    assert main([*PREPROCESS, "--input", "windows.jsonl"]) == 0
    assert "2 documents, 3 tokens" in capsys.readouterr().out


def typed(kind, *words):
    return ("--tokenizer-type", kind, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (typed("HuggingFaceTokenizer"), "needs --tokenizer-model"),
        (typed("SFTTokenizer", "--tokenizer-model", "no"), "never downloaded"),
        (typed("HuggingFaceTokenizer", "--tokenizer-model", "none"), "in its fast form"),
        (typed("HuggingFaceTokenizer", "--tokenizer-model", "words.txt"),
         "not a tokenizer.json"),
        (typed("GPT2BPETokenizer", "--vocab-file", "words.txt"), "needs --merge-file"),
        (typed("BertWordPieceCase", "--vocab-file", "words.txt"),
         "it is not a BERT vocabulary"),
        (typed("SentencePieceTokenizer", "--tokenizer-model", "words.txt"),
         "--tokenizer-model words.txt is not a SentencePiece model"),
        (typed("TikTokenizer", "--tokenizer-model", "words.txt"), "holds no mergeable ranks"),
        (typed("TikTokenizer", "--tokenizer-model", "none"), "none is a folder, and"),
        (typed("NullTokenizer"), "needs --vocab-size"),
        (typed("NullTokenizer", "--vocab-size", "9"), "reads numbers only, not 'good'"),
        (typed("ByteTokenizer", "--json-keys", "body"), "no key 'body' (keys: text)"),
        (typed("ByteTokenizer", "--output-prefix", "/proc/x"), "/proc cannot be written"),
        (typed("ByteTokenizer", "--output-prefix", "words.txt/x"),
         "words.txt cannot be written"),
        (typed("ByteTokenizer", "--output-prefix", "memory://bucket/x"),
         "memory://bucket/x is in an object store: give --scratch-path"),
        (typed("ByteTokenizer", "--output-prefix", "a"),
         "a_text_document.bin exists and was written from other inputs"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_told_in_one_line(folder, capsys, words, message):
    before = (folder / "a_text_document.bin").read_bytes()
    start = ["preprocess", "--input", "good.jsonl", "--output-prefix", "out"]
    assert main([*start, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert (folder / "a_text_document.bin").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data-path", "a"), "a.idx does not exist. Did you mean a_text_document?"),
        (("--data-path", "a_text_document.bin"), "goes without .bin and .idx: give a_text_doc"),
        (("--data-path", "c"), "c.idx does not exist. Give a prefix for which both"),
        (("--data-path", "1", "a_text_document", "1"), "3 words cannot be alternating weights"),
        (("--data-path", "-1", "a_text_document", "2", "b_text_document"), "give numbers >= 0"),
        (("--data-path", "0", "a_text_document", "0", "b_text_document"), "not all 0"),
        (("--data-path", "a_text_document", "--split", "0,0"), "give up to three shares"),
        (("--data-path", "a_text_document", "--seq-length", "999", "--num-samples", *"000"),
         "fewer than one sample of 1000: give it more documents or lower --seq-length"),
        (("--data-path", "a_text_document", "--seq-length", "0"), "of --seq-length 0 cannot"),
        (("--data-path", "a_text_document", "--num-samples", "-1", "0", "0"), "-1 samples of"),
        (("--data-path", "a_text_document", "--data-cache-path", "words.txt"),
         "--data-cache-path words.txt cannot be written (File exists)"),
        (("--data-path", "a_text_document", "--data-cache-path", "/proc/self"),
         "/proc/self cannot be written"),
        (("--data-path", "a_text_document", "--sft"), "of mcore-data prepare-chats"),
        (("--data-args-path", "no"), "--data-args-path no is not a file"),
        (("--per-split-data-args-path", "no"), "--per-split-data-args-path no is not a file"),
        (("--per-split-data-args-path", "words.txt"), "words.txt is not JSON: Expecting value"),
        (("--per-split-data-args-path", "array.json"), "give an object of train, valid, test"),
        (("--data-mixture-path", "words.txt"), "--data-mixture-path words.txt is not JSON"),
        (("--data-mixture-path", "names.json"), "a phase is an object, not 'a_text_document'"),
        (("--data-mixture-path", "array.json"), "a phase has data_path and either from_sample"),
    ],
)  # fmt: skip
def test_wrong_training_data_are_told_in_one_line(folder, capsys, words, message):
    start = ["index", "--seq-length", "5", "--num-samples", "9", "0", "0"]
    assert main([*start, "--data-cache-path", "cache", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train-tokenizer", "--input", "empty.jsonl", "--output", "t", "--vocab-size", "300"),
         "--input empty.jsonl holds no text to train on"),
        (("train-tokenizer", "--input", "good.jsonl", "--output", "words.txt",
          "--vocab-size", "300"), "--output words.txt: words.txt cannot be written"),
        (("merge", "--input", ".", "--output-prefix", "words.txt/m"), "cannot be written"),
        (("merge", "--input", "none", "--output-prefix", "m"), "none holds no .bin/.idx pair"),
        (("inspect", "a_text_document", "--tokenizer", "no"), "neither a tokenizer folder"),
        (("inspect", "a_text_document", "--samples", "-1"), "--samples -1 must be 0 or more"),
        (("verify", "s3://bucket/a"), "copy the pair to this machine first"),
        (("inspect", "a"), "Did you mean a_text_document?"),
        (("explain", "--run", "none", "--step", "1"), "of an mcore-train run that read"),
        (("prepare-chats", "--input", "no", "--output-prefix", "c", *typed("ByteTokenizer")),
         "--input no is not a file"),
        (("prepare-chats", "--input", "chats.jsonl", "--output-prefix", "c",
          *typed("ByteTokenizer")), "line 1: message 1 of 'messages' has no content"),
    ],
)  # fmt: skip
def test_other_commands_tell_in_one_line_too(folder, capsys, words, message):
    assert main(words) == 2
    line = "; ".join(part.strip(" :") for part in capsys.readouterr().err.splitlines())
    assert message in line
    assert not list(folder.glob("[cm]*.bin"))
