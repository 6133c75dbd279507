import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_data.preprocessing.sentences import build_splitter, split_sentences


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


@pytest.fixture
def punkt_data(tmp_path, monkeypatch):
    """NLTK that finds data of punkt with one abbreviation, and no other."""
    nltk = pytest.importorskip("nltk")
    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("abbr\n")
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])


def test_punkt_splits_where_its_data_is_there_and_its_name_says_so(punkt_data):
    splitter = build_splitter("auto")
    assert splitter.name.startswith("punkt english (nltk ")
    text = "We saw the Abbr. there.\n\nThen home. "
    assert splitter.split(text) == ["We saw the Abbr. there.", "Then home."]
    kept = build_splitter("punkt", keep_newlines=True)
    assert kept.split(text) == ["We saw the Abbr. there.\n\n", "Then home."]
    assert splitter.split("") == []
    assert pickle.loads(pickle.dumps(splitter)).split(text) == splitter.split(text)


def test_without_data_rules_split_and_punkt_by_name_is_refused(monkeypatch):
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [])
    assert build_splitter("auto").name == "rules"
    for kind in ("punkt", "auto"):  # the rules are of English
        with pytest.raises(FileNotFoundError, match=r"no punkt data for --lang german"):
            build_splitter(kind, lang="german")
    monkeypatch.setitem(sys.modules, "nltk", None)
    with pytest.raises(ImportError, match=r"mcore-data\[punkt\]"):
        build_splitter("punkt")
    assert build_splitter("auto").name == "rules"
