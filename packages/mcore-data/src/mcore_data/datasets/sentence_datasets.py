"""Builds the train, valid and test datasets of BERT and T5 from data flags.

The data must have been preprocessed with ``--split-sentences``. Documents are split, blended
and repeated as for GPT.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from mcore_data.config import DataConfig, MaskingConfig
from mcore_data.datasets.bert import BERTDataset, BertIds
from mcore_data.datasets.data_paths import SPLITS
from mcore_data.datasets.masking import SentenceOptions
from mcore_data.datasets.mock import MockSentences, mock_bert_ids, mock_t5_ids
from mcore_data.datasets.splits import build_splits
from mcore_data.datasets.splitting import split_bounds
from mcore_data.datasets.t5 import T5Dataset, T5Ids
from mcore_data.tokenizers.protocol import Tokenizer

_MOCK_SPLIT = "1,1,1"
_T5_NGRAM = 10


def build_sentence_datasets(
    kind: Literal["bert", "t5"],
    config: DataConfig,
    tokenizer: Tokenizer | None,
    masking: MaskingConfig,
    *,
    sequence_length: int,
    seed: int,
    decoder_sequence_length: int = 0,
    has_pairs: bool = True,
    num_samples: tuple[int, int, int] = (0, 0, 0),
    only: Sequence[str] = SPLITS,
) -> tuple[Any, ...]:
    """Build the train, valid and test datasets; None for splits without data.

    Args:
        kind: model whose samples are built.
        config: data options.
        tokenizer: provides the special ids; may be None with ``--mock-data``.
        masking: masking options.
        sequence_length: tokens of a sample; for T5 of the encoder's row.
        seed: seed of all random choices.
        decoder_sequence_length: tokens of the decoder's row, for T5.
        has_pairs: whether BERT samples are pairs, for the sentence-order head.
        num_samples: samples of each split; 0 means one epoch.
        only: splits to build; the others are None.

    Raises:
        ValueError: if the tokenizer lacks a special token, or a dataset is too small.
        FileNotFoundError: if a dataset does not exist.
    """
    if tokenizer is None and not config.mock_data:
        raise ValueError(
            "masking needs the special ids of a tokenizer: give --tokenizer-type "
            "BertWordPieceLowerCase --vocab-file FILE, or another tokenizer that has them."
        )
    common: dict[str, Any] = {
        "sequence_length": sequence_length,
        "seed": seed,
    }
    vocab_size = config.mock_vocab_size
    build: Any
    if kind == "bert":
        ids = BertIds.of(tokenizer) if tokenizer else mock_bert_ids(vocab_size)
        options = SentenceOptions(
            mask_prob=masking.mask_prob, short_seq_prob=masking.short_seq_prob
        )
        build = partial(
            BERTDataset, ids=ids, masking=options, classification_head=has_pairs, **common
        )
    else:
        t5_ids = T5Ids.of(tokenizer) if tokenizer else mock_t5_ids(vocab_size)
        options = SentenceOptions(
            mask_prob=masking.mask_prob,
            max_ngram=_T5_NGRAM,
            geometric=True,
            short_seq_prob=masking.short_seq_prob,
        )
        build = partial(
            T5Dataset,
            ids=t5_ids,
            masking=options,
            decoder_sequence_length=decoder_sequence_length,
            **common,
        )
    builds = [build if name in only else None for name in SPLITS]
    if not config.mock_data:
        return build_splits(config, builds, num_samples, by_documents=True)
    # Text ids lie between the first four ids, which are special, and T5's 100 sentinels.
    num_sentinels = 100 if kind == "t5" else 0
    size = tokenizer.vocab_size if tokenizer else vocab_size
    sentences = MockSentences(4, size - num_sentinels)
    bounds = split_bounds(config.split or _MOCK_SPLIT, len(sentences.documents) - 1)
    return tuple(
        build(sentences, document_ids=part, num_samples=wanted) if build and part else None
        for build, part, wanted in zip(builds, bounds, num_samples, strict=True)
    )
