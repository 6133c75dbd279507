"""From data flags to the train, valid and test datasets of a run."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mcore_data.config import DataConfig, FIMConfig
from mcore_data.datasets.blending import OrderedBlend
from mcore_data.datasets.chat import LEARNT, TOKENS
from mcore_data.datasets.data_paths import SPLITS, parse_blend
from mcore_data.datasets.fim import FillInMiddle
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.datasets.mixture import build_mixture, read_mixture
from mcore_data.datasets.mock import MockDocuments
from mcore_data.datasets.packing import PackedDataset
from mcore_data.datasets.splits import Datasets, build_own_splits, build_splits, open_sequences
from mcore_data.datasets.splitting import NUM_SPLITS, split_bounds
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.tokenizers.protocol import Tokenizer

log = logging.getLogger(__name__)

_MOCK_SPLIT = "1,1,1"
_NO_FIM = FIMConfig()
_MOCK_MAX_LENGTH = 4095
_MOCK_MAX_SAMPLES = 8  # of one document: its length over the sequence length


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

    Test data without a share of ``--split`` are None too where a dataset is too small for any.

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
        return (train, *build_own_splits(own, config, builds, num_samples)[1:])
    return build_splits(config, builds, num_samples)


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
        return self.build(open_sequences(prefix, self.config), seed=self.seed + epoch)


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


def _build_chats(tokens: IndexedDataset, **options: Any) -> PackedDataset:
    """Rows of chats; the pair beside the tokens says what is to be learnt."""
    prefix = tokens.prefix.removesuffix(TOKENS) + LEARNT
    learnt = IndexedDataset(prefix, mmap=tokens.mmap, cache_path=tokens.cache_path)
    return PackedDataset(tokens, weights=learnt, too_long="truncate", **options)
