"""Tokenizers beside megatron-core's: what docs/defaults.md says of them, run."""

import json
import warnings

import pytest

from mcore_data.config import TokenizerConfig
from mcore_data.tokenizers.building import build_tokenizer

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore"),  # of what megatron-core misses or does here
]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "end", "hello", "Hello"]
TEXT = "the end  of a document "


@pytest.fixture(scope="module")
def theirs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what megatron-core misses here
        return pytest.importorskip("megatron.core.tokenizers.text.libraries")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    texts = ["the end of a document and the start of another", "token ids are numbers"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "tokenizer"),
        vocab_size=40, model_type="bpe", minloglevel=2,
    )  # fmt: skip
    return str(folder / "tokenizer.model")


def test_sentencepiece_agrees_and_llama2_puts_bos_first(theirs, model):
    their = theirs.SentencePieceTokenizer(model)
    ids = their.text_to_ids(TEXT)
    for kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        our = build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=model))
        first = [our.bos] if kind == "Llama2Tokenizer" else []
        assert our.encode(TEXT) == first + ids
        assert (our.vocab_size, our.eod) == (their.vocab_size, their.eos_id)


def test_null_has_one_id_more_which_ends_documents(theirs):
    their = theirs.NullTokenizer(100)
    our = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    assert our.encode("7 12 99") == their.text_to_ids("7 12 99")
    assert (their.vocab_size, their.eod) == (100, 99)
    assert (our.vocab_size, our.eod) == (101, 100)


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_bert_gives_the_words_without_their_cls_and_sep(theirs, tmp_path, kind):
    # What megatron-core builds from a name on the hub, from a folder of the same kind.
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    lower = kind == "BertWordPieceLowerCase"
    names = {f"{w[1:-1].lower()}_token": w for w in WORDS[:5]}
    fields = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower, **names}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    vocab = str(tmp_path / "vocab.txt")
    their = theirs.HuggingFaceTokenizer(str(tmp_path), vocab_file=vocab)
    our = build_tokenizer(TokenizerConfig(tokenizer_type=kind, vocab_file=vocab))
    ids = our.encode("Hello the end")
    assert ids == [WORDS.index("hello" if lower else "Hello"), 5, 6]
    assert their.text_to_ids("Hello the end") == [2, *ids, 3]
