import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mcore_data.config import DataConfig
from mcore_data.datasets.blending import BlendedDataset
from mcore_data.datasets.data_paths import Blend, parse_blend
from mcore_data.datasets.from_flags import build_gpt_datasets
from mcore_data.indexed.writer import IndexedWriter
from mcore_data.tokenizers.building import load_tokenizer


@pytest.fixture
def pair(tmp_path):
    """Two datasets of 100 documents of 10 tokens: ids below 1000, and above."""
    for name, first in (("a", 0), ("b", 1000)):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            writer.add_documents(np.arange(first, first + 1000), np.full(100, 10))
    return str(tmp_path / "a"), str(tmp_path / "b")


def build(num_samples=(0, 0, 0), **flags):
    return build_gpt_datasets(
        DataConfig(**flags), None, sequence_length=9, seed=1, num_samples=num_samples
    )


def with_weights(prefixes, weights):
    if not weights:
        return prefixes
    return tuple(word for pair in zip(weights, prefixes, strict=True) for word in pair)


def tokens_of(dataset, limit=1000):
    return {int(t) for k in range(min(len(dataset), limit)) for t in dataset[k]["tokens"]}


def test_one_dataset_is_split_by_documents(pair):
    train, valid, test = build(data_path=pair[:1], split="80,20")
    assert test is None
    assert tokens_of(train) <= set(range(800))
    assert tokens_of(valid) <= set(range(800, 1000))


def test_the_default_split_is_that_of_megatron(pair):
    train, valid, test = build(data_path=pair[:1], split="")
    assert max(tokens_of(train)) == 969  # 97 of 100 documents of 10 tokens
    assert min(tokens_of(valid)) == 970
    assert test is None


def test_samples_of_a_split_without_documents_are_refused(pair):
    with pytest.raises(ValueError, match=r"part 3 of --split 98,1,0.1: the split has no tok"):
        build(data_path=pair[:1], split="98,1,0.1", num_samples=(1, 1, 1))


@pytest.mark.parametrize("weights", [("3", "1"), ()])
def test_little_data_have_no_test_part_unless_one_is_asked_for(pair, weights, caplog):
    caplog.set_level("INFO", logger="mcore_data")
    for path in (pair[:1], with_weights(pair, weights)):
        caplog.clear()
        train, valid, test = build(data_path=path, num_samples=(1, 1, 1))
        assert test is None
        is_asked = len(path) != len(pair)  # without weights datasets give what they have
        assert (f"leaves no document of {pair[0]}" in caplog.text) == is_asked
        assert len(train) > 0
        assert len(valid) > 0


def test_weights_mix_by_share(pair):
    train, _, test = build(
        data_path=("3", pair[0], "1", pair[1]), split="1", num_samples=(100, 0, 0)
    )
    assert test is None
    assert isinstance(train, BlendedDataset)
    assert np.bincount(train.dataset_index).tolist() == [75, 25]


def test_the_last_tokens_of_validation_data_are_dropped_or_padded(pair):
    words = {"data_path": pair[:1], "split": "1,1"}  # 50 documents of 10 tokens each
    train, dropped, _ = build(**words)
    again, padded, _ = build(**words, drop_last_partial_validation_sequence=False)
    assert (len(train), len(dropped), len(again), len(padded)) == (55, 55, 55, 56)
    counted = [sum(d[k]["loss_mask"].sum() for k in range(len(d))) for d in (dropped, padded)]
    assert counted == [55 * 9, 499]


@pytest.mark.parametrize("weights", [("3", "1"), ()])
def test_datasets_built_by_many_threads_are_the_same(pair, tmp_path, weights):
    words = [word for both in zip(weights or pair, pair, strict=True) for word in both]
    options = {"data_path": words if weights else pair, "split": "7,3"}
    options["num_samples"] = (60, 30, 0)
    alone = build(**options)
    at_once = build(
        **options, num_dataset_builder_threads=4, data_cache_path=str(tmp_path / "cache")
    )
    for one, many in zip(alone[:2], at_once[:2], strict=True):
        assert len(one) == len(many)
        for k in range(len(one)):
            assert one[k]["tokens"].tolist() == many[k]["tokens"].tolist()


def test_prefixes_alone_use_each_once_or_as_far_as_asked(pair):
    train, _, _ = build(data_path=pair, split="1")
    assert len(train) == sum(len(dataset) for dataset in train.datasets)
    train, _, _ = build(data_path=pair, split="1", num_samples=(50, 0, 0))
    assert len(train) == 50


def test_only_the_splits_that_are_asked_for_are_built(pair):
    words = {"data_path": ("3", pair[0], "1", pair[1]), "split": "8,1,1"}
    built = build_gpt_datasets(
        DataConfig(**words), None, sequence_length=9, seed=1, num_samples=(20, 0, 0),
        only=("train",),
    )  # fmt: skip
    assert [dataset is None for dataset in built] == [False, True, True]
    mock = build_gpt_datasets(
        DataConfig(mock_data=True), None, sequence_length=9, seed=1, only=("valid",)
    )
    assert [dataset is None for dataset in mock] == [True, False, True]


@pytest.mark.parametrize("own", [False, True])
def test_full_validation_takes_every_sample_once_whatever_its_dataset_weighs(pair, own):
    words = ("3", pair[0], "1", pair[1])
    flags = {"data_path": words, "split": "5,5"}
    if own:
        flags = {"train_data_path": words, "valid_data_path": words}
    train, valid, _ = build(num_samples=(20, 0, 0), full_validation=True, **flags)
    assert np.bincount(train.dataset_index).tolist() == [15, 5]
    each = 111 if own else 55  # 1000 or 500 tokens, cut by 9
    assert np.bincount(valid.dataset_index).tolist() == [each, each]
    assert len(tokens_of(valid)) == 2 * each * 9


def test_weights_give_nothing_to_a_split_of_no_samples(pair):
    config = DataConfig(data_path=with_weights(pair, ("3", "1")), split="8,1,1")
    train, *others = build_gpt_datasets(
        config, None, sequence_length=4, seed=1, num_samples=(20, 0, 0)
    )
    assert len(train) >= 20
    assert others == [None, None]


def test_weights_without_a_size_are_refused(pair):
    with pytest.raises(ValueError, match="need a number of samples"):
        build(data_path=("3", pair[0], "1", pair[1]), split="1")


def test_splits_may_have_paths_of_their_own(pair, tmp_path):
    for flags in (
        {"train_data_path": pair[:1], "test_data_path": pair[1:]},
        {"per_split_data_args_path": str(tmp_path / "per_split.json")},
    ):
        (tmp_path / "per_split.json").write_text(
            json.dumps({"train": [pair[0]], "test": pair[1]})
        )
        train, valid, test = build(**flags)
        assert valid is None
        assert max(tokens_of(train)) < 1000 <= min(tokens_of(test))


def test_the_words_may_stand_in_a_file(pair, tmp_path):
    (tmp_path / "words").write_text(f"3 {pair[0]}\n1 {pair[1]}\n")
    train, _, _ = build(
        data_args_path=str(tmp_path / "words"), split="1", num_samples=(40, 0, 0)
    )
    assert np.bincount(train.dataset_index).tolist() == [30, 10]


def test_words_are_pairs_only_if_every_first_is_a_number():
    assert parse_blend(["a", "b"]) == Blend(("a", "b"), None)
    assert parse_blend(["1", "a", "2", "b"]) == Blend(("a", "b"), (1.0, 2.0))
    assert parse_blend(["1", "2", "3"]) == Blend(("1", "2", "3"), None)
    with pytest.raises(ValueError, match="a weight before each"):
        parse_blend(["1", "a", "b", "c"])
    with pytest.raises(ValueError, match="--data-path is empty"):
        parse_blend([])


def test_mock_data_needs_no_files_and_takes_the_tokenizers_vocabulary():
    train, valid, test = build(mock_data=True, num_samples=(5, 5, 5))
    assert all(len(dataset) >= 5 for dataset in (train, valid, test))
    assert max(tokens_of(train)) < 50_000
    bytes_only = load_tokenizer("ByteTokenizer")
    train, _, _ = build_gpt_datasets(
        DataConfig(mock_data=True),
        bytes_only,
        sequence_length=600,
        seed=1,
        num_samples=(5, 1, 1),
    )
    assert max(tokens_of(train)) <= 256


def test_mock_data_for_short_sequences_has_a_short_index_that_no_length_of_run_changes():
    short, long = (build(mock_data=True, num_samples=(n, 0, 0))[0] for n in (5, 5000))
    assert 100_000 < len(short) == len(long) < 1_000_000
    assert (short[3]["tokens"] == long[3]["tokens"]).all()


def test_a_split_that_is_too_small_names_the_dataset(pair):
    with pytest.raises(
        ValueError, match=r"/a, part 2 of --split 999,1: the split has no tokens"
    ):
        build(data_path=pair[:1], split="999,1", num_samples=(1, 1, 0))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"mock_data": True, "data_path": ("a",)}, "one source of data, not --mock-data and"),
        ({"train_data_path": ("a",), "split": "1"}, "--split divides --data-path"),
        (
            {"num_dataset_builder_threads": 0},
            "--num-dataset-builder-threads 0 must be",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**flags)


def test_no_source_at_all_is_refused():
    with pytest.raises(ValueError, match="--data-path is empty"):
        build()


SIXTEEN = """
import hashlib, os, sys
from mcore_data.config import DataConfig
from mcore_data.datasets.from_flags import build_gpt_datasets

gate, opener = os.pipe()
for _ in range(16):
    if os.fork() == 0:
        os.close(opener)
        os.read(gate, 1)  # returns when the parent closes its end: all start at once
        config = DataConfig(data_path=("3", sys.argv[1], "1", sys.argv[2]), split="8,2",
                            data_cache_path=sys.argv[3])
        built = build_gpt_datasets(config, None, sequence_length=9, seed=1,
                                   num_samples=(4000, 400, 0))
        digest = hashlib.sha256()
        for blend in built[:2]:
            digest.update(blend.dataset_index.tobytes() + blend.sample_index.tobytes())
            for part in blend.datasets:
                digest.update(part.index.shuffle.tobytes() + part.index.samples.tobytes())
        os.write(1, f"{digest.hexdigest()}\\n".encode())
        os._exit(0)
os.close(opener)
sys.exit(any(os.wait()[1] for _ in range(16)))
"""


def test_sixteen_processes_may_start_at_once_on_one_cache(pair, tmp_path):
    cache = tmp_path / "cache"
    words = [sys.executable, "-c", SIXTEEN, *pair, str(cache)]
    for _ in range(2):  # the second time all is there
        done = subprocess.run(
            words, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=240, check=True,
        )  # fmt: skip
        digests = done.stdout.split()
        assert len(digests) == 16
        assert len(set(digests)) == 1
        # Two blends of two arrays, and four datasets of three; no lock, nothing half written.
        assert len(list(cache.iterdir())) == 2 * 2 + 4 * 3


def test_a_prefix_that_a_blend_has_twice_is_warned_of(tmp_path, caplog):
    with IndexedWriter(tmp_path / "x", "uint16") as writer:
        for _ in range(30):
            writer.add_document(list(range(20)))
    name = str(tmp_path / "x")
    config = DataConfig(data_path=("0.5", name, "0.5", f"{tmp_path}/./x"))
    build_gpt_datasets(config, None, sequence_length=8, seed=1, num_samples=(9, 0, 0))
    assert caplog.text.count("x 2 times, each with the same samples") == 1
