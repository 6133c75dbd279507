"""Text that the ranks of a run tokenize gives the samples of preprocessed data."""

import json
from dataclasses import replace

import pytest
from forks import exit_code, fork

from mcore_data.config import DataConfig, PreprocessConfig, TokenizerConfig
from mcore_data.datasets.from_flags import build_gpt_datasets
from mcore_data.preprocessing import on_the_fly
from mcore_data.preprocessing.on_the_fly import tokenize_sources
from mcore_data.preprocessing.preprocessing import preprocess

BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")


def interrupt(plan):
    raise KeyboardInterrupt


def write(path, letter):
    rows = ({"data": {"text": f"{letter} {i} " * (i % 9)}} for i in range(400))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_ranks_that_tokenize_text_together_get_the_samples_of_preprocessed_data(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(on_the_fly, "_UNIT_BYTES", 3000)
    monkeypatch.setattr(on_the_fly, "_PAUSE_S", 0.01)
    texts = [write(tmp_path / f"{letter}.jsonl", letter) for letter in "ab"]
    config = DataConfig(
        data_path=("0.3", texts[0], "0.7", texts[1]),
        data_cache_path=str(tmp_path / "cache"),
        tokenize_on_the_fly=True,
        text_key="data.text",
    )
    ranks = [fork(lambda: tokenize_sources(config, BYTES) and 0) for _ in range(3)]
    assert [exit_code(rank) for rank in ranks] == [0, 0, 0]
    caplog.set_level("INFO")
    ours = tokenize_sources(config, BYTES)  # a rank that comes back
    assert caplog.text.count(", the tokens of") == 2
    pairs = []
    for text in texts:
        job = PreprocessConfig(
            input=(text,), output_prefix=text, json_keys=("data.text",), append_eod=True
        )
        preprocess(job, BYTES)
        pairs.append(f"{text}_data.text_document")
    theirs = DataConfig(data_path=("0.3", pairs[0], "0.7", pairs[1]))
    first, second = (
        build_gpt_datasets(each, None, sequence_length=32, seed=2, num_samples=(90, 4, 0))
        for each in (replace(ours, data_cache_path=""), theirs)
    )
    for split in (0, 1):
        for sample in range(len(second[split])):
            one, other = (each[split][sample]["tokens"].tolist() for each in (first, second))
            assert one == other
    write(tmp_path / "a.jsonl", "c")
    monkeypatch.setattr(on_the_fly, "merge_plan", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenize_sources(config, BYTES)
    monkeypatch.undo()
    # A continued run has a copy of the tokenizer, with other options for the same ids.
    changed = tokenize_sources(config, replace(BYTES, tiktoken_num_special_tokens=5))
    assert changed.data_path[1] != ours.data_path[1]
    assert changed.data_path[3] == ours.data_path[3]
