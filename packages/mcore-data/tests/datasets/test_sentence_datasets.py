"""BERT's samples from a run's flags: what is stored, split by documents; and made-up ones."""

import numpy as np
import pytest

from mcore_data.config import DataConfig, MaskingConfig, TokenizerConfig
from mcore_data.datasets.sentence_datasets import build_sentence_datasets
from mcore_data.indexed.writer import IndexedWriter
from mcore_data.tokenizers.building import build_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(45))]
SHORT = {"sequence_length": 24, "seed": 3}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    file = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    file.write_text("\n".join(WORDS) + "\n")
    return build_tokenizer(
        TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(file))
    )


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Twenty documents of three sentences; a sentence has one id, its document's."""
    prefix = tmp_path_factory.mktemp("stored") / "sentences"
    with IndexedWriter(prefix, "uint16") as writer:
        for document in range(20):
            writer.add_document(np.full(15, 5 + document), [4, 5, 6])
    return str(prefix)


def ids_of(dataset):
    found = set()
    for i in range(len(dataset)):
        row = dataset[i]
        shown = np.where(row["labels"] >= 0, row["labels"], row["text"])
        found |= set(shown[row["padding_mask"] > 0].tolist()) - {2, 3}
    return found


def test_documents_are_split_whole_and_pairs_are_made_unless_no_head_reads_them(
    prefix, tokenizer
):
    config = DataConfig(data_path=(prefix,), split="6,2,2")
    train, valid, test = build_sentence_datasets(
        "bert", config, tokenizer, MaskingConfig(), num_samples=(40, 5, 0), **SHORT
    )
    assert len(train) >= 40
    assert ids_of(train) == {5 + i for i in range(12)}
    assert ids_of(valid) == {5 + i for i in range(12, 16)}
    assert ids_of(test) == {5 + i for i in range(16, 20)}
    assert {int(train[i]["is_random"]) for i in range(40)} == {0, 1}
    masked = np.mean(
        [train[i]["loss_mask"].sum() / train[i]["padding_mask"].sum() for i in range(40)]
    )
    assert 0.1 < masked < 0.2
    single, *others = build_sentence_datasets(
        "bert",
        config,
        tokenizer,
        MaskingConfig(),
        has_pairs=False,
        num_samples=(40, 5, 0),
        only=("train",),
        **SHORT,
    )
    assert others == [None, None]
    assert not any(single[i]["types"].any() for i in range(len(single)))


def test_made_up_text_needs_no_tokenizer_and_stored_text_does(prefix):
    train, *_ = build_sentence_datasets(
        "bert",
        DataConfig(mock_data=True, mock_vocab_size=60),
        None,
        MaskingConfig(mask_prob=0.3),
        num_samples=(30, 0, 0),
        **SHORT,
    )
    rows = [train[i] for i in range(30)]
    assert all(row["text"].max() < 60 for row in rows)
    assert 0.2 < np.mean([r["loss_mask"].sum() / r["padding_mask"].sum() for r in rows]) < 0.4
    with pytest.raises(ValueError, match="BertWordPieceLowerCase"):
        build_sentence_datasets(
            "bert", DataConfig(data_path=(prefix,)), None, MaskingConfig(), **SHORT
        )
    with pytest.raises(ValueError, match="--mask-prob"):
        MaskingConfig(mask_prob=1.0)
