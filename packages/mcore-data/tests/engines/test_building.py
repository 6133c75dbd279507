import json
import pickle
import re
from itertools import pairwise

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.engines.building import (
    ByteEngine,
    ReferenceEngine,
    build_engine,
    differing_probe,
    special_probes,
)
from mcore_data.engines.gigatoken import GigatokenEngine, border_vocabulary
from mcore_data.engines.pipeline import SPLITS, gigatoken_gap
from mcore_data.engines.protocol import special_ids
from mcore_data.engines.wordpiece import WordEngine
from mcore_data.tokenizers.building import load_tokenizer
from mcore_data.tokenizers.hf import HFTokenizer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "earth", "form", "##ed", "##s",
          ",", ".", "a", "##a", "b", "##b", "e", "##e", "\u4f60", "1", "##1"]  # fmt: skip
# Letters, marks, all kinds of white space and what only some take for it, special tokens.
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["the", "Earth", "formed", " ", "  ", "\n", "\t", "\x0b", "\x0c", "\x1c", "\x1f",
             "\x85", "\xa0", "\u2028", "\u3000", "\u200b", "\u0301", "\u00c9", "\u4f60",
             "[MASK]", "[mask]", "a[SEP]b", ",", "...", "\u0130", "\x00", "\ufffd",
             "\u4e00", "\u9fff", "\u4dff", "\u3400", "\u2581", "</s>", "7", "42", "\x7f",
             "ab" * 8, "b" * 15, "b" * 16, "e" * 101, "Theearthformeds", "a\u0300\u0323"]
        ),
        st.text(max_size=4),
    ),
    max_size=12,
).map("".join)  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    vocab = tmp_path_factory.mktemp("bert") / "vocab.txt"
    vocab.write_text("\n".join(PIECES) + "\n")
    return {
        kind: load_tokenizer(kind, vocab_file=vocab)
        for kind in ("BertWordPieceLowerCase", "BertWordPieceCase")
    }


@pytest.fixture(scope="module")
def llama2(tmp_path_factory, corpus):
    """A small model as Llama 2's is: byte pairs with byte fallback, blanks kept."""
    folder = tmp_path_factory.mktemp("spm")
    train_sentencepiece(folder, corpus)
    return folder / "tokenizer.model"


def train_sentencepiece(folder, corpus, **options):
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    defaults = {
        "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "hard_vocab_limit": False, "vocab_size": 320,
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "tokenizer"),
        minloglevel=2, **(defaults | options),
    )  # fmt: skip


def assert_equal(engine, tokenizer, texts):
    found = engine.encode(texts)
    assert [ids.tolist() for ids in found] == tokenizer.encode_batch(texts)


@pytest.fixture(scope="module")
def words(bert):
    """Each tokenizer that words can do, and an engine that all examples teach."""
    return [(each, build_engine(each, "words")) for each in bert.values()]


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(TEXTS, max_size=4))
def test_words_give_the_ids_of_word_pieces(words, texts):
    for tokenizer, engine in words:
        assert engine.name == "words"
        assert_equal(engine, tokenizer, texts)


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(min_size=1, max_size=40), min_size=8, max_size=8))
def test_words_give_the_ids_of_any_characters_though_they_forget(bert, texts):
    for tokenizer in bert.values():
        engine = WordEngine(tokenizer, max_words=5)
        assert_equal(engine, tokenizer, texts[:4])
        assert_equal(engine, tokenizer, texts[4:])


def test_every_character_has_the_ids_of_its_tokenizer_alone_and_between_others(words):
    """All of Unicode but surrogates, each beside letters, punctuation and blanks."""
    every = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    few = [*every[:0x3400:3], *every[0x3400:0x4E10:53], *every[0x9FF0:0xA010], *every[::997]]
    texts = ["".join(f"b{one}e {one},{one}1" for one in few[at::40]) for at in range(40)]
    for tokenizer, engine in words:
        assert_equal(engine, tokenizer, texts)


def test_a_long_text_is_encoded_in_parts(words, monkeypatch):
    monkeypatch.setattr("mcore_data.engines.word_cache._BATCH_BYTES", 50)
    long = "the earth,  formed   [MASK]\u4f60 </s> the " * 40
    for tokenizer, engine in words:
        assert_equal(engine, tokenizer, [long, "", "a", "b" * 300, "the earth " * 9, " "])
        assert_equal(engine, tokenizer, ["the,\nearth\t\r\n" * 30, "\n" * 200, " " * 200])


def test_chinese_characters_are_parted_only_where_the_tokenizer_parts_them(bert):
    core = bert["BertWordPieceCase"].core
    fields = json.loads(core.to_str())
    for parts in (True, False):
        fields["normalizer"]["handle_chinese_chars"] = parts
        tokenizer = HFTokenizer(type(core).from_str(json.dumps(fields)))
        texts = ["a\u4f60b", "\u4f60\u4f60", "\u4dffa\u4e00", "the\u9fffearth \ua000a"]
        assert_equal(WordEngine(tokenizer), tokenizer, texts)


def test_words_are_learnt_again_when_there_are_too_many(bert):
    tokenizer = bert["BertWordPieceLowerCase"]
    engine = WordEngine(tokenizer, max_words=3)
    for _ in range(3):
        assert_equal(engine, tokenizer, ["the earth formed a b", "earth, the"])
    assert_equal(pickle.loads(pickle.dumps(engine)), tokenizer, ["formed b"])


def with_token(tokenizer, name, **flags):
    """A copy with one more added token."""
    core = tokenizers.Tokenizer.from_str(tokenizer.core.to_str())
    core.add_tokens([tokenizers.AddedToken(name, **{"normalized": False, **flags})])
    return HFTokenizer(core)


def test_words_need_a_bert_tokenizer_whose_every_part_is_known(bpe_folder, bert):
    with pytest.raises(ValueError, match="and this one has a BPE model"):
        build_engine(load_tokenizer(bpe_folder), "words")
    cased = bert["BertWordPieceCase"]
    refused = [
        with_token(cased, "[A B]"),
        with_token(cased, "end"),
        with_token(cased, "[X]", single_word=True),
        with_token(cased, "[X]", normalized=True),
        with_token(cased, "[MASK]", lstrip=True, special=True),
        with_token(cased, "[X]", rstrip=True),
    ]
    for tokenizer in refused:
        with pytest.raises(ValueError, match="and this one has added token '"):
            WordEngine(tokenizer)
        assert build_engine(tokenizer).name == "reference"


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"single_word": True}, "added token 'foo' with single_word"),
        ({"lstrip": True}, "added token 'foo' with lstrip"),
        ({"rstrip": True}, "added token 'foo' with rstrip"),
        ({"normalized": True}, "added tokens with and without normalized that may overlap"),
    ],
)
def test_byte_pairs_with_an_odd_added_token_are_encoded_by_the_tokenizer(
    bpe_folder, caplog, flags, part
):
    tokenizer = with_token(load_tokenizer(bpe_folder), "foo", **flags)
    with caplog.at_level("INFO", "mcore_data"):
        engine = build_engine(tokenizer)
    assert engine.name == "reference"
    assert len(caplog.records) == 1
    assert f"not known to do this tokenizer exactly: it has {part}.\n" in caplog.text
    assert_equal(engine, tokenizer, ["call foo1 and a  [MASK] foo N"])


@pytest.mark.parametrize(
    ("part", "value", "gap"),
    [
        ("normalizer", {"type": "NFKC"}, "normalizer NFKC"),
        ("pre_tokenizer", None, "pre_tokenizer null"),
        ("pre_tokenizer", {"type": "Whitespace"}, "pre_tokenizer Whitespace"),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
                "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
                "special_tokens": {},
            },
            "a template that does not contain the text once",
        ),
        ("model", {"dropout": 0.5}, "dropout 0.5 of its model"),
        ("model", {"end_of_word_suffix": "</w>"}, "end_of_word_suffix '</w>' of its model"),
        ("model", {"byte_fallback": True}, "byte_fallback and a vocabulary that lacks 256"),
    ],
)
def test_gigatoken_takes_byte_pairs_only_if_it_knows_every_part(bpe_folder, part, value, gap):
    fields = json.loads((bpe_folder / "tokenizer.json").read_text())
    fields[part] = {**fields[part], **value} if part == "model" else value
    tokenizer = HFTokenizer(tokenizers.Tokenizer.from_str(json.dumps(fields)))
    with pytest.raises(ValueError, match=re.escape(f"exactly: it has {gap}")):
        build_engine(tokenizer, "gigatoken")


@pytest.mark.parametrize(
    ("options", "gap", "texts"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "normalization_rule_name nmt_nfkc",
         ["b\u0323\u0323", "\x85"]),
        ({"user_defined_symbols": ["<think>"]}, "user-defined piece '<think>'", ["x<think>y"]),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces", ["\t in"]),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix", ["in the"]),
        ({"model_type": "unigram"}, "not BPE with byte_fallback", ["in the"]),
        ({"byte_fallback": False}, "not BPE with byte_fallback", ["\u4f60"]),
    ],
)  # fmt: skip
def test_gigatoken_takes_sentencepiece_only_if_it_knows_every_field(
    tmp_path, corpus, options, gap, texts
):
    train_sentencepiece(tmp_path, corpus, **options)
    tokenizer = load_tokenizer("SentencePieceTokenizer", tokenizer_model=tmp_path)
    with pytest.raises(ValueError, match=f"exactly: it has .*{gap}"):
        build_engine(tokenizer, "gigatoken")
    assert_equal(build_engine(tokenizer), tokenizer, texts)


def test_a_field_of_a_sentencepiece_model_that_nobody_knows_is_one_that_engines_do_not(
    tmp_path, corpus, llama2
):
    for message in (b"\x12", b"\x1a"):  # field 999 of the trainer, then of the normalizer
        odd = tmp_path / "tokenizer.model"
        odd.write_bytes(llama2.read_bytes() + message + b"\x03\xb8\x3e\x01")
        assert (
            gigatoken_gap(load_tokenizer(odd))
            == "field 999 of the model, whose effect is not known"
        )


def test_added_ids_are_found_though_a_text_has_the_same_ones(bpe_folder):
    core = load_tokenizer(bpe_folder).core
    token = ("a", core.token_to_id("a"))
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A:0 a:0", pair="$A:0 $B:1", special_tokens=[token]
    )
    assert special_ids(HFTokenizer(core)) == ([], [token[1]])


def test_special_probes_put_each_name_beside_every_other_one():
    names = ["<a>", "<b>", "<c>"]
    probes = "|".join(["", *special_probes(names), ""])
    for first in names:
        for second in names:
            for between in ("", " ", "  ", "\n"):
                assert f"{first}{between}{second}" in probes
        for around in ("|{}|", "|{}a", "a{}|", "| {} |", "|  {}  |", "\t{}\t", "\n{}\n"):
            assert around.format(first) in probes
    many = [f"<{number}>" for number in range(1000)]
    probes = special_probes(many)
    assert len(probes) < 15 * 1000
    assert all(a + b in probes for a, b in pairwise(many))
    assert special_probes([]) == []


def test_gigatoken_gives_the_same_ids_once_it_has_forgotten_its_words(bpe_folder):
    tokenizer = load_tokenizer(bpe_folder)
    engine = GigatokenEngine(tokenizer, forget_after=20)
    first = engine._core
    for _ in range(3):
        assert_equal(engine, tokenizer, ["in the beginning was the word", "void"])
    assert engine._core is not first


def test_special_tokens_are_words_wherever_a_text_spells_them(tmp_path):
    names = ["[X]", "[X]]", "<extra_id_1>", "<extra_id_10>", "<", "<e", "[SEPARATOR]"]
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(PIECES) + "\n")
    tokenizer = load_tokenizer(
        "BertWordPieceLowerCase", vocab_file=vocab, tokenizer_special_tokens=names
    )
    texts = [
        "a[X]b",
        "[X]]]",
        "[[X]",
        "the<extra_id_10>0>",
        "[x] [ X]",
        "<extra_id_1",
        "[SEP][",
        "<extra<e<ex[SEPARATO[SEPARATOR]",
    ]
    assert_equal(WordEngine(tokenizer), tokenizer, texts)


def test_words_do_a_tokenizer_without_special_tokens(bert):
    core = bert["BertWordPieceCase"].core
    fields = json.loads(core.to_str())
    fields["added_tokens"] = []
    tokenizer = HFTokenizer(type(core).from_str(json.dumps(fields)))
    assert not tokenizer.special_names
    assert_equal(WordEngine(tokenizer), tokenizer, ["the earth [MASK] a", ""])


def test_a_bert_tokenizer_gets_words_and_bytes_get_bytes(bert):
    assert build_engine(bert["BertWordPieceCase"]).name == "words"
    tokenizer = load_tokenizer("ByteTokenizer")
    assert isinstance(build_engine(tokenizer), ByteEngine)
    assert_equal(ByteEngine(), tokenizer, ["", "a\u4f60", "\x00"])
    assert build_engine(tokenizer, "reference").name == "reference"
    numbers = load_tokenizer("NullTokenizer", vocab_size=9)
    assert_equal(build_engine(numbers), numbers, ["1 2", ""])


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(TEXTS, max_size=4))
def test_gigatoken_gives_the_ids_of_byte_pairs(bpe_folder, texts):
    pytest.importorskip("gigatoken")
    tokenizer = load_tokenizer(
        bpe_folder,
    )
    engine = build_engine(tokenizer)
    assert engine.name.startswith("gigatoken")
    assert_equal(engine, tokenizer, texts)
    assert_equal(engine, tokenizer, ["<|endoftext|>in the<|endoftext|>"])


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(TEXTS, max_size=4))
def test_gigatoken_gives_the_ids_of_sentencepiece_with_its_control_pieces_as_text(
    llama2, texts
):
    pytest.importorskip("gigatoken")
    tokenizer = load_tokenizer("Llama2Tokenizer", tokenizer_model=llama2)
    engine = build_engine(tokenizer)
    assert engine.name.startswith("gigatoken")
    assert_equal(engine, tokenizer, [*texts, "in </s> the <s>beginning<unk>", "   deep  "])


BYTES = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


@pytest.mark.parametrize("name", ["gpt-2", *SPLITS])
def test_gigatoken_gives_the_ids_of_characters_that_its_unicode_classes_otherwise(name):
    """A vocabulary whose merges show every border, and characters of all ages."""
    pytest.importorskip("gigatoken")
    patterns = SPLITS.get(name, ())
    normalizer = {"type": "NFC"} if name.startswith("qwen") else None
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = [split | {"pattern": {"Regex": pattern}} for pattern in patterns]
    steps.append(BYTES | {"use_regex": not patterns})
    pre_tokenizer = {"type": "Sequence", "pretokenizers": steps} if patterns else steps[0]
    text = border_vocabulary(pre_tokenizer, normalizer)
    tokenizer = HFTokenizer(tokenizers.Tokenizer.from_str(text))
    engine = build_engine(tokenizer, "gigatoken")
    new = [*range(0x1ACF, 0x1AE0), *range(0x10940, 0x10948), *range(0x16EA0, 0x16EA8)]
    new += [0x7FD, 0x88F, 0x897, 0xC5C, 0xA7CE, 0xA7D2, 0x20C1, 0x1E6C0, 0x1FA8E, 0x33479]
    old = [*range(0x80, 0xD800, 211), *range(0xE000, 0x33480, 1201)]
    texts = [f" {x}a{x} 1{x}.\n{x}A{x}\u0323\u0301 {x}{x}" for x in map(chr, [*new, *old])]
    composed = ["\U00011935\U00011930", "\U000105d2\u0307", "e\u0301", "\u1100\u1161\u11a8"]
    assert_equal(engine, tokenizer, [*texts, *composed])
    plain = [i for i, text in enumerate(texts) if ord(text[1]) in old]
    left = set(engine._check.differing(texts))
    assert left, "the tokenizers share a version of Unicode: this test shows nothing"
    assert len(left & {*plain}) < 0.2 * len(plain), "most texts go to the slow tokenizer"


def test_gigatoken_adds_what_the_tokenizer_adds_around_a_text(bpe_folder, tmp_path):
    pytest.importorskip("gigatoken")
    fields = json.loads((bpe_folder / "tokenizer.json").read_text())
    fields["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    tokenizer = load_tokenizer(tmp_path)
    eod = tokenizer.token_id("<|endoftext|>")
    assert special_ids(tokenizer) == ([eod], [])
    engine = build_engine(tokenizer, "gigatoken")
    assert_equal(engine, tokenizer, ["", "in the deep"])
    assert_equal(pickle.loads(pickle.dumps(engine)), tokenizer, ["void"])


def test_a_missing_extra_is_named(bpe_folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gigatoken", None)
    with pytest.raises(ImportError, match=r"mcore-data\[fast\]"):
        build_engine(load_tokenizer(bpe_folder), "gigatoken")
    assert build_engine(load_tokenizer(bpe_folder)).name == "reference"


class _Shifted(ReferenceEngine):
    """An engine that is wrong on texts with a certain letter."""

    def encode(self, texts):
        right = super().encode(texts)
        return [
            ids + np.uint32("\u4f60" in text) for ids, text in zip(right, texts, strict=True)
        ]


def test_the_probes_find_an_engine_that_is_wrong_on_one_script(bpe_folder):
    tokenizer = load_tokenizer(bpe_folder)
    assert differing_probe(ReferenceEngine(tokenizer), tokenizer) is None
    assert "\u4f60" in differing_probe(_Shifted(tokenizer), tokenizer)
