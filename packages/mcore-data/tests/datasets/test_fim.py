import numpy as np
import pytest

from mcore_data.config import FIMConfig
from mcore_data.datasets.fim import FillInMiddle
from mcore_data.datasets.gpt import GPTDataset
from mcore_data.datasets.mock import MockDocuments, MockGPTDataset
from mcore_data.tokenizers.plain import ByteTokenizer, NullTokenizer

PRE, MID, SUF, PAD = b"\x01", b"\x02", b"\x03", b"\x04"
NAMES = {
    "fim_prefix_token": "\x01",
    "fim_middle_token": "\x02",
    "fim_suffix_token": "\x03",
    "fim_pad_token": "\x04",
}


def rewrite(text, seed=0, **options):
    config = FIMConfig(fim_data=True, **{"fim_rate": 1.0, **NAMES, **options})
    transform = FillInMiddle.build(ByteTokenizer(), config)
    part = np.array([*text.encode(), 256])
    done = transform(part, np.random.default_rng(seed)).tolist()
    assert done[-1] == 256
    return bytes(done[:-1])


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_the_three_parts_make_the_text_again(spm_rate):
    text = "In the beginning was the wörd."
    seen = set()
    for seed in range(40):
        done = rewrite(text, seed, fim_spm_rate=spm_rate)
        seen.add(done)
        if spm_rate:
            assert done.startswith(PRE + SUF)
            suffix, rest = done[2:].split(MID)
            assert (rest + suffix).decode() == text
        else:
            prefix, rest = done[1:].split(SUF)
            suffix, middle = rest.split(MID)
            assert (prefix + middle + suffix).decode() == text
    assert len(seen) > 20


def test_a_rate_is_the_share_of_documents_rewritten():
    done = [rewrite("some text", seed, fim_rate=0.3) for seed in range(400)]
    share = np.mean([text.startswith(PRE) for text in done])
    assert abs(share - 0.3) < 3 * (0.3 * 0.7 / 400) ** 0.5
    assert {text for text in done if not text.startswith(PRE)} == {b"some text"}


def test_fragments_are_rewritten_one_by_one():
    done = rewrite("ab|cd|ef", fim_split_sample="|", fim_fragment_rate=1.0, fim_spm_rate=0.0)
    fragments = done.split(b"|")
    assert len(fragments) == 3
    plain = [f.replace(PRE, b"").replace(MID, b"").replace(SUF, b"") for f in fragments]
    assert [sorted(f) for f in plain] == [sorted(b"ab"), sorted(b"cd"), sorted(b"ef")]
    assert all(f.startswith(PRE) for f in fragments)


def test_what_must_stay_is_left_alone():
    assert rewrite("#no text", fim_no_prefix="#no") == b"#no text"
    config = FIMConfig(fim_data=True, fim_rate=1.0, **NAMES)
    transform = FillInMiddle.build(ByteTokenizer(), config)
    broken = np.array([0xA4, 65, 66])  # begins inside a character
    assert transform(broken, np.random.default_rng(0)).tolist() == broken.tolist()


def test_samples_keep_their_length_and_do_not_depend_on_the_order_of_asking():
    # The text of an id is its number.
    names = dict(zip(NAMES, "0123", strict=True))
    config = FIMConfig(fim_data=True, fim_rate=0.5, **names)
    transform = FillInMiddle.build(NullTokenizer(499), config)
    dataset = MockGPTDataset(48, vocab_size=500, num_samples=60, transform=transform)
    forwards = [dataset[k] for k in range(60)]
    backwards = [dataset[k] for k in reversed(range(60))][::-1]
    batch = dataset.batch(range(60))
    plain = MockGPTDataset(48, vocab_size=500, num_samples=60)
    changed = 0
    for k in range(60):
        assert np.array_equal(forwards[k]["tokens"], backwards[k]["tokens"])
        assert np.array_equal(forwards[k]["tokens"], batch["tokens"][k])
        assert forwards[k]["tokens"].shape == (48,)
        without_loss = np.flatnonzero(forwards[k]["loss_mask"] == 0)
        assert without_loss.tolist() == list(range(48 - len(without_loss), 48))
        assert (forwards[k]["labels"][without_loss] == 3).all()
        changed += not np.array_equal(forwards[k]["tokens"], plain[k]["tokens"])
    assert 10 < changed < 60


def test_a_rewritten_sample_is_its_documents_rewritten_one_after_another():
    config = FIMConfig(fim_data=True, fim_rate=1.0, **NAMES)
    transform = FillInMiddle.build(ByteTokenizer(), config)
    documents = MockDocuments(100, eod=256, num_documents=40, max_length=30)
    dataset = GPTDataset(documents, sequence_length=40, seed=9, transform=transform)
    for k in range(len(dataset)):
        random = np.random.default_rng([9, k])
        text = np.concatenate(
            [transform(documents.get(*s), random) for s in dataset.sources(k)]
        )
        assert np.array_equal(dataset[k]["tokens"], text[:40])


def test_missing_tokens_and_options_without_effect_are_refused():
    with pytest.raises(ValueError, match="--fim-prefix-token <fim_prefix> is not a token"):
        FillInMiddle.build(ByteTokenizer(), FIMConfig(fim_data=True))
    with pytest.raises(ValueError, match="give --tokenizer-model"):
        FillInMiddle.build(None, FIMConfig(fim_data=True))
    with pytest.raises(ValueError, match=r"--fim-rate 1\.5 must be from 0 to 1"):
        FIMConfig(fim_data=True, fim_rate=1.5)
    with pytest.raises(ValueError, match="no effect without --fim-data"):
        FIMConfig(fim_no_prefix="x")
    with pytest.raises(ValueError, match="no effect without --fim-split-sample"):
        FIMConfig(fim_data=True, fim_fragment_rate=0.5)
