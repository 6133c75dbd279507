import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.datasets.bert import BERTDataset, BertIds, replace_hidden, trim_pair
from mcore_data.datasets.masking import SentenceOptions, choose_spans, word_continuations
from mcore_data.datasets.mock import MockSentences, mock_bert_ids
from mcore_data.datasets.sentence_map import SentenceMapSpec, build_sentence_map, target_lengths
from mcore_data.tokenizers.building import load_tokenizer


def map_slowly(lengths, borders, spec, epoch):
    """Samples of one epoch, sentence by sentence."""
    rows = []
    for document in range(len(borders) - 1):
        first, end = borders[document], borders[document + 1]
        mine = lengths[first:end]
        if len(mine) < max(1, spec.min_sentences) or (len(mine) > 1 and max(mine) > 512):
            continue
        number, start, held = 0, first, 0
        for sentence in range(first, end):
            target = int(target_lengths(spec, epoch, np.array([document]), number)[0])
            held += lengths[sentence]
            remaining = end - sentence - 1
            enough = sentence + 1 - start >= spec.min_sentences
            if (held >= target and remaining > 1 and enough) or remaining == 0:
                rows.append((start, sentence + 1, target))
                start, held, number = sentence + 1, 0, number + 1
    return rows


@settings(max_examples=100, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.sampled_from([1, 2, 3, 5, 9, 600]), max_size=9), min_size=1, max_size=8
    ),
    least=st.integers(1, 2),
    short=st.sampled_from([0.0, 0.5]),
)
def test_the_map_equals_gathering_sentence_by_sentence(documents, least, short):
    lengths = np.array([n for sizes in documents for n in sizes], np.int32)
    borders = np.concatenate([[0], np.cumsum([len(sizes) for sizes in documents])])
    spec = SentenceMapSpec(max_length=12, min_sentences=least, short_seq_prob=short, seed=3)
    expected = map_slowly(lengths.tolist(), borders.tolist(), spec, 0)
    ids = np.arange(len(documents))
    if not expected:
        with pytest.raises(ValueError, match="sentences that a sample needs"):
            build_sentence_map(lengths, borders, ids, spec)
        return
    found = build_sentence_map(lengths, borders, ids, spec)
    assert sorted(map(tuple, found.tolist())) == sorted(expected)


def test_epochs_follow_each_other_until_there_are_enough_samples():
    lengths, borders = np.full(20, 4, np.int32), np.arange(0, 21, 2)
    specs = [SentenceMapSpec(max_length=9, min_sentences=2, num_samples=n) for n in (0, 25)]
    one, more = (build_sentence_map(lengths, borders, np.arange(10), spec) for spec in specs)
    assert (len(one), len(more)) == (10, 30)
    assert np.array_equal(one, more[:10])
    assert sorted(more[10:20, 0].tolist()) == sorted(one[:, 0].tolist())


def restore(sample):
    return np.where(sample["labels"] >= 0, sample["labels"], sample["text"])


def test_a_sample_is_two_parts_of_one_document_with_tokens_hidden():
    options = {"sequence_length": 96, "seed": 1234, "num_samples": 200}
    dataset = BERTDataset(MockSentences(4, 900), mock_bert_ids(900), **options)
    swapped = 0
    for k in range(200):
        sample = dataset[k]
        count = int(sample["padding_mask"].sum())
        text = restore(sample)
        separators = np.flatnonzero(text[:count] == 2)
        assert text[0] == 1
        assert separators[-1] == count - 1
        assert len(separators) == 2
        assert sample["types"].tolist() == [0] * (separators[0] + 1) + [1] * (
            count - separators[0] - 1
        ) + [0] * (96 - count)
        hidden = sample["labels"] >= 0
        assert np.array_equal(hidden, sample["loss_mask"] == 1)
        assert not hidden[[0, *separators]].any()
        assert not hidden[count:].any()
        assert 1 <= hidden.sum() <= max(1, round(0.15 * count))
        whole = np.concatenate([dataset.sequences.get(*s) for s in dataset.sources(k)])
        kept = np.concatenate([text[1 : separators[0]], text[separators[0] + 1 : count - 1]])
        if not sample["truncated"]:
            halves = (text[1 : separators[0]], text[separators[0] + 1 : count - 1])
            if sample["is_random"]:
                halves = halves[::-1]
            assert np.array_equal(np.concatenate(halves), whole)
        assert set(kept.tolist()) <= set(whole.tolist())
        swapped += int(sample["is_random"])
        again = dataset[k]
        assert all(np.array_equal(sample[key], again[key]) for key in sample)
    assert 70 < swapped < 130


def test_hidden_tokens_become_masks_random_ids_or_stay_by_80_10_10():
    ids = BertIds(vocab_size=10**6, cls=1, sep=2, mask=3)
    tokens = np.full(40_000, 77)
    shown = replace_hidden(tokens, ids, np.random.default_rng(0))
    shares = [np.mean(shown == 3), np.mean(shown == 77)]
    shares.append(1 - sum(shares))
    for share, expected in zip(shares, (0.8, 0.1, 0.1), strict=True):
        assert abs(share - expected) < 4 * (expected * (1 - expected) / 40_000) ** 0.5


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), whole=st.booleans(), geometric=st.booleans())
def test_spans_keep_to_the_budget_the_words_and_what_may_be_hidden(seed, whole, geometric):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 10, 60)
    maskable = random.random(60) < 0.9
    continues = np.arange(10) >= 7
    options = SentenceOptions(max_ngram=4, whole_words=whole, geometric=geometric)
    spans = choose_spans(tokens, maskable, continues, options, 12, random)
    hidden = np.zeros(60, bool)
    for start, stop in spans:
        assert start < stop
        assert maskable[start:stop].all()
        assert not hidden[start:stop].any()
        hidden[start:stop] = True
        if whole:
            before_is_word = start > 0 and maskable[start - 1] and continues[tokens[start]]
            after_goes_on = stop < 60 and maskable[stop] and continues[tokens[stop]]
            assert not before_is_word
            assert not after_goes_on
    assert 1 <= hidden.sum() <= 12


def test_a_pair_is_trimmed_at_its_longer_part_until_it_fits():
    a, b = np.arange(10), np.arange(100, 125)
    a_short, b_short = trim_pair(a, b, 18, np.random.default_rng(1))
    assert len(a_short) + len(b_short) == 18
    assert abs(len(a_short) - len(b_short)) <= 1
    assert np.array_equal(np.diff(b_short), np.ones(len(b_short) - 1))
    assert b_short[0] > 100


def test_ids_come_from_a_wordpiece_vocabulary(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = load_tokenizer("BertWordPieceLowerCase", vocab_file=tmp_path / "vocab.txt")
    ids = BertIds.of(tokenizer)
    assert (ids.pad, ids.cls, ids.sep, ids.mask, ids.vocab_size) == (0, 2, 3, 4, 7)
    assert np.flatnonzero(ids.continues).tolist() == [6]
    assert word_continuations(load_tokenizer("ByteTokenizer")) is None
    with pytest.raises(ValueError, match=r"no \[CLS\] and no"):
        BertIds.of(load_tokenizer("ByteTokenizer"))
