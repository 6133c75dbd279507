"""The commands as a user types them: by Python once, else in children forked for them."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from forks import run

from mcore_data.cli import main
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.tokenizers.building import load_tokenizer

TEXTS = ["In the beginning was the word.", "", "And the word was with care.", "word " * 50]


def data(*words, cwd="."):
    return run(main, *words, cwd=cwd)


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    folder = tmp_path_factory.mktemp("book")
    lines = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS))
    (folder / "book.jsonl").write_text(lines)
    with gzip.open(folder / "book.jsonl.gz", "wt") as file:
        file.write(lines)
    words = ("--input", "book.jsonl.gz", "--output", "tokenizer", "--vocab-size", "300")
    command = [sys.executable, "-m", "mcore_data", "train-tokenizer", *words]
    subprocess.run(command, check=True, cwd=folder)
    return folder


def test_help_lists_the_commands_and_loads_no_torch():
    code = (
        "import sys, mcore_data.cli as c; c.main(['--help']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    for name in ("preprocess", "merge", "inspect", "verify", "index", "train-tokenizer"):
        assert name in done.stdout


def test_preprocess_merge_inspect_verify_and_index(book, tmp_path):
    for name, source in (("a", "book.jsonl"), ("b", "book.jsonl.gz")):
        done = data(
            "preprocess",
            "--input",
            book / source,
            "--output-prefix",
            tmp_path / "parts" / name,
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            book / "tokenizer",
            "--workers",
            2,
            "--append-eod",
        )
        assert done.returncode == 0, done.stderr
        assert "4 documents" in done.stdout
    merged = tmp_path / "both"
    done = data("merge", "--input", tmp_path / "parts", "--output-prefix", merged)
    assert done.returncode == 0, done.stderr
    assert IndexedDataset(merged).num_documents == 8
    Path(f"{merged}.manifest.json").unlink()
    again = ("--output-prefix", merged, "--overwrite")
    parts = [tmp_path / "parts" / f"{name}_text_document" for name in ("a", "b")]
    assert data("merge", "--input", *parts, *again).returncode == 0  # by prefixes
    done = data("inspect", merged, "--tokenizer", book / "tokenizer", "--samples", 1)
    assert "num documents: 8" in done.stdout
    assert "checks: index, pointers and sizes fit, also to the manifest; encoded" in done.stdout
    assert "In the beginning was the word.<|endoftext|>" in done.stdout
    done = data("verify", merged)
    assert "no damage found" in done.stdout
    done = data(
        "index", "--data-path", merged, "--split", "1", "--data-cache-path", tmp_path / "cache",
        "--seq-length", 8, "--num-samples", 30, 0, 0,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "valid: none" in done.stdout
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_gpt2_files_of_the_founding_documents_are_read(book, tmp_path):
    model = json.loads((book / "tokenizer" / "tokenizer.json").read_text())["model"]
    vocab = {**model["vocab"]}
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(vocab))
    pairs = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (tmp_path / "gpt2-merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    done = data(
        "preprocess", "--input", book / "book.jsonl", "--output-prefix", "gpt2",
        "--vocab-file", "gpt2-vocab.json", "--merge-file", "gpt2-merges.txt",
        "--tokenizer-type", "GPT2BPETokenizer", "--append-eod", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dataset = IndexedDataset(tmp_path / "gpt2_text_document")
    assert (len(dataset), dataset.num_documents) == (3, 4)
    tokenizer = load_tokenizer(book / "tokenizer")  # of the same merges
    wanted = [[*tokenizer.encode(text), tokenizer.eod] for text in TEXTS if text]
    assert [document.tolist() for document in dataset] == wanted


@pytest.mark.parametrize("line", ['{"text": "cut of', "not json", '{"other": "key"}', ""])
def test_a_bad_line_is_refused_with_its_number_and_nothing_is_left(book, tmp_path, line):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' + line + '\n{"text": "more"}\n')
    words = (
        "preprocess", "--input", "bad.jsonl", "--output-prefix", "out",
        "--tokenizer-model", book / "tokenizer",
    )  # fmt: skip
    done = data(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "bad.jsonl" in done.stderr
    assert "line 2" in done.stderr
    assert not list(tmp_path.glob("out*.bin"))
    assert not list(tmp_path.glob("out*.idx"))
    done = data(*words, "--on-bad-record", "skip", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 documents" in done.stdout
    assert "line 2" in done.stderr


def test_an_unknown_flag_names_the_nearest():
    done = data("preprocess", "--imput", "x")
    assert done.returncode == 2
    assert "--input" in done.stderr + done.stdout


def test_an_unknown_command_names_the_nearest():
    done = data("preproces")
    assert done.returncode == 2
    assert "did you mean preprocess?" in done.stderr


def test_a_missing_input_is_bad_input(tmp_path):
    done = data(
        "preprocess", "--input", tmp_path / "no.jsonl", "--output-prefix", tmp_path / "x",
        "--tokenizer-type", "ByteTokenizer",
    )  # fmt: skip
    assert done.returncode == 2
    assert "no.jsonl" in done.stderr


def test_a_damaged_pair_does_not_verify(book, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "some text"}\n')
    data(
        "preprocess", "--input", "x.jsonl", "--output-prefix", "x",
        "--tokenizer-type", "ByteTokenizer", cwd=tmp_path,
    )  # fmt: skip
    pair = tmp_path / "x_text_document.bin"
    pair.write_bytes(pair.read_bytes()[:-1])
    done = data("verify", "x_text_document", cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert "x_text_document" in done.stderr


def test_the_command_of_the_documents_runs_in_the_folder_examples(book, tmp_path):
    examples = Path(__file__).parents[3] / "examples"
    (tmp_path / "bert-vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\nthe\n.\n")
    done = subprocess.run(
        [
            *(sys.executable, "tools/preprocess_data.py", "--input", book / "book.jsonl"),
            *("--output-prefix", tmp_path / "my-bert"),
            *("--vocab-file", tmp_path / "bert-vocab.txt"),
            *("--tokenizer-type", "BertWordPieceLowerCase", "--split-sentences"),
            *("--workers", "2", "--keep-sequential-samples", "--log-interval", "2"),
        ],
        capture_output=True, text=True, check=False, cwd=examples,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 documents" in done.stdout
    assert "100 %" in done.stderr
    assert IndexedDataset(tmp_path / "my-bert_text_sentence").num_documents == 4


def test_options_beside_a_plan_are_refused(book, tmp_path):
    tokenizer = ("--tokenizer-model", book / "tokenizer")
    words = ("--input", book / "book.jsonl", "--output-prefix", tmp_path / "c", *tokenizer)
    assert data("plan", *words, "--unit-size", "100B").returncode == 0
    plan = ("--plan", tmp_path / "c.plan.json")
    done = data("preprocess", *plan, *tokenizer, "--append-eod")
    assert done.returncode == 2
    assert (
        "--append-eod and --tokenizer-model with --plan: these options are part of the plan"
        in done.stderr
    )
    for command in (("merge",), ("merge", *plan, "--input", "a"), ("preprocess",)):
        assert "give --input and --output-prefix, or" in data(*command).stderr
    assert "only --plan (with --physical" in data("merge", *words[:4], "--physical").stderr
    assert "--unit-size big is not a size" in data("plan", *words, "--unit-size", "big").stderr
    assert data("preprocess", *plan).returncode == 0
    assert "next: mcore-data merge --plan" in data("status", *plan).stdout
    done = data("merge", *plan, "--physical")
    assert "c_text_document.bin/.idx: 4 documents" in done.stdout
