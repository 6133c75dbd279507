import base64
import json
import os
import signal
from contextlib import closing
from functools import partial

import pytest
from forks import exit_code, fork

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.engines.gigatoken import GigatokenEngine
from mcore_data.engines.spot_check import EngineDifferenceError
from mcore_data.preprocessing.preprocessing import preprocess
from mcore_data.preprocessing.reference_process import ReferenceProcess
from mcore_data.preprocessing.tokenizing import build_tools
from mcore_data.tokenizers.tiktoken_ranks import build_tiktoken

TEXTS = [f"the {i}th of them, and then \u4f60 once more {'on ' * (i % 9)}" for i in range(3000)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "tokenizer.model"
    names = [bytes([b]) for b in range(256)] + [b"th", b"the", b" t", b" th", b" the", b"on"]
    lines = [f"{base64.b64encode(name).decode()} {i}\n" for i, name in enumerate(names)]
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def configs(ranks, lines, folder, **options):
    config = {"input": (str(lines),), "output_prefix": f"{folder}/out", "append_eod": True}
    return PreprocessConfig(**(config | {"workers": 2} | options)), TokenizerConfig(
        tokenizer_type="TikTokenizer",
        tokenizer_model=str(ranks),
        tiktoken_num_special_tokens=0,
        tokenizer_special_tokens=("<|endoftext|>",),
    )


def test_it_encodes_as_the_tokenizer_which_is_not_opened_here(ranks):
    tokenizer, same = build_tiktoken(ranks), build_tiktoken(ranks)
    with closing(ReferenceProcess(tokenizer)) as process:
        assert process.encode_batch(TEXTS[:9]) == same.encode_batch(TEXTS[:9])
        assert process.encode("the</s>", add_special_tokens=False) == same.encode("the</s>")
    assert tokenizer.opens_late
    assert not same.opens_late


def _ask(process, tokenizer, text):
    for _ in range(10):
        assert process.encode(text) == tokenizer.encode(text)


def test_forked_processes_ask_one_at_a_time(ranks):
    tokenizer = build_tiktoken(ranks)
    with closing(ReferenceProcess(build_tiktoken(ranks))) as process:
        texts = [f"the {i} " * i for i in (1, 2000)]
        asking = [fork(partial(_ask, process, tokenizer, text)) for text in texts]
        assert [exit_code(child) for child in asking] == [0, 0]


def test_what_the_tokenizer_raises_is_raised_where_it_was_asked(ranks):
    with closing(ReferenceProcess(build_tiktoken(ranks))) as process:
        with pytest.raises(TypeError) as error:
            process.encode_batch([1])  # pyrefly: ignore
        assert "in the reference tokenizer's process" in error.value.__notes__[0]
        assert process.encode("the") == [257 + 1000]


def test_its_death_is_said(ranks):
    with closing(ReferenceProcess(build_tiktoken(ranks))) as process:
        process.encode("a")
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="process of the reference tokenizer died"):
            process.encode("a")


def test_workers_sample_by_it_and_write_what_one_process_writes(ranks, lines, tmp_path):
    pytest.importorskip("gigatoken")
    config, tokenizer = configs(ranks, lines, tmp_path)
    with closing(build_tools(config, tokenizer)) as tools:
        assert tools.tokenizer.opens_late
    manifests = []
    for name, workers, verify in (
        ("two", 2, "sample"),
        ("one", 1, "sample"),
        ("all", 2, "full"),
    ):
        config, tokenizer = configs(
            ranks, lines, tmp_path / name, workers=workers, verify=verify
        )
        preprocess(config, tokenizer, block_bytes=20_000)
        path = tmp_path / name / "out_text_document.manifest.json"
        manifests.append(json.loads(path.read_text()))
    assert len({each["files"]["out_text_document.bin"]["sha256"] for each in manifests}) == 1
    checked = [each["verification"]["checked_texts"] for each in manifests]
    assert 0 < checked[0] == checked[1] < checked[2] == len(TEXTS)


def test_a_difference_found_by_it_stops_the_run(ranks, lines, tmp_path, monkeypatch):
    pytest.importorskip("gigatoken")
    encode = GigatokenEngine.encode

    def wrong(self, texts):
        right = encode(self, texts)
        return [
            ids[:-1] if text in TEXTS else ids for ids, text in zip(right, texts, strict=True)
        ]

    monkeypatch.setattr(GigatokenEngine, "encode", wrong)
    config, tokenizer = configs(ranks, lines, tmp_path)
    with pytest.raises(EngineDifferenceError, match=r"in\.jsonl, line \d+"):
        preprocess(config, tokenizer, block_bytes=20_000)


def test_without_an_engine_the_tokenizer_is_opened_before_the_workers(ranks, lines, tmp_path):
    for option in ({"engine": "reference"}, {"verify": "full"}):
        config, tokenizer = configs(ranks, lines, tmp_path, **option)
        with closing(build_tools(config, tokenizer)) as tools:
            assert tools.reference is None
            assert not tools.tokenizer.opens_late
