import json
import pickle
import random

import numpy as np
import pytest

from mcore_data.engines import spot_check
from mcore_data.engines.building import ReferenceEngine
from mcore_data.engines.spot_check import (
    FIRST_TEXTS,
    PER_NAME,
    AddedNames,
    EngineDifferenceError,
    SeenCharacters,
    Verifier,
)
from mcore_data.preprocessing.encoding import Encoder
from mcore_data.preprocessing.sources import find_inputs, read_blocks
from mcore_data.tokenizers.building import load_tokenizer

BYTES = load_tokenizer("ByteTokenizer")


class _WrongOnce(ReferenceEngine):
    """An engine that swaps the ids of one text."""

    def __init__(self, tokenizer, victim):
        super().__init__(tokenizer)
        self.name = "swapping"
        self._victim = victim

    def encode(self, texts):
        right = super().encode(texts)
        return [
            ids[::-1] if text == self._victim else ids
            for ids, text in zip(right, texts, strict=True)
        ]


def encode(path, mode, victim, json_keys=("text",)):
    engine = _WrongOnce(BYTES, victim)
    encoder = Encoder(
        engine, Verifier(engine, BYTES, mode), json_keys, np.dtype("<u2"), eod=256
    )
    source = find_inputs([str(path)])[0]
    return [encoder.encode_block(b) for b in read_blocks(source, json_keys, block_bytes=4000)]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "in.jsonl"
    texts = [f"text number {i}" for i in range(3000)]
    path.write_text("".join(json.dumps({"text": text, "n": [text]}) + "\n" for text in texts))
    return path


def test_full_encodes_every_text_again(lines):
    checked = [block.checked for block in encode(lines, "full", "nothing")]
    assert sum(one.texts for one in checked) == 3000
    assert sum(one.characters for one in checked) == sum(
        len(f"text number {i}") for i in range(3000)
    )


def test_a_difference_stops_and_names_line_text_and_ids(lines):
    for json_keys in (("text",), ("n",)):
        with pytest.raises(EngineDifferenceError) as error:
            encode(lines, "full", "text number 1234", json_keys)
        for part in ("in.jsonl", json_keys[0], "'text number 1234'", "swapping"):
            assert part in str(error.value)


def test_sample_takes_the_first_texts_its_share_and_the_same_ones_each_time(lines):
    first = [block.checked.texts for block in encode(lines, "sample", "nothing")]
    assert first == [block.checked.texts for block in encode(lines, "sample", "nothing")]
    assert FIRST_TEXTS < sum(first) < FIRST_TEXTS + 3000 / 1024 * 4
    with pytest.raises(EngineDifferenceError):
        encode(lines, "sample", f"text number {FIRST_TEXTS - 1}")


class _Nothing:
    """A tokenizer and an engine that give no ids, and note the texts."""

    name = "nothing"
    special_names = ()

    def __init__(self):
        self.texts = []

    def encode(self, texts):
        return [np.zeros(0, np.uint8) for _ in texts]

    def encode_batch(self, texts):
        self.texts = list(texts)
        return [[] for _ in texts]


def chosen(verifier, texts):
    """The texts that a verifier compares, or parts of them."""
    encoded = verifier._engine.encode(texts)
    verifier._reference.texts = []
    report = verifier.check(texts, encoded, seed=(0,), describe=str)
    compared = verifier._reference.texts
    assert (report.texts, report.characters) == (len(compared), sum(map(len, compared)))
    return compared


@pytest.fixture
def verifier(monkeypatch):
    monkeypatch.setattr(spot_check, "FIRST_TEXTS", 2)
    monkeypatch.setattr(spot_check, "SAMPLE_SHARE", 0.0)
    return Verifier(_Nothing(), _Nothing(), "sample")


def test_a_text_with_a_character_not_seen_before_is_checked(verifier):
    assert chosen(verifier, ["ab", "ba", "abba"]) == ["ab", "ba"]
    new = ["c", "\u4f60", "\U0001f469", "\x85", "\ud83d", "\x00"]
    for text in new:
        assert chosen(verifier, ["aba", f"a{text}", f"b{text}"]) == [f"a{text}"]
    assert chosen(verifier, [f"a{text}" for text in new]) == []
    assert chosen(verifier.begin(), ["ab", "ba"]) == ["ab", "ba"]
    assert chosen(pickle.loads(pickle.dumps(verifier)), ["ab"]) == []  # as a spawned worker


def test_seen_characters_are_those_of_all_texts():
    draw, known, seen = random.Random(3), set(), SeenCharacters()
    letters = ["a", "\n", "\uffff", "\U00010000", "\U0010ffff", *map(chr, range(256))]
    for _ in range(100):
        text = "".join(draw.choices(letters, k=draw.randrange(4)))
        new = [place for place, letter in enumerate(text) if letter not in known]
        assert seen.places([text]) == ({0: new[0]} if new else {})
        known |= {*text}


def test_the_first_texts_with_each_added_token_are_checked():
    names = AddedNames(["<x>", "<x>y", "foo", ""])
    for _ in range(PER_NAME - 1):
        assert names.places([" <x>y<x>y", "<x", "foo"]) == {0: 1, 2: 0}
    assert names.places(["fo foo", "foo"]) == {0: 3}  # it was in enough texts then
    assert names.places(["<x>y", " a<x>foo", "a<x>y"]) == {0: 0, 1: 2, 2: 1}
    assert set(names._remaining) == {"<x>"}


def test_a_long_text_is_compared_in_part_where_the_new_character_is(verifier, monkeypatch):
    monkeypatch.setattr(spot_check, "LONGEST_CHOSEN", 10)
    monkeypatch.setattr(spot_check._window, "__defaults__", (10,))
    long = "ab" * 50
    assert chosen(verifier, [long, "a"]) == ["ababababab", "a"]
    assert chosen(verifier, [f"{long}c", f"{long}\u4f60{long}"]) == [
        "babababab" + "c",
        "babab\u4f60abab"[:10],
    ]


def test_off_encodes_nothing_again_and_finds_nothing(lines):
    blocks = encode(lines, "off", "text number 5")
    assert sum(block.checked.texts for block in blocks) == 0
    assert sum(block.num_texts for block in blocks) == 3000
