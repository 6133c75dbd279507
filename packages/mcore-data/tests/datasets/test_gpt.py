import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.datasets.arrangement import SampleOptions
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.datasets.mock import MockDocuments
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter

LENGTHS = [5, 3, 7, 1, 4]
EOD = 99


@pytest.fixture
def toy(tmp_path):
    """Documents of 5, 3, 7, 1, 4 tokens, 1..20."""
    with IndexedWriter(tmp_path / "toy", "uint16") as writer:
        writer.add_documents(np.arange(1, 21), np.array(LENGTHS))
    return IndexedDataset(tmp_path / "toy")


@pytest.fixture
def ended(tmp_path):
    """One document of 8 tokens with an end of document in the middle and at the end."""
    with IndexedWriter(tmp_path / "ended", "uint16") as writer:
        writer.add_document([1, 2, EOD, 3, 4, 5, EOD, 6])
        writer.add_document([7, 8, 9, EOD])
    return IndexedDataset(tmp_path / "ended")


def in_order(dataset):
    """Samples in the order of the text, not of the shuffle."""
    return [dataset[int(k)] for k in np.argsort(dataset.index.shuffle)]


def test_a_sample_crosses_documents_and_labels_are_the_next_tokens(toy):
    sample = GPTDataset(toy, sequence_length=4, num_samples=6)[0]
    assert sample["tokens"].tolist() == [5, 6, 7, 8]
    assert sample["labels"].tolist() == [6, 7, 8, 9]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 1]
    assert sample["position_ids"].tolist() == [0, 1, 2, 3]
    assert {key: value.dtype.name for key, value in sample.items()} == {
        "tokens": "int64",
        "labels": "int64",
        "loss_mask": "float32",
        "position_ids": "int64",
    }


def test_neighbours_overlap_by_one_token_and_cover_the_text(toy):
    dataset = GPTDataset(toy, sequence_length=4)
    text = np.concatenate([toy[int(i)] for i in dataset.index.documents])
    for k, sample in enumerate(in_order(dataset)):
        assert sample["tokens"].tolist() == text[4 * k : 4 * k + 4].tolist()
        assert sample["labels"].tolist() == text[4 * k + 1 : 4 * k + 5].tolist()


def test_a_kept_partial_sample_is_padded_and_masked_by_position(toy):
    dataset = GPTDataset(toy, sequence_length=6, options=SampleOptions(drop_last_partial=False))
    text = np.concatenate([toy[int(i)] for i in dataset.index.documents])
    last = in_order(dataset)[-1]
    assert last["tokens"].tolist() == [*text[18:].tolist(), 0, 0, 0, 0]
    assert last["loss_mask"].tolist() == [1, 0, 0, 0, 0, 0]
    assert last["labels"][0] == text[19]


def test_a_pad_id_inside_the_text_keeps_its_loss(tmp_path):
    with IndexedWriter(tmp_path / "zeros", "uint16") as writer:
        writer.add_document([0] * 9)
    dataset = GPTDataset(
        IndexedDataset(tmp_path / "zeros"), sequence_length=4, options=SampleOptions(eod=0)
    )
    assert dataset[0]["loss_mask"].tolist() == [1, 1, 1, 1]


def test_without_the_extra_token_the_last_position_has_no_label(toy):
    dataset = GPTDataset(toy, sequence_length=4, options=SampleOptions(shift_labels=False))
    assert len(dataset) == 5
    for sample in in_order(dataset):
        assert sample["loss_mask"].tolist() == [1, 1, 1, 0]
        assert sample["labels"][:3].tolist() == sample["tokens"][1:].tolist()


def test_options_at_the_end_of_a_document(ended):
    dataset = GPTDataset(
        ended,
        sequence_length=7,
        document_ids=[0],
        options=SampleOptions(
            eod=EOD,
            reset_position_ids=True,
            reset_attention_mask=True,
            eod_mask_loss=True,
            create_attention_mask=True,
        ),
    )
    sample = dataset[0]
    assert sample["tokens"].tolist() == [1, 2, EOD, 3, 4, 5, EOD]
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 1, 1, 0]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3]
    visible = ~sample["attention_mask"][0]
    expected = np.zeros((7, 7), bool)
    expected[:3, :3] = np.tril(np.ones((3, 3), bool))  # the end belongs to what it ends
    expected[3:, 3:] = np.tril(np.ones((4, 4), bool))
    assert np.array_equal(visible, expected)
    assert sample["cu_seqlens"].tolist() == [0, 3] + [7] * 6
    assert sample["max_seqlen"] == 4


def test_a_reset_attention_mask_is_borders_and_no_matrix(ended):
    dataset = GPTDataset(
        ended,
        sequence_length=7,
        document_ids=[0],
        options=SampleOptions(eod=EOD, reset_attention_mask=True),
    )
    assert dataset[0]["cu_seqlens"].tolist() == [0, 3] + [7] * 6
    assert dataset[0]["max_seqlen"] == 4
    assert "attention_mask" not in dataset[0]


def test_a_causal_mask_is_given_only_when_asked(ended):
    assert "attention_mask" not in GPTDataset(ended, sequence_length=4)[0]
    sample = GPTDataset(
        ended, sequence_length=4, options=SampleOptions(create_attention_mask=True)
    )[0]
    assert np.array_equal(~sample["attention_mask"][0], np.tril(np.ones((4, 4), bool)))


def test_packed_borders_follow_documents_not_token_ids(ended):
    dataset = GPTDataset(
        ended,
        sequence_length=11,
        document_ids=[0, 1],
        options=SampleOptions(eod=EOD, inter_document_masking=True),
    )
    sample = dataset[0]
    first = LENGTHS_OF_ENDED[int(dataset.index.documents[0])]
    assert sample["cu_seqlens"].tolist() == [0, first] + [11] * 10
    assert sample["cu_seqlens"].dtype == np.int32
    assert sample["max_seqlen"] == max(first, 11 - first)
    assert sample["position_ids"].tolist() == [*range(first), *range(11 - first)]


LENGTHS_OF_ENDED = [8, 4]


def test_only_the_given_documents_are_read(toy):
    dataset = GPTDataset(toy, sequence_length=2, document_ids=[0, 2], num_samples=30)
    seen = {int(token) for sample in in_order(dataset) for token in sample["tokens"]}
    assert seen <= {1, 2, 3, 4, 5, *range(9, 16)}


def test_a_filler_sample_counts_nothing(toy):
    dataset = GPTDataset(toy, sequence_length=4)
    assert dataset[None]["loss_mask"].tolist() == [0, 0, 0, 0]
    assert dataset[None]["tokens"].tolist() == dataset[0]["tokens"].tolist()


def test_sources_name_the_places_of_a_sample(toy):
    dataset = GPTDataset(toy, sequence_length=4, num_samples=6)
    assert dataset.sources(0) == [(0, 4, 1), (1, 0, 3), (2, 0, 1)]


def slowly(dataset, sample, eod, *, reset_positions, reset_attention, mask_eod):
    """A sample token by token."""
    L = dataset.sequence_length
    text = []
    for sequence, offset, count in dataset.sources(sample):
        text += dataset.sequences.get(sequence)[offset : offset + count].tolist()
    num_tokens = len(text)
    text += [0] * (L + 1 - num_tokens)
    loss_mask, positions, borders, start = [], [], [0], 0
    for i in range(L):
        loss_mask.append(float(i + 1 < num_tokens and not (mask_eod and text[i] == eod)))
        positions.append(i - start if reset_positions else i)
        if text[i] == eod and i < num_tokens and i + 1 < L:
            start = i + 1
            borders.append(start)
    expected = {
        "tokens": text[:L],
        "labels": text[1 : L + 1],
        "loss_mask": loss_mask,
        "position_ids": positions,
    }
    if reset_attention:
        expected["cu_seqlens"] = borders + [L] * (L + 1 - len(borders))
        expected["max_seqlen"] = max(np.diff([*borders, L]))
    return expected


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda n: sum(n) > 1),
    L=st.integers(1, 9),
    drop=st.booleans(),
    mmap=st.booleans(),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_batches_equal_samples_made_token_by_token(
    tmp_path_factory, lengths, L, drop, mmap, flags
):
    prefix = tmp_path_factory.mktemp("some") / "some"
    tokens = np.random.default_rng(sum(lengths)).integers(0, 5, sum(lengths))
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_documents(tokens, np.array(lengths))
    if sum(lengths) < L + 1 and drop:
        return
    dataset = GPTDataset(
        IndexedDataset(prefix, mmap=mmap),
        sequence_length=L,
        options=SampleOptions(
            eod=3,
            drop_last_partial=drop,
            reset_position_ids=flags[0],
            reset_attention_mask=flags[1],
            eod_mask_loss=flags[2],
        ),
    )
    batch = dataset.batch(range(len(dataset)))
    for sample in range(len(dataset)):
        expected = slowly(
            dataset,
            sample,
            3,
            reset_positions=flags[0],
            reset_attention=flags[1],
            mask_eod=flags[2],
        )
        assert {k: v[sample].tolist() for k, v in batch.items()} == expected
        assert {k: v.tolist() for k, v in dataset[sample].items()} == expected


def test_places_are_where_sources_come_from():
    documents = MockDocuments(50, num_documents=9, max_length=30)
    dataset = GPTDataset(documents, sequence_length=7, num_samples=40)
    takers = {sequence: set() for sequence in range(9)}
    for sample in range(len(dataset)):
        for sequence, _, count in dataset.sources(sample):
            if count:
                takers[sequence].add(sample)
    for sequence, samples in takers.items():
        assert set(dataset.samples_with(sequence)) == samples


def test_a_missing_sample_or_document_is_refused(toy):
    dataset = GPTDataset(toy, sequence_length=4)
    with pytest.raises(IndexError, match="sample 4 to 4 of 4"):
        dataset[4]
    with pytest.raises(ValueError, match="0 to 4"):
        GPTDataset(toy, sequence_length=4, document_ids=[5])


def test_an_option_on_ends_needs_a_tokenizer_that_has_one(toy):
    with pytest.raises(ValueError, match="the tokenizer has none"):
        GPTDataset(toy, sequence_length=4, options=SampleOptions(eod_mask_loss=True))
