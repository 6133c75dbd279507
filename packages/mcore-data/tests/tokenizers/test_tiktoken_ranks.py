import base64
import json
from itertools import pairwise

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.tokenizers.building import load_tokenizer
from mcore_data.tokenizers.tiktoken_ranks import PATTERNS, build_tiktoken

WORDS = [b"th", b"he", b"the", b" t", b" the", b"in", b"ing", b" in", b"er", b"  ", b"    ",
         b"\n\n", b"ere", b"her", b"123", b"12", "\u4f60".encode()[:2],
         "\u4f60".encode()]  # fmt: skip
RANKS = {bytes([b]): 255 - b for b in range(256)} | {w: 256 + i for i, w in enumerate(WORDS)}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    lines = [f"{base64.b64encode(t).decode()} {rank}\n" for t, rank in RANKS.items()]
    (folder / "tokenizer.model").write_text("".join(lines))
    rows = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for token, rank in RANKS.items()]  # fmt: skip
    (folder / "vocab.json").write_text(json.dumps(rows))
    return folder


def plain_bpe(text, pattern, offset, ranks=RANKS):
    """Tiktoken's rule, slowly: join the leftmost neighbours of lowest union until none is."""
    ids = []
    for piece in regex.findall(PATTERNS[pattern], text):
        data = piece.encode()
        if data in ranks:
            ids.append(ranks[data] + offset)
            continue
        parts = [bytes([b]) for b in data]
        while len(parts) > 1:
            unions = [ranks.get(a + b, 10**9) for a, b in pairwise(parts)]
            at = unions.index(min(unions))
            if unions[at] == 10**9:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] + offset for part in parts]
    return ids


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["the", " there", "THE", "ing", "1234", "    ", "\n\n", "\u4f60", "/\n",
                         "it's", "WeRe", "\u0301", "\xa0"]),
        st.text(max_size=5),
    ),
    max_size=10,
).map("".join)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
@pytest.mark.parametrize("pattern", ["v1", "v2", "gpt4"])
def test_ids_are_those_of_the_plain_rule_behind_the_special_ones(files, pattern, text):
    tokenizer = load_tokenizer("TikTokenizer", tokenizer_model=files / "vocab.json") if (
        pattern == "v2"
    ) else build_tiktoken(files / "vocab.json", pattern=pattern)  # fmt: skip
    if not any(name in text for name in tokenizer.special_names):
        assert tokenizer.encode(text) == plain_bpe(text, pattern, 1000)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_stand_before_and_behind(files, tmp_path):
    tokenizer = build_tiktoken(files / "vocab.json", special_tokens=["<|extra|>"])
    assert tokenizer.vocab_size == 1000 + len(RANKS) + 1
    assert [tokenizer.token_id(n) for n in ("<unk>", "<s>", "</s>", "<SPECIAL_7>")] == [
        0,
        1,
        2,
        7,
    ]
    assert (tokenizer.bos, tokenizer.eod) == (1, 2)
    assert tokenizer.encode("a<|extra|></s>")[1:] == [1000 + len(RANKS), 2]
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint() == tokenizer.fingerprint()


def test_llama3s_form_has_no_tokens_before_and_takes_its_own_behind(files):
    names = ["<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer = build_tiktoken(
        files / "tokenizer.model", pattern="gpt4", num_special_tokens=0, special_tokens=names
    )
    assert tokenizer.encode("the") == [RANKS[b"the"]]
    assert tokenizer.eod == len(RANKS) + 1


def test_a_smaller_vocabulary_leaves_the_last_ranks_out(files):
    tokenizer = build_tiktoken(files / "vocab.json", vocab_size=1000 + 258)
    assert tokenizer.vocab_size == 1258
    assert tokenizer.encode("the") == [1256, 1000 + RANKS[b"e"]]
    with pytest.raises(ValueError, match=r"--vocab-size 1100 leaves 100 ranks"):
        build_tiktoken(files / "vocab.json", vocab_size=1100)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no ranks here", "holds no mergeable ranks"),
        ('[{"rank": 0}]', "holds no mergeable ranks"),
        ("YQ== 0\nYg== 5\n", "are not 0, 1, 2"),
        ("YQ== 0\nYg== 1\n", "lacks some of the 256"),
        ('[{"rank": 0, "token_bytes": ""}]', "has an empty token"),
    ],
)
def test_a_file_that_is_no_ranks_is_refused(tmp_path, text, reason):
    (tmp_path / "x.model").write_text(text)
    with pytest.raises(ValueError, match=reason):
        build_tiktoken(tmp_path / "x.model")


def test_too_few_special_tokens_are_refused(files):
    with pytest.raises(ValueError, match="--tiktoken-num-special-tokens 3"):
        build_tiktoken(files / "vocab.json", num_special_tokens=3)
    with pytest.raises(ValueError, match="the is an ordinary token"):
        build_tiktoken(files / "vocab.json", special_tokens=["the"])


@settings(max_examples=40, deadline=None)
@given(
    words=st.lists(st.text("abc", min_size=2, max_size=6), unique=True, max_size=40),
    texts=st.lists(st.text("abc", max_size=30), min_size=5, max_size=5),
)
def test_ids_are_those_of_the_plain_rule_whatever_ranks_before_its_parts(
    tmp_path_factory, words, texts
):
    """Ranks that no training gives: unions before their parts, tokens that none can reach."""
    ranks = {bytes([b]): b for b in range(256)}
    ranks |= {word.encode(): 256 + i for i, word in enumerate(words)}
    path = tmp_path_factory.mktemp("any") / "tokenizer.model"
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    path.write_text("\n".join(lines))
    tokenizer = build_tiktoken(path, pattern="gpt4", num_special_tokens=0)
    for text in [*texts, *words, "".join(words)]:
        assert tokenizer.encode(text) == plain_bpe(text, "gpt4", 0, ranks)


def test_the_tokenizer_holds_all_pairs_that_make_a_token(files):
    tokenizer = build_tiktoken(
        files / "tokenizer.model", num_special_tokens=0, special_tokens=["<|end|>"]
    )
    model = json.loads(tokenizer.text)["model"]
    rank_of = model["vocab"]
    pairs = sorted(
        (rank, rank_of[token[:i]], rank_of[token[i:]], token, i)
        for token, rank in rank_of.items()
        for i in range(1, len(token))
        if token[:i] in rank_of and token[i:] in rank_of
    )
    assert len(pairs) > len(WORDS)
    assert model["merges"] == [[token[:i], token[i:]] for *_, token, i in pairs]
