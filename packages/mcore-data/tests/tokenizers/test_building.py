import json
import re
import shutil
import sys
from base64 import b64encode
from dataclasses import replace

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertTokenizer, GPT2Tokenizer

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.engines.building import build_engine
from mcore_data.preprocessing.tokenizing import build_tools
from mcore_data.tokenizers.building import build_tokenizer, load_tokenizer
from mcore_data.tokenizers.multimodal import TAGS

BERT_VOCAB = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "earth",
    "form",
    "##ed",
    ",",
    "The",
]


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory, bpe_folder):
    """vocab.json and merges.txt of the trained tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    model = json.loads((bpe_folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges + "\n")
    return folder


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("spm")
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "tokenizer"),
        vocab_size=60, model_type="bpe", character_coverage=1.0, byte_fallback=False,
        minloglevel=2,
    )  # fmt: skip
    return folder / "tokenizer.model"


@pytest.fixture(scope="module")
def bert_vocab(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join(BERT_VOCAB) + "\n")
    return path


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "ranks.tiktoken"
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" e"]
    lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    path.write_text("".join(lines))
    return path


@pytest.fixture(
    params=["HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer", "GPT2BPETokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase", "SentencePieceTokenizer", "GPTSentencePieceTokenizer",
            "Llama2Tokenizer", "TikTokenizer", "NullTokenizer", "ByteTokenizer"]
)  # fmt: skip
def any_tokenizer(request, bpe_folder, gpt2_files, sentencepiece_model, bert_vocab, ranks):
    files = {
        "TikTokenizer": {"tokenizer_model": ranks},
        "HuggingFaceTokenizer": {"tokenizer_model": bpe_folder},
        "SFTTokenizer": {"tokenizer_model": bpe_folder},
        "MultimodalTokenizer": {"tokenizer_model": bpe_folder, "image_tag_type": "nvlm"},
        "GPT2BPETokenizer": {
            "vocab_file": gpt2_files / "vocab.json",
            "merge_file": gpt2_files / "merges.txt",
        },
        "BertWordPieceLowerCase": {"vocab_file": bert_vocab},
        "BertWordPieceCase": {"vocab_file": bert_vocab},
        "NullTokenizer": {"vocab_size": 1000},
        "ByteTokenizer": {},
    }
    chosen = files.get(request.param, {"tokenizer_model": sentencepiece_model})
    return load_tokenizer(request.param, **chosen)


def text_for(tokenizer):
    return (
        "12 7 999" if type(tokenizer).__name__ == "NullTokenizer" else "the earth formed, void"
    )


def test_a_saved_tokenizer_is_equal_when_loaded_from_its_folder(any_tokenizer, tmp_path):
    any_tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    text = text_for(any_tokenizer)
    assert again.encode(text) == any_tokenizer.encode(text)
    assert again.fingerprint() == any_tokenizer.fingerprint()
    for role in ("vocab_size", "eod", "bos", "pad"):
        assert getattr(again, role) == getattr(any_tokenizer, role)
    named = build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path)))  # as by --load
    assert named.fingerprint() == any_tokenizer.fingerprint()
    again.save(tmp_path)  # onto itself, as a resumed run does
    assert load_tokenizer(tmp_path).fingerprint() == any_tokenizer.fingerprint()


def test_a_batch_gives_what_single_texts_give(any_tokenizer):
    texts = [text_for(any_tokenizer), "", text_for(any_tokenizer)]
    assert any_tokenizer.encode_batch(texts) == [any_tokenizer.encode(text) for text in texts]


def test_ids_stay_inside_the_vocabulary(any_tokenizer):
    ids = any_tokenizer.encode(text_for(any_tokenizer))
    assert 0 <= min(ids) <= max(ids) < any_tokenizer.vocab_size
    assert 0 <= any_tokenizer.eod < any_tokenizer.vocab_size


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_byte_level_bpe_and_bytes_give_any_text_back(bpe_folder, text):
    for tokenizer in (load_tokenizer(bpe_folder), load_tokenizer("ByteTokenizer")):
        ids = tokenizer.encode(text)
        if "<|endoftext|>" not in text:
            assert tokenizer.decode(ids) == text


def test_gpt2_bpe_equals_transformers(gpt2_files):
    ours = load_tokenizer(
        "GPT2BPETokenizer",
        vocab_file=gpt2_files / "vocab.json",
        merge_file=gpt2_files / "merges.txt",
    )
    theirs = GPT2Tokenizer(
        vocab=str(gpt2_files / "vocab.json"), merges=str(gpt2_files / "merges.txt")
    )
    for text in ("the earth  was\n\nwithout form", " and ünïcödé 12345", "x<|endoftext|>y"):
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.eod == theirs.eos_token_id


@pytest.mark.parametrize("lower_case", [True, False])
def test_bert_word_pieces_equal_transformers_without_the_added_ends(bert_vocab, lower_case):
    kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    ours = load_tokenizer(kind, vocab_file=bert_vocab)
    theirs = BertTokenizer(vocab=str(bert_vocab), do_lower_case=lower_case)
    for text in ("The earth, formed", "THE théform", "[MASK] earth"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.token_id("[MASK]") == 4


def test_cased_bert_has_the_sentinels_of_t5(bert_vocab):
    tokenizer = load_tokenizer("BertWordPieceCase", vocab_file=bert_vocab)
    assert tokenizer.token_id("<extra_id_0>") == len(BERT_VOCAB)
    assert tokenizer.vocab_size == len(BERT_VOCAB) + 100


def test_a_trained_tokenizer_opens_in_transformers_with_its_end_of_document(bpe_folder):
    theirs = AutoTokenizer.from_pretrained(bpe_folder)
    ours = load_tokenizer(bpe_folder)
    text = "and the earth was  without form\n"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.eos_token == "<|endoftext|>"
    assert theirs.eos_token_id == ours.eod == 0
    assert theirs.decode(ours.encode(text)) == text


def test_llama2_starts_with_bos_and_plain_sentencepiece_does_not(sentencepiece_model):
    llama = load_tokenizer("Llama2Tokenizer", tokenizer_model=sentencepiece_model)
    plain = load_tokenizer("SentencePieceTokenizer", tokenizer_model=sentencepiece_model)
    assert llama.encode("the earth") == [llama.bos, *plain.encode("the earth")]
    assert llama.encode("the earth", add_special_tokens=False) == plain.encode("the earth")
    assert plain.decode(plain.encode("the earth")) == "the earth"


def test_sentencepiece_special_tokens_stand_behind_the_model(sentencepiece_model, tmp_path):
    tokenizer = load_tokenizer(
        "SentencePieceTokenizer", tokenizer_model=sentencepiece_model, vocab_extra_ids=3
    )
    assert tokenizer.token_id("<extra_id_2>") == 62
    ids = [*tokenizer.encode("the earth"), 62]
    assert tokenizer.decode(ids) == "the earth<extra_id_2>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the earth"
    tokenizer.save(tmp_path)
    again = TokenizerConfig(tokenizer_model=str(tmp_path), vocab_extra_ids=5)
    more = build_tokenizer(again)
    assert (more.vocab_size, more.token_id("<extra_id_4>")) == (tokenizer.vocab_size + 2, 64)


def test_bytes_of_sentencepiece_tokens_join_to_the_text(sentencepiece_model):
    tokenizer = load_tokenizer(
        "SentencePieceTokenizer", tokenizer_model=sentencepiece_model, vocab_extra_ids=1
    )
    known = tokenizer.token_bytes()
    assert len(known) == tokenizer.vocab_size
    assert known[tokenizer.eod] is known[-1] is None
    ids = tokenizer.encode("the earth", add_special_tokens=False)
    assert b"".join(known[i] for i in ids) == b" the earth"  # a blank comes before every text


def test_missing_sentencepiece_names_the_extra(sentencepiece_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"mcore-data\[sentencepiece\]"):
        load_tokenizer("SentencePieceTokenizer", tokenizer_model=sentencepiece_model)


def test_truncation_and_padding_of_a_tokenizer_json_are_switched_off(bpe_folder, tmp_path):
    raw = json.loads((bpe_folder / "tokenizer.json").read_text())
    raw["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer.encode("the earth was without form")) > 2
    assert tokenizer.eod == 0  # found by its usual name, as no config names it


def test_roles_come_from_the_config_of_a_hugging_face_folder(bpe_folder, tmp_path):
    load_tokenizer(bpe_folder).save(tmp_path)
    config = {
        "eos_token": {"content": "a"},
        "pad_token": "b",
        "chat_template": "{{ messages }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eod == tokenizer.token_id("a")
    assert tokenizer.pad == tokenizer.token_id("b")
    tokenizer.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").config["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GPT2BPETokenizer", "needs --vocab-file"),
        ("HuggingFaceTokenizer", "needs --tokenizer-model"),
        ("NullTokenizer", "needs --vocab-size"),
    ],
)
def test_a_missing_option_is_named(kind, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(kind)


def test_the_default_type_reads_what_the_files_are(
    gpt2_files, sentencepiece_model, ranks, tmp_path
):
    vocab_file, merge_file = (str(gpt2_files / name) for name in ("vocab.json", "merges.txt"))
    gpt2 = build_tokenizer(TokenizerConfig(vocab_file=vocab_file, merge_file=merge_file))
    assert gpt2.fingerprint() == load_tokenizer(gpt2_files).fingerprint()
    plain = load_tokenizer("HuggingFaceTokenizer", tokenizer_model=sentencepiece_model)
    assert plain.encode("the") == load_tokenizer(sentencepiece_model).encode("the")
    assert plain.encode("the")[0] != plain.bos
    model = shutil.copy(sentencepiece_model, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    for path in (model, tmp_path):  # as Llama 2's folder without its tokenizer.json
        tokenizer = load_tokenizer("HuggingFaceTokenizer", tokenizer_model=path)
        assert tokenizer.encode("the") == [plain.bos, *plain.encode("the")]
    with pytest.raises(ValueError, match=r"Use --tokenizer-type TikTokenizer \(for Llama 3"):
        load_tokenizer("HuggingFaceTokenizer", tokenizer_model=ranks)


def test_an_end_of_document_that_is_missing_is_given_as_the_message_says(ranks, tmp_path):
    config = TokenizerConfig(
        tokenizer_type="TikTokenizer", tokenizer_model=str(ranks), tiktoken_num_special_tokens=0
    )
    job = PreprocessConfig(input=("-",), output_prefix=str(tmp_path / "out"), append_eod=True)
    with pytest.raises(ValueError, match=r"--tokenizer-special-tokens '(.*)' '(.*)'") as error:
        build_tools(job, config)
    names = tuple(re.findall(r"<\|\w+\|>", str(error.value)))
    tools = build_tools(job, replace(config, tokenizer_special_tokens=names))
    assert tools.encoder.eod == tools.tokenizer.token_id("<|end_of_text|>") == 256 + 3 + 1


def test_missing_or_foreign_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="never downloaded"):
        load_tokenizer("HuggingFaceTokenizer", tokenizer_model="meta-llama/Llama-3-8B")
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a tokenizer folder"):
        load_tokenizer("GPT3Tokenizer")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_an_image_is_one_token_with_tags_around_it(bpe_folder):
    plain = load_tokenizer("HuggingFaceTokenizer", tokenizer_model=bpe_folder)
    bare = load_tokenizer("MultimodalTokenizer", tokenizer_model=bpe_folder)
    assert (plain.token_id("<image>"), bare.token_id("<image>")) == (None, plain.vocab_size)
    for kind, (before, behind) in TAGS.items():
        tokenizer = load_tokenizer(
            "MultimodalTokenizer", tokenizer_model=bpe_folder, image_tag_type=kind
        )
        assert tokenizer.encode("in <image><image> the") == bare.encode(
            f"in {before}<image>{behind}{before}<image>{behind} the"
        )
        assert tokenizer.encode("in the") == plain.encode("in the")
        assert build_engine(tokenizer).encode(["<image>"])[0].tolist() == tokenizer.encode(
            "<image>"
        )
        assert (tokenizer.fingerprint() == bare.fingerprint()) == (not kind)
    with pytest.raises(ValueError, match="needs the token <image>"):
        load_tokenizer(
            "MultimodalTokenizer",
            tokenizer_model=bpe_folder,
            image_tag_type="nvlm",
            tokenizer_special_tokens=["<|picture|>"],
        )
    with pytest.raises(ValueError, match="--image-tag-type nvlm has no effect"):
        load_tokenizer("ByteTokenizer", image_tag_type="nvlm")


@pytest.mark.parametrize("kind", ["ByteTokenizer", "NullTokenizer"])
def test_tokenizers_of_bytes_and_numbers_refuse_tokens_they_would_not_add(kind, tmp_path):
    sizes = {"vocab_size": 9} if kind == "NullTokenizer" else {}
    load_tokenizer(kind, **sizes).save(tmp_path)
    with pytest.raises(ValueError, match=f"--tokenizer-model has no effect on a {kind}, which"):
        load_tokenizer(kind, tokenizer_model="words.json", **sizes)
    for more in ({"tokenizer_special_tokens": ("<b>",)}, {"vocab_extra_ids": 2}):
        flag = "--" + next(iter(more)).replace("_", "-")
        with pytest.raises(ValueError, match=f"{flag} .*no effect .*{kind}"):
            build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path), **more))
    with pytest.raises(ValueError, match=f"--vocab-extra-ids .*no effect .*{kind}"):
        load_tokenizer(kind, vocab_extra_ids=2, **sizes)


def test_numbers_are_read_by_the_multimodal_null_tokenizer_too():
    tokenizer = load_tokenizer("NullMultimodalTokenizer", vocab_size=9)
    assert (tokenizer.encode("3 8"), tokenizer.eod) == ([3, 8], 9)


def test_text_of_another_coding_is_refused(bpe_folder):
    with pytest.raises(ValueError, match=r"'caf\\udce9' is not a text in UTF-8"):
        load_tokenizer(bpe_folder).encode("caf\udce9")


def test_null_tokenizer_refuses_words_and_foreign_ids():
    tokenizer = load_tokenizer("NullTokenizer", vocab_size=10)
    assert tokenizer.eod == 10
    assert tokenizer.encode("3 10") == [3, 10]
    with pytest.raises(ValueError, match="numbers only"):
        tokenizer.encode("3 x")
    with pytest.raises(ValueError, match="exceed the vocabulary 0 to 10"):
        tokenizer.encode("11")


def test_the_end_of_document_is_eos_even_where_padding_equals_it(bpe_folder, tmp_path):
    end = {"content": "<|endoftext|>", "special": True}
    (tmp_path / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    roles = {"eos_token": end, "pad_token": "<|endoftext|>", "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eod == tokenizer.pad == tokenizer.token_id("<|endoftext|>")
    assert tokenizer.bos is None
