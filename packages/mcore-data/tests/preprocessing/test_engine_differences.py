"""A run whose engine gives other ids than the tokenizer, found by the texts themselves."""

import json
import shutil

import numpy as np
import pytest

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.engines.building import ReferenceEngine
from mcore_data.engines.spot_check import EngineDifferenceError
from mcore_data.indexed.manifest import read_manifest
from mcore_data.preprocessing import tokenizing
from mcore_data.preprocessing.preprocessing import preprocess

BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")


class _WrongOn(ReferenceEngine):
    """An engine that is wrong on texts with a certain letter."""

    name = "wrong"

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.name = "wrong"

    def encode(self, texts):
        pairs = zip(texts, super().encode(texts), strict=True)
        return [ids + np.uint32("\u4f60" in text) for text, ids in pairs]


@pytest.fixture
def wrong_engine(monkeypatch):
    def build(tokenizer, name):
        return ReferenceEngine(tokenizer) if name == "reference" else _WrongOn(tokenizer)

    monkeypatch.setattr(tokenizing, "build_engine", build)


@pytest.fixture
def source(tmp_path):
    texts = [f"text number {number}" for number in range(900)]
    texts[700] = "a \u4f60"
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(source, prefix, **options):
    config = PreprocessConfig(input=(str(source),), output_prefix=str(prefix), **options)
    return preprocess(config, BYTES, block_bytes=4000)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"partitions": 3}])
def test_a_difference_begins_anew_with_the_tokenizer(
    wrong_engine, source, tmp_path, caplog, options
):
    report = run(source, tmp_path / "out", **options)
    run(source, tmp_path / "right", **options, engine="reference")
    assert "--engine wrong and the tokenizer differ on" in caplog.text
    assert "Starting again with the tokenizer itself." in caplog.text
    assert (report.engine, report.num_checked_texts, report.num_texts) == (
        "reference",
        900,
        900,
    )
    for kind in ("bin", "idx"):
        pair = [tmp_path / f"{name}_text_document.{kind}" for name in ("out", "right")]
        assert pair[0].read_bytes() == pair[1].read_bytes()
    assert read_manifest(tmp_path / "out_text_document")["verification"]["differences"] == 0


def test_a_difference_of_an_engine_that_was_asked_for_stops(wrong_engine, source, tmp_path):
    advice = r"differ on .*in\.jsonl.* Repeat the command with --engine reference"
    with pytest.raises(EngineDifferenceError, match=advice):
        run(source, tmp_path / "out", engine="gigatoken")
    assert not (tmp_path / "out.journal.json").exists()
    report = run(source, tmp_path / "out", engine="reference")
    assert report.num_checked_texts == 900  # none is left of the engine's


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sample_checks_the_first_texts_of_every_part(source, tmp_path, workers):
    options = {"partitions": 3, "workers": workers, "append_eod": True}
    shutil.copy(source, tmp_path / "b.jsonl")
    report = run(source, tmp_path / "out", **options)
    for part in range(3):
        checked = read_manifest(tmp_path / f"out_{part}_text_document")["verification"]
        assert 256 <= checked["checked_texts"] <= checked["texts"] < 350
    assert 3 * 256 <= report.num_checked_texts <= report.num_texts == 900
    assert run(source, tmp_path / "off", verify="off").num_checked_texts == 0


def test_texts_of_an_engine_are_not_counted_as_the_tokenizers(source, tmp_path):
    """A killed run of an engine that goes on with the tokenizer has checked some of its own."""

    def stop(progress):
        if progress.num_documents > 600:
            raise KeyboardInterrupt

    config = PreprocessConfig(
        input=(str(source),), output_prefix=str(tmp_path / "out"), verify="off"
    )
    with pytest.raises(KeyboardInterrupt):
        preprocess(config, BYTES, stop, block_bytes=4000)
    report = run(source, tmp_path / "out", engine="reference")
    assert 0 < report.num_checked_texts < 300
