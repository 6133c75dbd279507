from hypothesis import given
from hypothesis import strategies as st

from mcore_data.plain_tokenizers import ByteTokenizer, NullTokenizer
from mcore_infer import TextStream


@given(st.text(max_size=30))
def test_pieces_join_to_the_text_and_hold_whole_characters(text):
    stream = TextStream(ByteTokenizer())
    pieces = [stream.add(token) for token in text.encode()]
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + stream.rest() == text


def test_a_tokenizer_that_joins_tokens_by_blanks_keeps_them():
    stream = TextStream(NullTokenizer(100))
    assert "".join(stream.add(token) for token in (12, 7, 99)) == "12 7 99"


def test_a_character_that_never_ends_comes_out_at_the_end():
    stream = TextStream(ByteTokenizer())
    assert stream.add(0xC3) == ""
    assert stream.rest() == "\ufffd"
    assert stream.rest() == ""
