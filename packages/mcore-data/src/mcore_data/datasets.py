"""From data flags to the train, valid and test datasets of a run."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_data.blending import BlendedDataset, normalize_weights
from mcore_data.config import DataConfig
from mcore_data.gpt import GPTDataset
from mcore_data.indexed import IndexedDataset
from mcore_data.mock import MockDocuments
from mcore_data.splitting import NUM_SPLITS, split_bounds
from mcore_data.tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")
_DEFAULT_SPLIT = "969,30,1"
_MOCK_SPLIT = "1,1,1"
_MOCK_MAX_LENGTH = 4095
_MOCK_MAX_SAMPLES = 8  # of one document: its length over the sequence length

Datasets = tuple[GPTDataset | BlendedDataset | None, ...]


@dataclass(frozen=True, slots=True)
class Blend:
    """Datasets to mix.

    Attributes:
        prefixes: of the ``.bin``/``.idx`` pairs.
        weights: share of each, or None to use each once.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(words: Sequence[str]) -> Blend:
    """Read prefixes, or weights and prefixes in turn.

    An even number of words is read as pairs if every first one is a number.

    Raises:
        ValueError: if some but not all of them are numbers, or there is no word.
    """
    if not words:
        raise ValueError("--data-path names no dataset.")
    numbers = [_as_number(word) for word in words[::2]]
    if len(words) % 2 or all(number is None for number in numbers):
        return Blend(tuple(words), None)
    weights = tuple(number for number in numbers if number is not None)
    if len(weights) != len(numbers):
        raise ValueError(
            f"--data-path {' '.join(words)}: give prefixes only, or a weight before each."
        )
    return Blend(tuple(words[1::2]), weights)


def build_gpt_datasets(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    *,
    sequence_length: int,
    seed: int,
    num_samples: tuple[int, int, int] = (0, 0, 0),
) -> Datasets:
    """Datasets for train, valid and test; None where the flags give no data.

    Every rank builds its own, with no communication; with a cache folder the indices are
    shared by memory map.

    Args:
        config: where the data is and how it is split.
        tokenizer: gives the end of document; may be None if no option needs it.
        sequence_length: tokens in a sample.
        seed: of the shuffles.
        num_samples: samples wanted of each; 0 means one epoch.

    Raises:
        ValueError: if the flags contradict each other, or a dataset is too small.
        FileNotFoundError: if a dataset does not exist.
    """
    build = partial(
        GPTDataset,
        sequence_length=sequence_length,
        seed=seed,
        eod=tokenizer.eod if tokenizer else None,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        eod_mask_loss=config.eod_mask_loss,
        create_attention_mask=config.create_attention_mask_in_dataloader,
        inter_document_masking=config.dataloader_inter_document_masking,
        cache_folder=config.data_cache_path,
    )
    if config.mock_data:
        return _build_mock(config, tokenizer, build, sequence_length, num_samples)
    per_split = _per_split_words(config)
    if per_split is None:
        blend = parse_blend(_data_words(config))
        split = config.split or _DEFAULT_SPLIT
        return tuple(
            _build_blend(blend, config, build, _Share(split, i, num_samples[i]))
            for i in range(NUM_SPLITS)
        )
    return tuple(
        _build_blend(parse_blend(words), config, build, _Share("1", 0, num_samples[i]))
        if words
        else None
        for i, words in enumerate(per_split)
    )


def _build_mock(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    build: Any,
    sequence_length: int,
    num_samples: Sequence[int],
) -> Datasets:
    """Made-up documents, the same however long the run is; short ones for short sequences.

    The index has a row a sample: documents of thousands of tokens cut into sequences of a few
    would take seconds to index, for a run of a few steps.
    """
    vocab_size = tokenizer.vocab_size if tokenizer else config.mock_vocab_size
    documents = MockDocuments(
        vocab_size,
        eod=tokenizer.eod if tokenizer else None,
        max_length=min(_MOCK_MAX_LENGTH, _MOCK_MAX_SAMPLES * sequence_length),
    )
    bounds = split_bounds(config.split or _MOCK_SPLIT, len(documents))
    return tuple(
        build(documents, document_ids=ids, num_samples=wanted) if ids else None
        for ids, wanted in zip(bounds, num_samples, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """What to take of each dataset: part ``number`` of ``split``, and how many samples."""

    split: str
    number: int
    num_samples: int


def _build_blend(
    blend: Blend, config: DataConfig, build: Any, share: _Share
) -> GPTDataset | BlendedDataset | None:
    """One split of one dataset or of several mixed."""
    if split_bounds(share.split, 1)[share.number] is None:
        return None
    wanted = share.num_samples
    if len(blend.prefixes) == 1:
        prefix = blend.prefixes[0]
        if not wanted and not _has_documents(prefix, config, share):
            return None
        return _build_one(prefix, config, build, share)
    if blend.weights is None:
        epoch = replace(share, num_samples=0)
        datasets = [
            _build_one(prefix, config, build, epoch)
            for prefix in blend.prefixes
            if _has_documents(prefix, config, epoch)
        ]
        if not datasets:
            return None
        whole = sum(len(dataset) for dataset in datasets)
        return BlendedDataset(datasets, None, min(wanted, whole) if wanted else whole)
    if not wanted:
        raise ValueError(
            "weights in --data-path need a number of samples: give --train-iters or "
            "--train-samples, or leave the weights out to use every dataset once."
        )
    weights = normalize_weights(blend.weights)
    targets = [math.ceil(wanted * weight) for weight in weights]
    surplus = 1 + config.mid_level_dataset_surplus
    datasets = [
        _build_one(
            prefix,
            config,
            build,
            replace(share, num_samples=max(1, math.ceil(target * surplus))),
        )
        for prefix, target in zip(blend.prefixes, targets, strict=True)
    ]
    # None only where nothing is asked of a prefix, which is then never looked at.
    # pyrefly: ignore[bad-argument-type]
    return BlendedDataset(datasets, list(weights), sum(targets))


def _has_documents(prefix: str, config: DataConfig, share: _Share) -> bool:
    """Whether any document of a dataset falls into a split."""
    sequences = IndexedDataset(prefix, mmap=config.mmap_bin_files)
    return bool(split_bounds(share.split, len(sequences))[share.number])


def _build_one(prefix: str, config: DataConfig, build: Any, share: _Share) -> GPTDataset:
    sequences = IndexedDataset(prefix, mmap=config.mmap_bin_files)
    ids = split_bounds(share.split, len(sequences))[share.number]
    try:
        return build(sequences, document_ids=ids, num_samples=share.num_samples)
    except ValueError as error:
        part = f"part {share.number + 1} of --split {share.split}"
        raise ValueError(f"{prefix}, {part}: {error}") from error


def _data_words(config: DataConfig) -> Sequence[str]:
    if config.data_args_path:
        return Path(config.data_args_path).read_text().split()
    return config.data_path


def _per_split_words(config: DataConfig) -> tuple[Sequence[str], ...] | None:
    """Words of each split if the splits have paths of their own, else None."""
    if config.per_split_data_args_path:
        fields = json.loads(Path(config.per_split_data_args_path).read_text())
        unknown = set(fields) - set(SPLITS)
        if unknown:
            raise ValueError(
                f"--per-split-data-args-path {config.per_split_data_args_path} has the key "
                f"{min(unknown)!r}; it takes {', '.join(SPLITS)}."
            )
        lists = [fields.get(name) or [] for name in SPLITS]
        return tuple(
            words.split() if isinstance(words, str) else list(map(str, words))
            for words in lists
        )
    paths = (config.train_data_path, config.valid_data_path, config.test_data_path)
    return paths if any(paths) else None


def _as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
