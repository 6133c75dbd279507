"""Samples of plain, split and blended data are megatron-core's, bit for bit.

Its own datasets run beside ours under the mark ``megatron``; what they gave is stored in
``megatron_datasets.json``, so that the default suite holds ours to it anywhere.
"""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mcore_data.config import DataConfig
from mcore_data.datasets.data_paths import SPLITS
from mcore_data.datasets.from_flags import build_gpt_datasets
from mcore_data.indexed.writer import IndexedWriter

# By megatron-core 0.19.2: of every case and split the length, a hash, and the first sample.
STORED = json.loads(Path(__file__).with_name("megatron_datasets.json").read_text())
KEYS = ("tokens", "labels", "position_ids", "loss_mask", "attention_mask", "dataset_id")
S, SEED, EOD, PAD = 13, 1234, 50_000, 50_001
PARTIAL = "drop_last_partial_validation_sequence"
MASKS = "create_attention_mask_in_dataloader"
CORPORA = {"a": 61, "b": 37, "c": 19}
# Where data are, samples of train, valid and test, and further options.
CASES = {
    "one epoch": ({"data_path": ["a"], "split": "80,15,5"}, (30, 5, 2), {}),
    "a short last epoch": ({"data_path": ["a"], "split": "80,15,5"}, (90, 9, 3), {}),
    "a long last epoch": ({"data_path": ["a"], "split": "80,15,5"}, (150, 25, 8), {}),
    "two by weight": (
        {"data_path": ["0.7", "a", "0.3", "b"], "split": "8,2"}, (100, 10, 0), {},
    ),
    "three by weight, many epochs": (
        {"data_path": ["5", "c", "1", "a", "2.5", "b"], "split": "1"}, (700, 0, 0), {},
    ),
    "all of three": ({"data_path": ["b", "c", "a"], "split": "6,3,1"}, (60, 100, 3), {}),
    "paths of each split": (
        {"train_data_path": ["0.9", "a", "0.1", "c"], "valid_data_path": ["b"]},
        (40, 12, 0),
        {},
    ),
    "a partial sample at the end": (
        {"data_path": ["a"], "split": "8,2"}, (10, 7, 0),
        {PARTIAL: False},
    ),
    "borders at ends of documents": (
        {"data_path": ["a"], "split": "1"}, (50, 0, 0),
        {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True,
         MASKS: True},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three corpora of documents of 1 to 30 tokens, each with an end of document."""
    folder = tmp_path_factory.mktemp("corpora")
    for number, (name, count) in enumerate(CORPORA.items()):
        with IndexedWriter(folder / name, "uint16") as writer:
            for i in range(count):
                length = 1 + (i * i * 7 + i * 11 + number * 5) % 30
                first = 1000 * i % 16_000 + 16_000 * number
                writer.add_document([*range(first, first + length - 1), EOD])
    return folder


def where(folder, words):
    return [str(folder / word) if word in CORPORA else word for word in words]


def ours(folder, case):
    paths, num_samples, options = CASES[case]
    paths = {
        name: where(folder, words) if name != "split" else words
        for name, words in paths.items()
    }
    config = DataConfig(**paths, **options)
    tokenizer = SimpleNamespace(eod=EOD)
    return build_gpt_datasets(
        config, tokenizer, sequence_length=S, seed=SEED, num_samples=num_samples
    )


def theirs(folder, case, cache):
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    paths, num_samples, options = CASES[case]

    def blend(words):
        if words is None:
            return None
        words = where(folder, words)
        weighted = len(words) > 1 and words[0][0].isdigit()
        return (words[1::2], [*map(float, words[::2])]) if weighted else (words, None)

    if "data_path" in paths:
        sources = {"blend": blend(paths["data_path"]), "split": paths["split"]}
    else:
        each = [blend(paths.get(f"{name}_data_path")) for name in SPLITS]
        sources = {"blend_per_split": each}
    resets = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=S,
        **sources,
        **{name: options.get(name, False) for name in resets},
        create_attention_mask=options.get(MASKS, False),
        drop_last_partial_validation_sequence=options.get(PARTIAL, True),
        tokenizer=SimpleNamespace(
            vocab_size=PAD + 1, eod=EOD, pad=PAD, unique_identifiers={"class": "stand-in"},
            special_tokens_dict={"eos_token": EOD, "pad_token": PAD},
        ),
        path_to_cache=str(cache),
    )  # fmt: skip
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset, list(num_samples), lambda: not torch.distributed.is_initialized(), config
    )
    return builder.build()


def record(datasets, num_samples):
    """Length, hash of the samples asked for, and the first one, of each split."""
    found = {}
    for name, dataset, asked in zip(SPLITS, datasets, num_samples, strict=True):
        if dataset is None or asked == 0:
            continue
        digest = hashlib.blake2b(digest_size=16)
        for number in range(min(asked, len(dataset))):
            sample = dataset[number]
            for key in filter(sample.__contains__, KEYS):
                values = np.asarray(sample[key]).astype(np.int64)
                digest.update(f"{key} {values.shape}".encode() + values.tobytes())
        first = np.asarray(dataset[0]["tokens"]).tolist()
        found[name] = {"length": len(dataset), "hash": digest.hexdigest(), "first": first}
    return found


@pytest.mark.parametrize("case", CASES)
def test_samples_are_those_that_megatron_gave(folder, case):
    assert record(ours(folder, case), CASES[case][1]) == STORED[case]


@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")  # of what megatron-core misses here
@pytest.mark.parametrize("case", CASES)
def test_samples_are_those_that_megatron_gives(folder, tmp_path, case):
    pytest.importorskip("megatron.core.datasets.gpt_dataset")
    given = record(theirs(folder, case, tmp_path), CASES[case][1])
    assert record(ours(folder, case), CASES[case][1]) == given
    assert given == STORED[case]
