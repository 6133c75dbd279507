import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_data.sentences import split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("In the beginning. And the earth!", ["In the beginning.", "And the earth!"]),
        ('He said "Go." Then he went.', ['He said "Go."', "Then he went."]),
        ("Mr. Smith met J. R. Doe. They spoke.", ["Mr. Smith met J. R. Doe.", "They spoke."]),
        ("It costs 3.5 dollars... or so. Fine", ["It costs 3.5 dollars... or so.", "Fine"]),
        ("Some, e.g. Smith et al. No more.", ["Some, e.g. Smith et al. No more."]),
        ("So am I. You too?", ["So am I.", "You too?"]),
        ("\u795e\u306f\u5149\u3002\u591c\u3002", ["\u795e\u306f\u5149\u3002", "\u591c\u3002"]),
        ("", []),
        (" \n ", []),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text, sentences):
    assert split_sentences(text) == sentences


def test_line_ends_after_a_sentence_are_kept_when_asked():
    text = "One.\n\nTwo. Three.\n"
    assert split_sentences(text) == ["One.", "Two.", "Three."]
    assert split_sentences(text, keep_newlines=True) == ["One.\n\n", "Two.", "Three.\n"]


@given(st.text(alphabet="aB.!? \n\"'\u3002\u00e4"), st.booleans())
def test_no_character_is_lost_or_moved(text, keep_newlines):
    sentences = split_sentences(text, keep_newlines=keep_newlines)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence.strip() for sentence in sentences)
