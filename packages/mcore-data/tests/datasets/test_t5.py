import numpy as np
import pytest

from mcore_data.datasets.mock import MockSentences, mock_t5_ids
from mcore_data.datasets.t5 import T5Dataset, T5Ids, cut_spans, decoder_start
from mcore_data.tokenizers.building import load_tokenizer
from mcore_data.tokenizers.hf import HFTokenizer


def join_spans(encoder, written, sentinels):
    """The text that was cut: each sentinel replaced by what the decoder writes after it."""
    spans, current = {}, None
    for token in written:
        if token in sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    text = []
    for token in encoder:
        text += spans[token] if token in sentinels else [token]
    return text


def test_spans_are_cut_out_and_written_after_their_sentinels():
    kept, written = cut_spans(np.arange(10), [(1, 3), (3, 4), (8, 10)], [90, 91, 92, 93])
    assert kept == [0, 90, 91, 4, 5, 6, 7, 92]
    assert written == [90, 1, 2, 91, 3, 92, 8, 9]


def mock(sequence_length, decoder_sequence_length, vocab_size):
    return T5Dataset(
        MockSentences(3, vocab_size - 100), mock_t5_ids(vocab_size),
        sequence_length=sequence_length, decoder_sequence_length=decoder_sequence_length,
        seed=1234, num_samples=150,
    )  # fmt: skip


def test_a_sample_makes_its_text_again():
    dataset = mock(128, 64, 1000)
    sentinels = list(range(900, 1000))
    for k in range(150):
        sample = dataset[k]
        encoder = sample["text_enc"][sample["enc_mask"] == 1].tolist()
        count = int(sample["dec_mask"].sum())
        read, labels = sample["text_dec"].tolist(), sample["labels"].tolist()
        assert read[0] == 1
        assert labels[count - 1] == 2
        assert read[1:count] == labels[: count - 1]
        assert np.array_equal(sample["loss_mask"], sample["dec_mask"])
        assert sum(read[count:]) == sum(labels[count:]) == 0
        used = [t for t in encoder if t in sentinels]
        assert used == sentinels[: len(used)]
        text = join_spans(encoder, labels[: count - 1], sentinels)
        whole = np.concatenate([dataset.sequences.get(*s) for s in dataset.sources(k)])
        assert text == whole[: len(text)].tolist()
        assert bool(sample["truncated"]) == (len(text) < len(whole))
        cut = count - 1 - len(used)
        assert 1 <= cut <= max(1, round(0.15 * len(text)))
        again = dataset[k]
        assert all(np.array_equal(sample[key], again[key]) for key in sample)


def test_a_decoder_that_may_not_hold_the_spans_is_refused():
    with pytest.raises(ValueError, match="raise it to 153"):
        mock(512, 128, 32_000)


def test_ids_need_sentinels_a_beginning_and_an_end(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = load_tokenizer("BertWordPieceCase", vocab_file=tmp_path / "vocab.txt")
    ids = T5Ids.of(tokenizer)
    assert (ids.bos, ids.eos, ids.pad, len(ids.sentinels)) == (2, 3, 0, 100)
    assert ids.sentinels[0] == tokenizer.token_id("<extra_id_0>")
    # Published T5s have no beginning: their decoder begins with padding.
    published = HFTokenizer(tokenizer.core, {**tokenizer.config, "bos_token": None})
    assert (T5Ids.of(published).bos, decoder_start(published)) == (0, 0)
    nothing = HFTokenizer(tokenizer.core, {**published.config, "pad_token": None})
    with pytest.raises(ValueError, match="or a padding token"):
        T5Ids.of(nothing)
    with pytest.raises(ValueError, match="add them by --vocab-extra-ids"):
        T5Ids.of(load_tokenizer("ByteTokenizer"))
