"""Builds the train, valid and test datasets of a run from its data flags."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mcore_data.config import DataConfig, FIMConfig
from mcore_data.datasets.arrangement import SampleOptions
from mcore_data.datasets.blending import OrderedBlend
from mcore_data.datasets.chat import LEARNT, TOKENS
from mcore_data.datasets.data_paths import SPLITS, parse_blend
from mcore_data.datasets.fim import FillInMiddle
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.datasets.mixture import build_mixture, read_mixture
from mcore_data.datasets.mock import MockDocuments
from mcore_data.datasets.packing import PackedDataset
from mcore_data.datasets.preferences import build_preferences
from mcore_data.datasets.splits import (
    Datasets,
    build_separate_splits,
    build_splits,
    open_sequences,
)
from mcore_data.datasets.splitting import NUM_SPLITS, split_bounds
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.tokenizers.protocol import Tokenizer

log = logging.getLogger(__name__)

_MOCK_SPLIT = "1,1,1"
_NO_FIM = FIMConfig()
_MOCK_MAX_LENGTH = 4095
_MOCK_MAX_SAMPLES = 8  # samples that the longest mock document spans


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
    """Build the train, valid and test datasets; None for splits without data.

    The test split is also None if, with the default ``--split``, a dataset is too small to have
    test documents. Every rank builds the datasets without communication; with a cache folder
    ranks share the indices by memory map.

    Args:
        config: data options.
        tokenizer: provides the end-of-document id; may be None if no option needs it.
        sequence_length: tokens in a sample.
        seed: seed of the shuffles.
        num_samples: samples of each split; 0 means one epoch, or for weighted blends no data if
            another split has a number.
        fim: options of fill-in-the-middle, for training documents.
        samples_before: maps a step to the samples used before it, for mixtures that change at
            steps.
        only: splits to build; the others are None.

    Raises:
        ValueError: if the flags contradict each other, or a dataset is too small.
        FileNotFoundError: if a dataset does not exist.
    """
    options = SampleOptions(
        eod=tokenizer.eod if tokenizer else None,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        eod_mask_loss=config.eod_mask_loss,
        create_attention_mask=config.create_attention_mask_in_dataloader,
        inter_document_masking=config.dataloader_inter_document_masking,
    )
    build = partial(
        GPTDataset,
        sequence_length=sequence_length,
        seed=seed,
        options=options,
        cache_folder=config.data_cache_path,
    )
    drop_last = config.drop_last_partial_validation_sequence
    of_valid = replace(options, drop_last_partial=drop_last)
    builds: list[Any] = [build, partial(build, options=of_valid), build]
    if config.sft or config.preferences:
        if fim.fim_data:
            raise ValueError(
                "--fim-data rewrites plain documents, and the data of --sft and of --objective "
                "dpo are chats: leave one of these options out."
            )
        builds = [
            partial(
                _build_chats if config.sft else build_preferences,
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
        split_words = (None, config.valid_data_path, config.test_data_path)
        return (train, *build_separate_splits(split_words, config, builds, num_samples)[1:])
    return build_splits(config, builds, num_samples)


def build_valid_sets(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    *,
    sequence_length: int,
    seed: int,
    num_samples: int,
) -> dict[str, GPTDataset | PackedDataset | OrderedBlend]:
    """Build each dataset of ``--valid-data-path`` separately; return them by name or prefix.

    Args:
        config: data options.
        tokenizer: provides the end-of-document id; may be None if no option needs it.
        sequence_length: tokens in a sample.
        seed: seed of the shuffles.
        num_samples: samples of each dataset; 0 means one epoch.

    Raises:
        ValueError: if the datasets are given weights, or one is too small.
        FileNotFoundError: if a dataset does not exist.
    """
    blend = parse_blend(config.valid_data_path)
    if blend.weights is not None:
        raise ValueError(
            "--multiple-validation-sets evaluates each dataset separately: leave the weights "
            "out of --valid-data-path."
        )
    datasets: dict[str, GPTDataset | PackedDataset | OrderedBlend] = {}
    names = config.validation_set_names or blend.prefixes
    for name, prefix in zip(names, blend.prefixes, strict=True):
        single = replace(
            config,
            multiple_validation_sets=False,
            validation_set_names=(),
            data_mixture_path="",
            train_data_path=(),
            valid_data_path=(prefix,),
            test_data_path=(),
        )
        built = build_gpt_datasets(
            single,
            tokenizer,
            sequence_length=sequence_length,
            seed=seed,
            num_samples=(0, num_samples, 0),
            only=("valid",),
        )
        assert built[1] is not None
        datasets[name] = built[1]
    return datasets


def build_indices(
    config: DataConfig, *, sequence_length: int, seed: int, num_samples: tuple[int, int, int]
) -> dict[str, int]:
    """Build the indices of a run in ``--data-cache-path``, without the tokenizer.

    Args:
        config: data options of the run; masks and positions do not affect the indices.
        sequence_length: sequence length of the run.
        seed: seed of the run.
        num_samples: samples that the run uses of each split; 0 means one epoch of train, and
            none of the other splits unless all validation data are evaluated.

    Returns:
        Number of samples of each split, and of each separate validation set.
    """
    plain = replace(
        config,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask_in_dataloader=False,
    )
    valid = config.full_validation or num_samples[1] > 0
    splits = ("train", *["valid"] * valid, *["test"] * (num_samples[2] > 0))
    common = {"sequence_length": sequence_length, "seed": seed}
    built = build_gpt_datasets(plain, None, **common, num_samples=num_samples, only=splits)
    counts = {name: len(data) if data else 0 for name, data in zip(SPLITS, built, strict=True)}
    if config.multiple_validation_sets and valid:
        sets = build_valid_sets(plain, None, **common, num_samples=num_samples[1])
        counts |= {f"valid {name}": len(dataset) for name, dataset in sets.items()}
    return counts


def _build_changing(
    config: DataConfig,
    build_epoch: Callable[[str, int], GPTDataset],
    num_samples: int,
    samples_before: Callable[[int], int] | None,
) -> OrderedBlend:
    """Build the training dataset of a mixture that changes."""
    if not num_samples:
        raise ValueError(
            "--data-mixture-path needs a number of samples: give --train-iters or "
            "--train-samples."
        )
    mixture = read_mixture(config.data_mixture_path, samples_before)
    return build_mixture(mixture, build_epoch, num_samples)


@dataclass(frozen=True, slots=True)
class _Epoch:
    """Builds one epoch of a dataset, shuffled by the epoch's seed."""

    config: DataConfig
    build: Any
    seed: int

    def __call__(self, prefix: str, epoch: int) -> GPTDataset:
        return self.build(open_sequences(prefix, self.config), seed=self.seed + epoch)


def _build_mock(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    builds: Sequence[Any],
    sequence_length: int,
    num_samples: Sequence[int],
) -> Datasets:
    """Build mock datasets, with short documents for short sequences.

    The sample index covers whole documents and has a row per sample. Long documents cut into
    short sequences would take seconds to index, for a run of a few steps.
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


def _build_chats(tokens: IndexedDataset, **options: Any) -> PackedDataset:
    """Build a dataset of packed chats from the pairs of tokens and of loss masks."""
    prefix = tokens.prefix.removesuffix(TOKENS) + LEARNT
    learnt = IndexedDataset(
        prefix,
        mmap=tokens.mmap,
        cache_path=tokens.cache_path,
        cache_bytes=tokens.cache_bytes,
    )
    return PackedDataset(tokens, weights=learnt, too_long="truncate", **options)
