import json

from hypothesis import given
from hypothesis import strategies as st

from mcore_data.preprocessing.tokenizer_training import train_tokenizer
from mcore_data.tokenizers.plain import ByteTokenizer, NullTokenizer
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


def test_byte_pairs_that_cut_characters_stream_as_their_text(tmp_path):
    text = "Grüße aus Köln — und 你好, 世界! In the beginning."
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text * 3}) + "\n")
    tokenizer = train_tokenizer([tmp_path / "text.jsonl"], tmp_path / "out", vocab_size=280)
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert "" in pieces  # some tokens end inside a character
    assert "".join(pieces) + stream.rest() == text
