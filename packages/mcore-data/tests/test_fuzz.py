"""Preprocessing and reading under whatever may come."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.indexed.index_format import CorruptDatasetError, bin_path, idx_path
from mcore_data.indexed.inspection import verify_pair
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.preprocessing.preprocessing import preprocess
from mcore_data.tokenizers.building import load_tokenizer

BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")


def run(folder, lines, tokenizer=BYTES, block_bytes=1 << 22, **options):
    """Preprocess lines and return the dataset."""
    with open(folder / "in.jsonl", "wb") as file:
        file.writelines(lines)
    config = PreprocessConfig(
        input=(str(folder / "in.jsonl"),), output_prefix=str(folder / "out"), **options
    )
    preprocess(config, tokenizer, block_bytes=block_bytes)
    return IndexedDataset(folder / "out_text_document")


@settings(max_examples=20, deadline=None)
@given(
    texts=st.lists(st.text(max_size=30), max_size=12),
    ascii_only=st.booleans(),
    block_bytes=st.integers(1, 200),
)
def test_any_text_comes_back_from_its_tokens(
    tmp_path_factory, bpe_folder, texts, ascii_only, block_bytes
):
    folder = tmp_path_factory.mktemp("fuzz")
    lines = [json.dumps({"text": t}, ensure_ascii=ascii_only).encode() + b"\n" for t in texts]
    tokenizer_config = TokenizerConfig(tokenizer_model=str(bpe_folder))
    dataset = run(folder, lines, tokenizer_config, block_bytes, verify="full", append_eod=True)
    tokenizer = load_tokenizer(bpe_folder)
    borders = dataset.documents
    assert dataset.num_documents == len(texts)
    for number, text in enumerate(texts):
        tokens = [
            ids.tolist() for ids in dataset[int(borders[number]) : int(borders[number + 1])]
        ]
        assert bool(tokens) == bool(text)
        if tokens:
            assert tokens[0].pop() == tokenizer.eod
            assert tokenizer.decode(tokens[0]) == text
    assert "checksums" in verify_pair(folder / "out_text_document")


@pytest.mark.parametrize("num_ids", [65_498, 65_499, 65_500, 65_535, 65_536, 70_000])
def test_ids_at_the_limits_of_the_dtypes_come_back(tmp_path, num_ids):
    tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=num_ids)
    lines = [json.dumps({"text": f"0 {num_ids - 1} 1"}).encode()]
    dataset = run(tmp_path, lines, tokenizer, append_eod=True)
    assert dataset.dtype == (np.uint16 if num_ids + 1 < 65_500 else np.int32)
    assert dataset[0].tolist() == [0, num_ids - 1, 1, num_ids]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A pair of 40 documents of several sentences, and what it holds."""
    folder = tmp_path_factory.mktemp("sound")
    lines = [json.dumps({"text": [f"{i}" * (j + 1) for j in range(i % 4)]}) + "\n"
             for i in range(40)]  # fmt: skip
    dataset = run(folder, [line.encode() for line in lines])
    prefix = folder / "out_text_document"
    return (
        idx_path(prefix).read_bytes(),
        bin_path(prefix).read_bytes(),
        (folder / "out_text_document.manifest.json").read_bytes(),
        [sequence.tolist() for sequence in dataset],
    )


DAMAGE = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 10**6), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.integers(0, 10**6), st.just(0)),
    st.tuples(st.just("grow"), st.integers(1, 40), st.integers(0, 255)),
    st.tuples(st.just("zero"), st.integers(0, 10**6), st.integers(1, 64)),
)


def damaged(data, kind, at, much):
    at = at if kind == "grow" else at % len(data)
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ much]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "grow":
        return data + bytes([much]) * at
    return (data[:at] + bytes(much) + data[at + much :])[: len(data)]


@settings(max_examples=50, deadline=None)
@given(damage=DAMAGE, kind=st.sampled_from(["idx", "bin"]))
def test_a_damaged_pair_is_an_error_or_reads_the_same_and_never_verifies(
    tmp_path_factory, sound, damage, kind
):
    idx, tokens, manifest, sequences = sound
    whole = idx if kind == "idx" else tokens
    wrong = damaged(whole, *damage)
    if wrong == whole:
        return
    prefix = tmp_path_factory.mktemp("damaged") / "x"
    idx_path(prefix).write_bytes(wrong if kind == "idx" else idx)
    bin_path(prefix).write_bytes(wrong if kind == "bin" else tokens)
    (prefix.parent / "x.manifest.json").write_bytes(manifest)
    try:
        dataset = IndexedDataset(prefix)
    except CorruptDatasetError:
        pass
    else:
        assert kind == "bin" or dataset.dtype != np.uint16 or (
            [sequence.tolist() for sequence in dataset] == sequences
        )  # fmt: skip
    with pytest.raises(CorruptDatasetError):
        verify_pair(prefix)


@pytest.mark.slow
def test_a_document_of_100_megabytes_is_one_sequence(tmp_path):
    text = "in the beginning was a word \u4f60 " * 3_125_000
    dataset = run(
        tmp_path, [json.dumps({"text": text}, ensure_ascii=False).encode()], workers=2
    )
    assert dataset.num_documents == len(dataset) == 1
    assert bytes(dataset[0].astype(np.uint8)).decode() == text


@pytest.mark.slow
def test_ten_million_tiny_documents_keep_their_places(tmp_path):
    lines = (b'{"text": "%d"}\n' % (i % 10) * (i % 3 > 0) or b'{"text": ""}\n'
             for i in range(10_000_000))  # fmt: skip
    dataset = run(tmp_path, lines, workers=2)
    assert dataset.num_documents == 10_000_000
    wanted = np.arange(10_000_000)
    wanted = wanted[wanted % 3 > 0] % 10 + ord("0")
    assert (np.fromfile(bin_path(dataset.prefix), "<u2") == wanted).all()
