import numpy as np
import torch
from torch.utils.data import DataLoader

from mcore_data.datasets.mock import MockDocuments, MockGPTDataset


def test_the_founding_line_works_in_a_plain_dataloader():
    dataset = MockGPTDataset(sequence_length=512)
    batch = next(iter(DataLoader(dataset, batch_size=4)))
    assert batch["tokens"].shape == (4, 512)
    assert batch["tokens"].dtype == torch.int64
    assert batch["loss_mask"].dtype == torch.float32
    assert 0 <= int(batch["tokens"].min()) <= int(batch["tokens"].max()) < 50_000
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert len(dataset) == 1_000


def test_mock_data_is_the_same_every_time():
    first, second = (MockGPTDataset(16, vocab_size=100, num_samples=5) for _ in range(2))
    assert all(np.array_equal(first[k]["tokens"], second[k]["tokens"]) for k in range(5))


def test_documents_count_up_and_end_with_eod():
    documents = MockDocuments(10, num_documents=50, max_length=30)
    for i in range(50):
        tokens = documents.get(i)
        assert len(tokens) == documents.lengths[i]
        assert tokens[-1] == 9
        assert np.array_equal(tokens[:-1], np.arange(1, len(tokens)) % 10)
        assert np.array_equal(documents.get(i, 1, len(tokens) - 1), tokens[1:])
