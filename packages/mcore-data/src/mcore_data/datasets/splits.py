"""Builds the train, valid and test datasets from stored sequences: split, blended, repeated.

The caller gives functions that build a dataset from sequences; the flags determine the
sequences, the numbers of samples and the blend.
"""

import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mcore_data.config import DataConfig
from mcore_data.datasets.blending import BlendedDataset, OrderedBlend, normalize_weights
from mcore_data.datasets.chat import TOKENS
from mcore_data.datasets.data_paths import (
    SPLITS,
    Blend,
    parse_blend,
    read_split_words,
    read_words,
)
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.datasets.packing import PackedDataset
from mcore_data.datasets.splitting import split_bounds
from mcore_data.indexed.blocklist import blocked_sequences, read_blocklist
from mcore_data.indexed.index_format import idx_path
from mcore_data.indexed.object_store import is_remote
from mcore_data.indexed.reader import IndexedDataset

log = logging.getLogger(__name__)

_DEFAULT_SPLIT = "969,30,1"

Datasets = tuple[GPTDataset | PackedDataset | OrderedBlend | None, ...]


def build_splits(
    config: DataConfig,
    builds: Sequence[Any],
    num_samples: Sequence[int],
    *,
    by_documents: bool = False,
) -> Datasets:
    """Build train, valid and test from separate paths, or from shares of one blend.

    Args:
        config: data options.
        builds: for each split a function that builds a dataset from stored sequences,
            ``document_ids`` and ``num_samples``; None: the split is not built.
        num_samples: samples of each split.
        by_documents: whether to split documents, which have several sequences, not sequences.

    Raises:
        ValueError: if a dataset is too small.
        FileNotFoundError: if a dataset does not exist.
    """
    per_split = read_split_words(config)
    if per_split is not None:
        return build_separate_splits(
            per_split, config, builds, num_samples, by_documents=by_documents
        )
    blend = parse_blend(read_words(config))
    _warn_of_repeats(blend)
    split = config.split or _DEFAULT_SPLIT
    return tuple(
        _build_blend(
            _blend_of_split(blend, i, config, num_samples),
            config,
            builds[i],
            _Share(
                split,
                i,
                wanted,
                may_be_empty=not config.split and SPLITS[i] == "test",
                by_documents=by_documents,
            ),
        )
        for i, wanted in enumerate(num_samples)
    )


def build_separate_splits(
    split_words: Sequence[Sequence[str] | None],
    config: DataConfig,
    builds: Sequence[Any],
    num_samples: Sequence[int],
    *,
    by_documents: bool = False,
) -> Datasets:
    """Build the datasets of splits with separate paths; None for a split without paths."""
    datasets = []
    for i, words in enumerate(split_words):
        is_separate = i == SPLITS.index("valid") and config.multiple_validation_sets
        share = _Share("1", 0, num_samples[i], by_documents=by_documents)
        blend = _blend_of_split(parse_blend(words), i, config, num_samples) if words else None
        if blend and i == SPLITS.index("train"):
            _warn_of_repeats(blend)
        datasets.append(None if is_separate else _build_blend(blend, config, builds[i], share))
    return tuple(datasets)


@dataclass(frozen=True, slots=True)
class _Share:
    """The share of each dataset: part ``number`` of ``split``, and the number of samples."""

    split: str
    number: int
    num_samples: int
    may_be_empty: bool = False
    """Whether a dataset may have no document for the part, as in the default split."""
    by_documents: bool = False
    """Whether documents are split, not sequences."""


def _build_blend(
    blend: Blend | None, config: DataConfig, build: Any, share: _Share
) -> GPTDataset | PackedDataset | OrderedBlend | None:
    """Build one split of a dataset or of a blend."""
    if blend is None or build is None or split_bounds(share.split, 1)[share.number] is None:
        return None
    wanted = share.num_samples
    if len(blend.prefixes) == 1:
        return _build_one(config, build, blend.prefixes[0], share)
    if blend.weights is None:
        shares = [replace(share, num_samples=0)] * len(blend.prefixes)
        datasets = [each for each in _build_each(blend, config, build, shares) if each]
        if not datasets:
            return None
        total = sum(len(dataset) for dataset in datasets)
        size = min(wanted, total) if wanted else total
        return BlendedDataset(datasets, None, size, config.data_cache_path)
    if not wanted:
        raise ValueError(
            "weights in --data-path need a number of samples: give --train-iters or "
            "--train-samples, or leave the weights out to use every dataset once."
        )
    weights = normalize_weights(blend.weights)
    targets = [math.ceil(wanted * weight) for weight in weights]
    surplus = 1 + config.mid_level_dataset_surplus
    shares = [
        replace(share, num_samples=max(1, math.ceil(target * surplus))) for target in targets
    ]
    datasets = _build_each(blend, config, build, shares)
    # Each dataset has at least one requested sample, so None is a dataset without documents in
    # a part that may be empty. The split is left out: other weights would be another blend.
    if None in datasets:
        return None
    # pyrefly: ignore[bad-argument-type]
    return BlendedDataset(datasets, list(weights), sum(targets), config.data_cache_path)


def _blend_of_split(
    blend: Blend, number: int, config: DataConfig, num_samples: Sequence[int]
) -> Blend | None:
    """Return the blend of a split; None if it has weights but no number of samples.

    Full validation reads every dataset once, whatever its weight.
    """
    if config.full_validation and SPLITS[number] == "valid":
        return replace(blend, weights=None)
    is_unused = blend.weights is not None and any(num_samples) and not num_samples[number]
    return None if is_unused and len(blend.prefixes) > 1 else blend


def _build_each(
    blend: Blend, config: DataConfig, build: Any, shares: Sequence[_Share]
) -> list[GPTDataset | PackedDataset | None]:
    """Build the datasets of a blend concurrently, since opening them may be slow."""
    with ThreadPoolExecutor(config.num_dataset_builder_threads) as pool:
        return list(pool.map(partial(_build_one, config, build), blend.prefixes, shares))


def _build_one(
    config: DataConfig, build: Any, prefix: str, share: _Share
) -> GPTDataset | PackedDataset | None:
    """Build one split of a dataset; None if the split has no documents and may be empty."""
    sequences = open_sequences(prefix, config)
    size = len(sequences.documents) - 1 if share.by_documents else len(sequences)
    ids = split_bounds(share.split, size)[share.number]
    if not ids and share.may_be_empty and share.num_samples:
        log.info("no test split: the default --split leaves no document of %s for it", prefix)
        return None
    if not ids and not share.num_samples:
        return None
    try:
        return build(sequences, document_ids=ids, num_samples=share.num_samples)
    except ValueError as error:
        part = f"part {share.number + 1} of --split {share.split}"
        raise ValueError(f"{prefix}, {part}: {error}") from error


def open_sequences(prefix: str, config: DataConfig) -> IndexedDataset:
    """Open a stored dataset; with ``--sft`` or ``--preferences`` the tokens of its chats."""
    is_marked = config.sft or config.preferences
    if is_marked and not is_remote(prefix) and not idx_path(prefix + TOKENS).is_file():
        raise FileNotFoundError(
            f"{prefix}{TOKENS}.idx does not exist: with --sft give the --output-prefix of "
            "mcore-data prepare-chats, with --objective dpo that of prepare-preferences."
        )
    dataset = IndexedDataset(
        prefix + TOKENS * is_marked,
        mmap=config.mmap_bin_files,
        cache_path=config.object_storage_cache_path,
        cache_bytes=int(config.object_storage_cache_gib * 2**30),
    )
    if config.blocklist:
        blocklist = read_blocklist(config.blocklist)
        dataset.blocked = blocked_sequences(blocklist, dataset, config.data_cache_path)
    return dataset


def _warn_of_repeats(blend: Blend) -> None:
    """Warn of a prefix that occurs several times in a blend, each time with equal samples."""
    names = [os.path.normpath(prefix) for prefix in blend.prefixes]
    for name in sorted({name for name in names if names.count(name) > 1}):
        log.warning(
            "--data-path has %s %d times, each with the same samples in the same order. Name "
            "the prefix once, with the sum of the weights.",
            *(name, names.count(name)),
        )
