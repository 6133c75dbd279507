"""Made-up data of the real shapes: for smoke runs, benchmarks and first steps.

Nothing is stored: a token is computed from its place, so any run anywhere sees the same.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.gpt import GPTDataset


class MockDocuments:
    """Documents that count 1, 2, 3, ... modulo the vocabulary and end with ``eod``.

    Args:
        vocab_size: ids run from 0 to vocab_size - 1.
        eod: last token of each document; None means the last id.
        num_documents: documents, of 1 to max_length tokens each.
        max_length: tokens of the longest documents.
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
        """Documents."""
        return len(self.lengths)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens ``offset`` to ``offset + length`` of a document."""
        end = int(self.lengths[sequence]) if length is None else offset + length
        tokens = np.arange(offset + 1, end + 1) % self.vocab_size
        if end == self.lengths[sequence]:
            tokens[-1:] = self.eod
        return tokens


class MockGPTDataset(GPTDataset):
    """Samples of ``MockDocuments``; works in a plain torch ``DataLoader``.

    Args:
        sequence_length: S, tokens in a sample.
        vocab_size: ids run from 0 to vocab_size - 1; the last one ends documents.
        num_samples: ``len`` of the dataset.
        seed: of the order.
        **options: further options of ``GPTDataset``.
    """

    def __init__(
        self,
        sequence_length: int = 512,
        vocab_size: int = 50_000,
        *,
        num_samples: int = 1_000,
        seed: int = 1234,
        **options: Any,
    ) -> None:
        documents = MockDocuments(vocab_size)
        merged: dict[str, Any] = {"eod": documents.eod, **options}
        super().__init__(
            documents,
            sequence_length=sequence_length,
            seed=seed,
            num_samples=num_samples,
            **merged,
        )
        self.num_samples = num_samples

    def __len__(self) -> int:
        """Exactly the samples asked for."""
        return self.num_samples
