"""Engines against tokenizers that nobody chose: drawn over all options of their libraries.

A seed draws a tokenizer (SentencePiece models, byte-level BPE, Llama's form of it, WordPiece,
ranks, with normalizers, pre-tokenizers, post-processors and added tokens of all flags) and
texts that hit its parts. ``--engine auto`` must give the tokenizer's ids on every text.
"""

import random
from base64 import b64encode
from collections import Counter

import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from mcore_data.engines.building import build_engine
from mcore_data.engines.pipeline import SPLITS
from mcore_data.tokenizers.building import load_tokenizer
from mcore_data.tokenizers.hf import HFTokenizer, byte_letters
from mcore_data.tokenizers.tiktoken_ranks import PATTERNS, build_tiktoken

WORDS = [
    *("the", "earth", "formed", "anana", "banana", "issi", "Mississippi", "erere", "haha"),
    *("x", "if", "return", "0xFF", "2024", "void", "deep", "created", "<0x0A>", "<s>", "unk>"),
    *("we'll", "ababab", "----", "====", "-=-=-="),
    *("e\u0301a", "caf\u00e9", "\u4f60\u597d"),
]
ODD = [
    *("", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\x00", "\x0b", "\x1c", "\x7f", "\x85"),
    *("\xa0", "\xad", "\u200b", "\u2028", "\u3000", "\u2581", "\ufeff", "\ufffd", "\ufb01"),
    *("b\u0323\u0323", "a\u0300\u0323", "\u0130", "\u1e9e", "\u03c3\u03c2", "\u00c5", "\u4e00"),
    *(
        "\U0001f469\u200d\U0001f4bb",
        "\u0e2a\u0e27\u0e31",
        "\u216b",
        "\u00bd",
        "\u0301",
        "\uac00",
    ),
    *("\u1100\u1161", "'s", "'LL", "a", "B", "_", ".", ",", "7", "42", "123456", "aaaaaaa"),
    *("=======", "        ", "<unk>", "</s>", "<0x41>"),
]
NAMES = [
    *("<think>", "foo", "  ", "[MASK]", "<|end|>", "<|end|>x", "\n\n", "\u2581x", "a", "<"),
    *("\u4f60", "[X]", "e\u0301", "FOO", "<a b>", " <y>", "<z> ", "the", "ab", ".", "1", "'s"),
    "\t",
]


def draw_text(draw, names):
    """Words, odd characters and names of added tokens, side by side or with blanks between."""
    parts = []
    for _ in range(draw.randrange(14)):
        kind = draw.random()
        if kind < 0.45:
            parts.append(draw.choice(WORDS))
        elif kind < 0.7:
            parts.append(draw.choice(ODD))
        elif kind < 0.85 and names:
            parts.append(draw.choice(names))
        elif kind < 0.9:
            parts.append(chr(draw.choice([*range(0x20, 0xD7FF), *range(0x1F300, 0x1F700)])))
        else:
            parts.append(draw.choice([" ", "  ", "\n", "\t"]))
        if draw.random() < 0.4:
            parts.append(" ")
    return "".join(parts)


def draw_tokenizer(draw, folder):
    """A tokenizer of any kind, and names that its texts should hold."""
    kind = draw.choice(["sentencepiece", "bpe", "bpe", "llama", "wordpiece", "ranks", "other"])
    return {
        "sentencepiece": draw_sentencepiece,
        "bpe": draw_bpe,
        "llama": draw_llama,
        "wordpiece": draw_wordpiece,
        "ranks": draw_ranks,
        "other": draw_other,
    }[kind](draw, folder)


def rarely(draw, usual, *others):
    """The usual value mostly, so that many drawn tokenizers are ones that engines take."""
    return usual if draw.random() < 0.93 else draw.choice(others)


def draw_words(draw):
    """Words to learn pieces from: some that repeat themselves, over two letters, or all."""
    if draw.random() < 0.6:
        return WORDS
    letters = draw.choice(["ab", "-=", "0a", "\u4f60a"])
    return ["".join(draw.choices(letters, k=draw.randrange(1, 12))) for _ in range(40)]


def draw_sentencepiece(draw, folder):
    names = [name for name in NAMES if name.strip() and "\u2581" not in name]
    options = {
        "model_type": rarely(draw, "bpe", "unigram", "char"),
        "byte_fallback": rarely(draw, True, False),
        "normalization_rule_name": rarely(
            draw, "identity", "nmt_nfkc", "nfkc", "nfkc_cf", "nmt_nfkc_cf"
        ),
        "remove_extra_whitespaces": rarely(draw, False, True),
        "add_dummy_prefix": draw.random() < 0.6,
        "treat_whitespace_as_suffix": rarely(draw, False, True),
        "allow_whitespace_only_pieces": draw.random() < 0.6,
        "split_by_whitespace": draw.random() < 0.7,
        "split_digits": draw.random() < 0.5,
        "split_by_number": draw.random() < 0.5,
        "split_by_unicode_script": draw.random() < 0.5,
        "user_defined_symbols": rarely(draw, [], draw.sample(names, 2), ["<think>"]),
        "control_symbols": rarely(draw, [], draw.sample(names, 2), ["<c>"]),
        "unk_piece": rarely(draw, "<unk>", "the", "???"),
        "eos_id": draw.choice([2, -1]),
        "vocab_size": draw.randrange(330, 480),
        "hard_vocab_limit": False,
    }
    words = draw_words(draw)
    rows = [" ".join(draw.choices(words, k=draw.randrange(2, 9))) for _ in range(150)]
    rows += ["  " * draw.randrange(1, 4) + "x = " + "=" * draw.randrange(9) for _ in range(50)]
    prefix = folder / f"model{draw.getrandbits(32)}"
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(rows), model_prefix=str(prefix), minloglevel=9, **options
        )
    except RuntimeError:  # names that meet a piece of another kind
        return draw_sentencepiece(draw, folder)
    path = prefix.with_suffix(".model")
    mutate_sentencepiece(draw, path)
    kind = draw.choice(["SentencePieceTokenizer", "Llama2Tokenizer"])
    tokenizer = load_tokenizer(kind, tokenizer_model=str(path))
    extra = [*options["user_defined_symbols"], *options["control_symbols"]]
    return tokenizer, [*extra, options["unk_piece"], "<0x41>", "<s>", *words[:10]]


def mutate_sentencepiece(draw, path):
    """Change a trained model as people do who add pieces, and in ways that nobody does."""
    change = rarely(
        draw, "", "unused", "scores", "equal", "spaces", "periods", "user", "escape"
    )
    if not change:
        return
    proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    normal = [piece for piece in proto.pieces if piece.type == 1]
    if change == "unused":
        for piece in draw.sample(normal, 5):
            piece.type = 5
    elif change == "user":
        draw.choice(normal).type = 4
    elif change == "scores":
        scores = [piece.score for piece in normal]
        draw.shuffle(scores)
        for piece, score in zip(normal, scores, strict=True):
            piece.score = score
    elif change == "equal":
        for piece in draw.sample(normal, 20):
            piece.score = -5.0
    elif change == "escape":
        proto.normalizer_spec.escape_whitespaces = False
    else:
        known = {piece.piece for piece in proto.pieces}
        added = ["\u2581" * n for n in range(2, 17)] if change == "spaces" else []
        added = added or ["ab", "aba", "abab", "ababa", "ba", "-=", "-=-", "-=-=", "=-", "=-="]
        for number, name in enumerate(added):
            if name not in known:
                proto.pieces.add(piece=name, score=1.0 + number, type=1)
    path.write_bytes(proto.SerializeToString())


def draw_added(draw, core):
    """Add tokens, of all flags now and then; return their names."""
    names = draw.sample(NAMES, draw.randrange(5))
    is_odd = draw.random() < 0.15
    normalized = draw.choice(["none", "none", "none", "all", "blanks", "some"])
    for name in names:
        flags = {
            flag: is_odd and draw.random() < 0.3 for flag in ("single_word", "lstrip", "rstrip")
        }
        flags["normalized"] = {
            "none": False,
            "all": True,
            "blanks": not name.strip(" "),
            "some": draw.random() < 0.5,
        }[normalized]
        if core.normalizer and not core.normalizer.normalize_str(name):
            flags["normalized"] = False  # the library searches for nothing, for ever
        token = AddedToken(name, special=draw.random() < 0.7, **flags)
        (core.add_special_tokens if token.special else core.add_tokens)([token])
    return names


def draw_post_processor(draw, core):
    """Mostly none or ByteLevel; else one that adds ids around a text."""
    kind = draw.randrange(8)
    if kind < 4:
        core.post_processor = processors.ByteLevel(trim_offsets=False) if kind < 2 else None
        return
    vocab = core.get_vocab()
    first, last = draw.choices(sorted(vocab), k=2)
    pairs = [(first, vocab[first]), (last, vocab[last])]
    if kind == 4:
        core.post_processor = processors.BertProcessing(pairs[0], pairs[1])
    elif kind == 5:
        core.post_processor = processors.RobertaProcessing(pairs[0], pairs[1])
    else:
        steps = [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single=draw.choice(["F:0 $A:0", "F:0 $A:0 L:0", "$A:0 L:0 F:0", "$A:0"]),
                pair="$A:0 $B:1",
                special_tokens=[("F", vocab[first]), ("L", vocab[last])],
            ),
        ]
        core.post_processor = steps[1] if kind == 6 else processors.Sequence(steps)


def learn_merges(draw, vocab, rows, count):
    """Merges of neighbours drawn from rows of letters, and the pieces that they make."""
    merges = {}
    for _ in range(count * 3):
        row = draw.choice(rows)
        pieces = list(row)
        for left, right in merges:
            pieces = join(pieces, left, right)
        if len(pieces) < 2:
            continue
        at = draw.randrange(len(pieces) - 1)
        left, right = pieces[at : at + 2]
        if left in vocab and right in vocab and (left, right) not in merges:
            merges[left, right] = None
            vocab.setdefault(left + right, len(vocab))
        if len(merges) >= count:
            break
    return list(merges)


def join(pieces, left, right):
    joined = []
    for piece in pieces:
        if joined and joined[-1] == left and piece == right:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def draw_bpe(draw, folder):
    letters = byte_letters()
    vocab = {letter: number for number, letter in enumerate(letters)}
    words = draw_words(draw)
    rows = [
        "".join(letters[byte] for byte in f"{' ' * draw.randrange(2)}{word}".encode())
        for word in [*words, *(odd for odd in ODD if len(odd) > 1)]
    ]
    merges = learn_merges(draw, vocab, rows, draw.randrange(150))
    if draw.random() < 0.1:
        vocab = {name: number for name, number in vocab.items() if name != letters[0x7A]}
        merges = [m for m in merges if all(one in vocab for one in (*m, "".join(m)))]
        vocab = {name: number for number, name in enumerate(vocab)}
    options = {}
    options["ignore_merges"] = draw.random() < 0.3
    if draw.random() < 0.1:
        options["unk_token"] = next(iter(vocab))
        options["fuse_unk"] = draw.random() < 0.5
    if draw.random() < 0.1:
        options["end_of_word_suffix"] = "##"
    if draw.random() < 0.1:
        options["byte_fallback"] = True
    if draw.random() < 0.05:
        options["continuing_subword_prefix"] = "##"
        merges = []  # the library cuts so many letters from the right part of each
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
    core.normalizer = rarely(
        draw,
        rarely(draw, None, normalizers.NFC()),
        normalizers.NFD(),
        normalizers.NFKC(),
        normalizers.Lowercase(),
        normalizers.Strip(),
        normalizers.Replace("  ", " "),
        normalizers.Prepend(" "),
        normalizers.Sequence([normalizers.NFC()]),
        normalizers.Sequence([]),
    )
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(pattern, behavior="isolated", invert=False):
        return pre_tokenizers.Split(Regex(pattern), behavior, invert)

    patterns = draw.choice([*SPLITS.values(), (PATTERNS["v1"],)])

    kind = rarely(draw, draw.choice(["gpt2", "split"]), *range(9))
    if kind == "gpt2":
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "split":
        core.pre_tokenizer = pre_tokenizers.Sequence([*map(split, patterns), whole])
    else:
        pattern = patterns[0]
        core.pre_tokenizer = [
            pre_tokenizers.ByteLevel(add_prefix_space=True),
            whole,
            pre_tokenizers.Sequence([split(pattern, "removed"), whole]),
            pre_tokenizers.Sequence([split(pattern, "merged_with_next"), whole]),
            pre_tokenizers.Sequence([split(pattern, invert=True), whole]),
            pre_tokenizers.Sequence([split(pattern), pre_tokenizers.ByteLevel(False)]),
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
            ),
            pre_tokenizers.Sequence([split(r"\p{L}+|\s"), whole]),
            pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), whole]),
        ][kind]
    names = draw_added(draw, core)
    draw_post_processor(draw, core)
    return HFTokenizer(core), [*names, *words[:10]]


def draw_llama(draw, folder):
    """Byte pairs over characters with byte fallback, as Llama 2's tokenizer.json."""
    vocab = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>"])}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    mark = "\u2581"
    words = draw_words(draw)
    rows = [f"{mark}{word}{mark * draw.randrange(4)}" for word in words]
    for letter in sorted(set("".join(rows))):
        vocab.setdefault(letter, len(vocab))
    merges = learn_merges(draw, vocab, rows, draw.randrange(150))
    options = {"unk_token": "<unk>", "fuse_unk": draw.random() < 0.7}
    options["byte_fallback"] = rarely(draw, True, False)
    options["ignore_merges"] = rarely(draw, False, True)
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
    replace = normalizers.Replace(" ", mark)
    core.normalizer, core.pre_tokenizer = rarely(
        draw,
        draw.choice(
            [
                (normalizers.Sequence([normalizers.Prepend(mark), replace]), None),
                (replace, None),
                (replace, pre_tokenizers.Split(" ", "merged_with_previous")),
                (None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
                (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
                (None, pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
            ]
        ),
        (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=True)),
        (normalizers.Sequence([normalizers.NFKC(), replace]), None),
        (replace, pre_tokenizers.Split(" ", "isolated")),
        (replace, pre_tokenizers.Digits(True)),
        (None, None),
    )
    if draw.random() < 0.7:
        core.add_special_tokens(["<unk>", "<s>", "</s>"])
    names = draw_added(draw, core)
    draw_post_processor(draw, core)
    return HFTokenizer(core), [*names, "<s>", "<0x41>", *words[:10]]


def draw_wordpiece(draw, folder):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *draw.sample(WORDS, 12)]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789,.-<>|'E\u4f60"
    prefix = rarely(draw, "##", "", "@@")
    for letter in draw.sample(letters, draw.randrange(20, len(letters))):
        pieces += [letter, prefix + letter]
    pieces += [prefix + word for word in ("ed", "s", "arth", "an", "ana", "iss")]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(pieces))}
    core = tokenizers.Tokenizer(
        models.WordPiece(
            vocab,
            unk_token="[UNK]",
            max_input_chars_per_word=draw.choice([5, 100]),
            continuing_subword_prefix=prefix,
        )
    )
    core.normalizer = rarely(
        draw,
        normalizers.BertNormalizer(
            clean_text=draw.random() < 0.7,
            handle_chinese_chars=draw.random() < 0.7,
            strip_accents=draw.choice([None, True, False]),
            lowercase=draw.random() < 0.5,
        ),
        None,
        normalizers.Lowercase(),
        normalizers.NFC(),
    )
    core.pre_tokenizer = rarely(
        draw,
        pre_tokenizers.BertPreTokenizer(),
        pre_tokenizers.Whitespace(),
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits()]),
    )
    core.add_special_tokens(["[CLS]", "[SEP]", "[MASK]"])
    names = draw_added(draw, core) if draw.random() < 0.5 else []
    if draw.random() < 0.4:
        core.add_tokens([AddedToken("[MASK]", lstrip=True, special=True)])
    draw_post_processor(draw, core)
    return HFTokenizer(core), [*names, "[MASK]", "[SEP]", "[mask]"]


def draw_ranks(draw, folder):
    tokens = [bytes([byte]) for byte in range(256)]
    draw.shuffle(tokens)
    for _ in range(draw.randrange(120)):
        word = (" " * draw.randrange(2) + draw.choice(WORDS)).encode()
        size = draw.randrange(2, 5)
        start = draw.randrange(len(word))
        if len(word[start : start + size]) > 1 and b"<" not in word:
            tokens.append(word[start : start + size])
    tokens = list(dict.fromkeys(tokens))
    path = folder / f"{draw.getrandbits(32)}.tiktoken"
    lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    path.write_text("".join(lines))
    count = draw.choice([0, 7, 40])
    special_tokens = draw.sample(["<|end|>", "<|end|>x", "<think>", "[X]"], draw.randrange(4))
    tokenizer = build_tiktoken(
        path,
        pattern=draw.choice(sorted(PATTERNS)),
        num_special_tokens=count,
        special_tokens=special_tokens,
    )
    return tokenizer, [*special_tokens, "<s>", "<SPECIAL_7>"]


def draw_other(draw, folder):
    """Models that no engine does."""
    if draw.random() < 0.5:
        core = tokenizers.Tokenizer(
            models.Unigram([(name, -1.0 - i) for i, name in enumerate(["<unk>", *WORDS])], 0)
        )
        core.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        vocab = {name: i for i, name in enumerate(["<unk>", *WORDS])}
        core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
    names = draw_added(draw, core)
    return HFTokenizer(core), names


def encodable(tokenizer, texts):
    """Texts and their ids; left out are those on which the tokenizers library panics.

    It does where white space lies between two tokens that both take it (lstrip, rstrip).
    """
    for text in texts:
        try:
            yield text, tokenizer.encode_batch([text])[0]
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise


def differences(seed, folder, num_texts):
    """Name of the engine, and texts of a drawn tokenizer that it encodes otherwise."""
    draw = random.Random(seed)
    tokenizer, names = draw_tokenizer(draw, folder)
    engine = build_engine(tokenizer)
    pairs = list(encodable(tokenizer, [draw_text(draw, names) for _ in range(num_texts)]))
    found = engine.encode([text for text, _ in pairs])
    return engine.name, [
        (text, ids.tolist(), right)
        for (text, right), ids in zip(pairs, found, strict=True)
        if ids.tolist() != right
    ]


def assert_no_differences(seeds, folder, num_texts):
    """Hold engines to drawn tokenizers; a good part of these must be ones that engines do."""
    engines = Counter()
    for seed in seeds:
        name, wrong = differences(seed, folder, num_texts)
        engines[name.partition(" ")[0]] += 1
        assert not wrong, f"seed {seed}, {name}: {wrong[0]}"
    assert engines["gigatoken"] > len(seeds) / 4, engines
    assert engines["words"] > len(seeds) / 40, engines
    assert engines["reference"] > len(seeds) / 10, engines


def test_engines_give_the_ids_of_drawn_tokenizers(tmp_path):
    pytest.importorskip("gigatoken")
    assert_no_differences(range(24), tmp_path, num_texts=30)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_engines_give_the_ids_of_200_drawn_tokenizers(tmp_path):
    pytest.importorskip("gigatoken")
    assert_no_differences(range(1000, 1200), tmp_path, num_texts=300)
