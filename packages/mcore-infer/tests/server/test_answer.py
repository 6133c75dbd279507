"""Text from tokens: whole characters, stop strings, offsets."""

import json
import math
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer import Generation, NewToken
from mcore_infer.server.responses import as_json, long_json
from mcore_infer.writing.token_text import Answer, TokenTexts

TEXTS = TokenTexts(ByteTokenizer())


def collect(text, stop=(), **options):
    """What an answer makes of a text that comes byte by byte."""
    answer = Answer(TEXTS, stop=stop, is_scored=True, **options)
    ids = tuple(text.encode())
    pieces = []
    for token in ids:
        pieces.append(answer.add(NewToken(0, token, -1.0)))
        if answer.finish_reason:
            break
    else:
        pieces.append(answer.finish(Generation(ids, (), "length")))
    return answer, pieces


def first_stop(text, stop):
    found = [(text.find(s), s) for s in stop if s in text]
    return min(found, key=lambda pair: pair[0], default=None)


@example("ab", ["b", "ab"])
@given(
    st.text("ab\n\u00e9\u4e16", max_size=24), st.lists(st.text("ab\n", min_size=1, max_size=4))
)
def test_text_ends_before_the_first_stop_string_and_nothing_of_it_leaks(text, stop):
    """Bytes part characters and stop strings at every place."""
    # A stop string that ends first wins where two overlap.
    ends = [text.find(s) + len(s) for s in stop if s in text]
    shortest = text[: min(ends)] if ends else text
    found = first_stop(shortest, stop)
    answer, pieces = collect(text, stop)
    whole = "".join(piece.text for piece in pieces)
    assert whole == (shortest[: found[0]] if found else text)
    assert answer.finish_reason == ("stop" if found else "length")
    tokens = [token for piece in pieces for token in piece.tokens]
    assert [t.id for t in tokens] == list(whole.encode())
    for token in tokens:
        assert whole[token.offset : token.offset + 1].encode().find(bytes([token.id])) >= 0


def test_a_stop_string_may_be_kept_and_what_only_looked_like_one_is_released_at_the_end():
    answer, pieces = collect("ab\n\ncd", ["\n\n"], keeps_stop=True)
    assert "".join(piece.text for piece in pieces) == "ab\n\n"
    assert [token.id for token in answer.written] == list(b"ab\n\n")
    _, pieces = collect("ab\n", ["\n\n"])
    assert [piece.text for piece in pieces] == ["a", "b", "", "\n"]


def test_an_end_of_document_is_written_and_no_text_and_offsets_count_from_a_prompt():
    answer = Answer(TEXTS, eod=256, is_scored=True, offset=10)
    (token,) = answer.add(NewToken(0, 97, -1.0)).tokens
    assert (token.id, token.offset) == (97, 10)
    piece = answer.add(NewToken(0, 256, -2.0))
    assert (piece.text, piece.tokens, answer.ids) == ("", (), [97, 256])


VALUES = st.recursive(
    st.none()
    | st.integers(-9, 9)
    | st.sampled_from([0.5, math.inf, math.nan])
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
)


@given(VALUES)
def test_a_long_answer_in_parts_is_the_same_json(value):
    assert b"".join(long_json(value)) == as_json(value)


def test_no_part_of_a_long_answer_is_long():
    """Serializing holds Python's interpreter, and with it the engine, until a part is done."""
    top = [{f"token {i}": -1.5 for i in range(20)}] * 1500
    scores = {"tokens": ["token"] * 1500, "top_logprobs": top}
    answer = {"id": "x", "choices": [{"index": i, "logprobs": scores} for i in range(3)]}
    parts = list(long_json(answer))
    assert b"".join(parts) == as_json(answer)
    assert max(map(len, parts)) < 64 * len(as_json(top[0])) + 64
    taken = []
    items = (taken.append(i) or [i] for i in range(1000))  # made when they are serialized
    lazy = long_json({"choices": iter([{"logprobs": {"content": items}}]), "none": iter(())})
    texts = [(part, len(taken)) for part in lazy]
    assert json.loads(b"".join(part for part, _ in texts)) == {
        "choices": [{"logprobs": {"content": [[i] for i in range(1000)]}}],
        "none": [],
    }
    counts = [count for _, count in texts]
    assert max(b - a for a, b in pairwise(counts)) <= 64
