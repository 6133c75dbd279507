"""Mock data with the shapes of real data, for smoke runs, benchmarks and first steps.

Nothing is stored: a token is computed from its position, so all runs read the same data.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.arrangement import SampleOptions
from mcore_data.datasets.bert import BertIds
from mcore_data.datasets.gpt import GPTDataset, PartTransform
from mcore_data.datasets.t5 import T5Ids

_ESTIMATED_TOKENS = 1_024  # of a document: half the mean length of MockDocuments
_PLAIN = SampleOptions()


class MockDocuments:
    """Documents that count 1, 2, 3, ... modulo the vocabulary and end with ``eod``.

    Args:
        vocab_size: ids run from 0 to vocab_size - 1.
        eod: last token of each document; None means the last id.
        num_documents: number of documents, of 1 to max_length tokens each.
        max_length: largest number of tokens of a document.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        eod: int | None = None,
        num_documents: int = 100_000,
        max_length: int = 4095,
    ) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1 if eod is None else eod
        random = np.random.default_rng(0)
        self.lengths = random.integers(1, max_length + 1, num_documents).astype(np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return tokens ``offset`` to ``offset + length`` of a document."""
        end = int(self.lengths[sequence]) if length is None else offset + length
        tokens = np.arange(offset + 1, end + 1) % self.vocab_size
        if end == self.lengths[sequence]:
            tokens[-1:] = self.eod
        return tokens

    def gather(
        self,
        sequences: NDArray[np.integer],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return ranges of many documents, concatenated."""
        ranges = zip(sequences.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
        return np.concatenate([self.get(*document_range) for document_range in ranges])


class MockGPTDataset(GPTDataset):
    """Samples of ``MockDocuments``; works in a plain torch ``DataLoader``.

    Args:
        sequence_length: S, tokens in a sample.
        vocab_size: ids run from 0 to vocab_size - 1; the last one ends documents.
        num_samples: ``len`` of the dataset.
        seed: seed of the order.
        options: masks, positions and document borders, as of ``GPTDataset``; ``eod`` is that of
            the documents.
        transform: as of ``GPTDataset``.
    """

    def __init__(
        self,
        sequence_length: int = 512,
        vocab_size: int = 50_000,
        *,
        num_samples: int = 1_000,
        seed: int = 1234,
        options: SampleOptions = _PLAIN,
        transform: PartTransform | None = None,
    ) -> None:
        # If the estimate is too low, the index covers more epochs.
        needed = -(-(num_samples * sequence_length + 1) // _ESTIMATED_TOKENS)
        documents = MockDocuments(vocab_size, num_documents=min(100_000, needed + 1))
        super().__init__(
            documents,
            sequence_length=sequence_length,
            seed=seed,
            num_samples=num_samples,
            options=replace(options, eod=documents.eod),
            transform=transform,
        )
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples


class MockSentences:
    """Documents of 2 to 8 sentences of 4 to 40 tokens that count up."""

    def __init__(self, first_id: int, vocab_size: int) -> None:
        self.first_id = first_id
        self.vocab_size = vocab_size
        random = np.random.default_rng(0)
        counts = random.integers(2, 9, 1_000)
        self.documents = np.concatenate([[0], np.cumsum(counts)])
        self.lengths = random.integers(4, 41, int(counts.sum())).astype(np.int32)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return tokens ``offset`` to ``offset + length`` of a sentence."""
        stop = int(self.lengths[sequence]) if length is None else offset + length
        return self.first_id + (sequence + np.arange(offset, stop)) % (
            self.vocab_size - self.first_id
        )


def mock_bert_ids(vocab_size: int) -> BertIds:
    """Return the special ids of mock text: 0 pads, 1 is [CLS], 2 [SEP] and 3 [MASK]."""
    return BertIds(vocab_size=vocab_size, pad=0, cls=1, sep=2, mask=3)


def mock_t5_ids(vocab_size: int) -> T5Ids:
    """Return special ids of mock text: 0 pads, 1 begins, 2 ends, the last 100 are sentinels."""
    if vocab_size < 128:
        raise ValueError(
            f"--mock-vocab-size {vocab_size} is too small for 100 sentinels and text: use 128 "
            "or more."
        )
    sentinels = tuple(range(vocab_size - 100, vocab_size))
    return T5Ids(bos=1, eos=2, pad=0, sentinels=sentinels)
