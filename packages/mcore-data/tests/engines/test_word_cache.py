import random
import re
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data.engines import word_cache
from mcore_data.engines.word_cache import WordTable, encode_in_batches, padded

FIRST_BLANK = re.compile(rb"[^ ] ")


def spell(words):
    """Ids that tell a word: its length, then its bytes."""
    return [[len(word), *word] for word in words]


def encode(table, words):
    """Words side by side, with bytes between that are none."""
    data = b"".join(b"?" * (i % 3) + word for i, word in enumerate(words))
    sizes = np.array([len(word) for word in words], np.int64)
    ends = np.cumsum(sizes + np.arange(len(words)) % 3)
    ids, before = table.encode(padded(data), ends - sizes, ends)
    return [ids[low:high].tolist() for low, high in pairwise(before)]


# Bytes that are easily taken for none or for a length, at all lengths around the borders.
WORDS = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=20),
        st.text("\x00\x01\x08a", min_size=1, max_size=18).map(str.encode),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(batches=st.lists(WORDS, min_size=1, max_size=4))
def test_words_get_their_own_ids_whether_new_known_or_forgotten(batches):
    remembers, forgets = WordTable(spell), WordTable(spell, max_words=4)
    bounded = WordTable(spell, max_bytes=30)
    for words in batches:
        for table in (remembers, forgets, bounded):
            assert encode(table, words) == spell(words)


def test_words_of_one_slot_are_told_apart(monkeypatch):
    """With all of them in a row of slots, only the bytes tell which is which."""
    monkeypatch.setattr(
        word_cache, "_slots", lambda low, high, num_slots: np.full(len(low), num_slots - 2)
    )
    table = WordTable(spell)
    words = [b"%d" % i for i in range(10, 60)]
    for _ in range(2):
        assert encode(table, words) == spell(words)
    assert encode(table, [b"xy", *words, b"z" * 15]) == spell([b"xy", *words, b"z" * 15])


def test_each_word_is_encoded_once_until_there_are_too_many(monkeypatch):
    monkeypatch.setattr(word_cache, "_FIRST_SLOTS", 16)
    asked = []

    def ask(words):
        asked.extend(words)
        return spell(words)

    table = WordTable(ask, max_words=2000)
    draw = random.Random(5)
    words = [b"w%d" % draw.randrange(1500) + b"x" * draw.randrange(25) for _ in range(900)]
    for at in range(0, 900, 60):
        assert encode(table, words[at : at + 60]) == spell(words[at : at + 60])
    assert len(asked) == len(set(asked)) == len(set(words))


def test_texts_come_back_whole_and_in_order_from_batches(monkeypatch):
    monkeypatch.setattr(word_cache, "_BATCH_BYTES", 20)
    asked = []

    def bytes_of(texts):
        asked.append(sum(map(len, texts)))
        assert all(text[:1] in (b" ", b"a", b"") for text in texts)
        return [np.frombuffer(text, np.uint8) for text in texts]

    texts = [b"a b c d" * 30, b"", b"a", b"a" * 500, b"a  " * 99, b"a bc" * 4] * 2
    assert [ids.tobytes() for ids in encode_in_batches(texts, bytes_of, FIRST_BLANK)] == texts
    assert sorted(asked)[-3] < 3 * 20
    assert encode_in_batches([], bytes_of, FIRST_BLANK) == []
