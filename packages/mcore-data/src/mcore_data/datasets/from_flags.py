"""From data flags to the train, valid and test datasets of a run."""

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mcore_data.config import DataConfig, FIMConfig
from mcore_data.datasets.blending import BlendedDataset, OrderedBlend, normalize_weights
from mcore_data.datasets.chat import LEARNT, TOKENS
from mcore_data.datasets.data_paths import (
    SPLITS,
    Blend,
    parse_blend,
    read_split_words,
    read_words,
)
from mcore_data.datasets.fim import FillInMiddle
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.datasets.mixture import build_mixture, read_mixture
from mcore_data.datasets.mock import MockDocuments
from mcore_data.datasets.packing import PackedDataset
from mcore_data.datasets.splitting import NUM_SPLITS, split_bounds
from mcore_data.indexed.index_format import idx_path
from mcore_data.indexed.object_store import is_remote
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.tokenizers.protocol import Tokenizer

log = logging.getLogger(__name__)

_DEFAULT_SPLIT = "969,30,1"
_MOCK_SPLIT = "1,1,1"
_NO_FIM = FIMConfig()
_MOCK_MAX_LENGTH = 4095
_MOCK_MAX_SAMPLES = 8  # of one document: its length over the sequence length

Datasets = tuple[GPTDataset | PackedDataset | OrderedBlend | None, ...]


def build_gpt_datasets(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    *,
    sequence_length: int,
    seed: int,
    num_samples: tuple[int, int, int] = (0, 0, 0),
    fim: FIMConfig = _NO_FIM,
    samples_before: Callable[[int], int] | None = None,
    only: Sequence[str] = SPLITS,
) -> Datasets:
    """Datasets for train, valid and test; None where the flags give no data.

    Test data that no ``--split`` asks for are None too where a dataset is too small for any.

    Every rank builds its own, with no communication; with a cache folder the indices are
    shared by memory map.

    Args:
        config: where the data is and how it is split.
        tokenizer: gives the end of document; may be None if no option needs it.
        sequence_length: tokens in a sample.
        seed: of the shuffles.
        num_samples: samples wanted of each; 0 means one epoch, and of datasets with weights,
            where another split has a number, nothing.
        fim: whether and how the training documents are rewritten.
        samples_before: samples that a run uses before a step, for a mixture that changes at
            steps.
        only: splits to build; the others are None.

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
    drop_last = config.drop_last_partial_validation_sequence
    builds: list[Any] = [build, partial(build, drop_last_partial=drop_last), build]
    if config.sft:
        if fim.fim_data:
            raise ValueError("--fim-data rewrites documents, and --sft reads chats: drop one.")
        builds = [
            partial(
                _build_chats,
                sequence_length=sequence_length,
                seed=seed,
                cache_folder=config.data_cache_path,
            )
        ] * NUM_SPLITS
    if fim.fim_data:
        builds[0] = partial(build, transform=FillInMiddle.build(tokenizer, fim))
    builds = [
        build if name in only else None for name, build in zip(SPLITS, builds, strict=True)
    ]
    if config.mock_data:
        return _build_mock(config, tokenizer, builds, sequence_length, num_samples)
    if config.data_mixture_path:
        train = None
        if builds[0]:
            epoch = _Epoch(config, builds[0], seed)
            train = _build_changing(config, epoch, num_samples[0], samples_before)
        own = (None, config.valid_data_path, config.test_data_path)
        return (train, *_build_own(own, config, builds, num_samples)[1:])
    per_split = read_split_words(config)
    if per_split is not None:
        return _build_own(per_split, config, builds, num_samples)
    blend = parse_blend(read_words(config))
    split = config.split or _DEFAULT_SPLIT
    return tuple(
        _build_blend(
            _of_split(blend, i, config, num_samples),
            config,
            builds[i],
            _Share(split, i, wanted, may_be_empty=not config.split and SPLITS[i] == "test"),
        )
        for i, wanted in enumerate(num_samples)
    )


def build_valid_sets(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    *,
    sequence_length: int,
    seed: int,
    num_samples: int,
) -> dict[str, GPTDataset | PackedDataset | OrderedBlend]:
    """Build each dataset of ``--valid-data-path`` by itself, by its prefix.

    Args:
        config: where the data is.
        tokenizer: gives the end of document; may be None if no option needs it.
        sequence_length: tokens in a sample.
        seed: of the shuffles.
        num_samples: samples wanted of each; 0 means one epoch.

    Raises:
        ValueError: if the datasets are given weights, or one is too small.
        FileNotFoundError: if a dataset does not exist.
    """
    blend = parse_blend(config.valid_data_path)
    if blend.weights is not None:
        raise ValueError(
            "--multiple-validation-sets scores each dataset by itself: leave the weights out "
            "of --valid-data-path."
        )
    found: dict[str, GPTDataset | PackedDataset | OrderedBlend] = {}
    for prefix in blend.prefixes:
        alone = replace(
            config,
            multiple_validation_sets=False,
            data_mixture_path="",
            train_data_path=(),
            valid_data_path=(prefix,),
            test_data_path=(),
        )
        built = build_gpt_datasets(
            alone,
            tokenizer,
            sequence_length=sequence_length,
            seed=seed,
            num_samples=(0, num_samples, 0),
            only=("valid",),
        )
        assert built[1] is not None
        found[prefix] = built[1]
    return found


def build_indices(
    config: DataConfig, *, sequence_length: int, seed: int, num_samples: tuple[int, int, int]
) -> dict[str, int]:
    """Build what a run keeps in ``--data-cache-path``, without its tokenizer.

    Args:
        config: the run's options; those of masks and positions change no index.
        sequence_length: the run's.
        seed: the run's.
        num_samples: that the run takes of each split; 0 is one epoch of train, and nothing
            of the others unless all validation data are scored.

    Returns:
        Samples of each split, and of each validation set that is scored by itself.
    """
    plain = replace(
        config,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask_in_dataloader=False,
    )
    valid = config.full_validation or num_samples[1] > 0
    wanted = ("train", *["valid"] * valid, *["test"] * (num_samples[2] > 0))
    common = {"sequence_length": sequence_length, "seed": seed}
    built = build_gpt_datasets(plain, None, **common, num_samples=num_samples, only=wanted)
    found = {name: len(data) if data else 0 for name, data in zip(SPLITS, built, strict=True)}
    if config.multiple_validation_sets and valid:
        sets = build_valid_sets(plain, None, **common, num_samples=num_samples[1])
        found |= {f"valid {name}": len(dataset) for name, dataset in sets.items()}
    return found


def _build_own(
    words_of: Sequence[Sequence[str] | None],
    config: DataConfig,
    builds: Sequence[Any],
    num_samples: Sequence[int],
) -> Datasets:
    """Datasets of splits that have paths of their own."""
    found = []
    for i, words in enumerate(words_of):
        apart = i == SPLITS.index("valid") and config.multiple_validation_sets
        share = _Share("1", 0, num_samples[i])
        blend = _of_split(parse_blend(words), i, config, num_samples) if words else None
        found.append(None if apart else _build_blend(blend, config, builds[i], share))
    return tuple(found)


def _build_changing(
    config: DataConfig,
    build_epoch: Callable[[str, int], GPTDataset],
    num_samples: int,
    samples_before: Callable[[int], int] | None,
) -> OrderedBlend:
    """The training data of a mixture that changes."""
    if not num_samples:
        raise ValueError(
            "--data-mixture-path needs a number of samples: give --train-iters or "
            "--train-samples."
        )
    mixture = read_mixture(config.data_mixture_path, parse_blend, samples_before)
    return build_mixture(mixture, build_epoch, num_samples)


@dataclass(frozen=True, slots=True)
class _Epoch:
    """Builds one epoch of one dataset in an order of its own."""

    config: DataConfig
    build: Any
    seed: int

    def __call__(self, prefix: str, epoch: int) -> GPTDataset:
        return self.build(_open(prefix, self.config), seed=self.seed + epoch)


def _build_mock(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    builds: Sequence[Any],
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
        build(documents, document_ids=ids, num_samples=wanted) if build and ids else None
        for build, ids, wanted in zip(builds, bounds, num_samples, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """What to take of each dataset: part ``number`` of ``split``, and how many samples."""

    split: str
    number: int
    num_samples: int
    may_be_empty: bool = False
    """Whether the part comes from the default split: a small dataset has no document for it."""


def _build_blend(
    blend: Blend | None, config: DataConfig, build: Any, share: _Share
) -> GPTDataset | PackedDataset | OrderedBlend | None:
    """One split of one dataset or of several mixed."""
    if blend is None or build is None or split_bounds(share.split, 1)[share.number] is None:
        return None
    wanted = share.num_samples
    if len(blend.prefixes) == 1:
        return _build_one(blend.prefixes[0], config, build, share)
    if blend.weights is None:
        shares = [replace(share, num_samples=0)] * len(blend.prefixes)
        datasets = [each for each in _build_each(blend, config, build, shares) if each]
        if not datasets:
            return None
        whole = sum(len(dataset) for dataset in datasets)
        size = min(wanted, whole) if wanted else whole
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
    # At least one sample of each is requested: None is one without any, in a part that may
    # be empty. The others do not replace it: the weights would not be those of the blend.
    if None in datasets:
        return None
    # pyrefly: ignore[bad-argument-type]
    return BlendedDataset(datasets, list(weights), sum(targets), config.data_cache_path)


def _of_split(
    blend: Blend, number: int, config: DataConfig, num_samples: Sequence[int]
) -> Blend | None:
    """What a split takes of a blend; None where weights have no number of samples to share.

    Full validation scores every dataset whole, whatever its weight.
    """
    if config.full_validation and SPLITS[number] == "valid":
        return replace(blend, weights=None)
    is_unused = blend.weights is not None and any(num_samples) and not num_samples[number]
    return None if is_unused and len(blend.prefixes) > 1 else blend


def _build_each(
    blend: Blend, config: DataConfig, build: Any, shares: Sequence[_Share]
) -> list[GPTDataset | PackedDataset | None]:
    """The datasets of a blend, some at a time: on a slow disk opening them is what takes."""

    def one(prefix: str, share: _Share) -> GPTDataset | PackedDataset | None:
        return _build_one(prefix, config, build, share)

    with ThreadPoolExecutor(config.num_dataset_builder_threads) as pool:
        return list(pool.map(one, blend.prefixes, shares))


def _build_one(
    prefix: str, config: DataConfig, build: Any, share: _Share
) -> GPTDataset | PackedDataset | None:
    """One split of one dataset; None if no document falls into it and none need to."""
    sequences = _open(prefix, config)
    ids = split_bounds(share.split, len(sequences))[share.number]
    if not ids and share.may_be_empty and share.num_samples:
        log.info("no test data: %s has no document for them under the default --split", prefix)
        return None
    if not ids and not share.num_samples:
        return None
    try:
        return build(sequences, document_ids=ids, num_samples=share.num_samples)
    except ValueError as error:
        part = f"part {share.number + 1} of --split {share.split}"
        raise ValueError(f"{prefix}, {part}: {error}") from error


def _build_chats(tokens: IndexedDataset, **options: Any) -> PackedDataset:
    """Rows of chats; the pair beside the tokens says what is to be learnt."""
    prefix = tokens.prefix.removesuffix(TOKENS) + LEARNT
    learnt = IndexedDataset(prefix, mmap=tokens.mmap, cache_path=tokens.cache_path)
    return PackedDataset(tokens, weights=learnt, too_long="truncate", **options)


def _open(prefix: str, config: DataConfig) -> IndexedDataset:
    if config.sft and not is_remote(prefix) and not idx_path(prefix + TOKENS).is_file():
        raise FileNotFoundError(
            f"{prefix}{TOKENS}.idx does not exist: with --sft give the --output-prefix of "
            "mcore-data prepare-chats, which writes it from chats."
        )
    return IndexedDataset(
        prefix + TOKENS * config.sft,
        mmap=config.mmap_bin_files,
        cache_path=config.object_storage_cache_path,
    )
