"""Splits a text into sentences by rules or by NLTK's punkt, for BERT and T5.

The rules need no data. A sentence ends at ``.``, ``!`` or ``?`` (with closing quotes) before
white space, unless the next letter is lower case, or the word is a known abbreviation or a
single initial. In doubtful cases the rules do not split; Japanese and Chinese full stops need
no white space after them.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

log = logging.getLogger(__name__)

_END = re.compile(
    r"(?P<word>\w*)(?:[.!?\u2026]+[\"'\u201d\u2019)\]]*(?P<space>\s+)|[\u3002\uff01\uff1f]\s*)"
)
_OPENING = "\"'\u201c\u2018([-"
_TITLES = frozenset(
    ("mr", "mrs", "ms", "dr", "prof", "rev", "hon", "st", "sr", "jr", "gen", "col")
)
_SHORT = frozenset(
    ("vs", "etc", "cf", "fig", "figs", "no", "nos", "vol", "pp", "ed", "eds", "al")
)


@dataclass(frozen=True, slots=True)
class Splitter:
    """A function that splits texts into sentences, and its name for the manifest."""

    name: str
    split: Callable[[str], list[str]]


def build_splitter(
    kind: Literal["auto", "rules", "punkt"] = "auto",
    *,
    lang: str = "english",
    keep_newlines: bool = False,
) -> Splitter:
    """Build a splitter; ``auto`` uses punkt if NLTK and its data are installed, else rules.

    For a language other than English ``auto`` requires punkt: the rules are for English.

    Args:
        kind: method of splitting.
        lang: language of punkt's data, as NLTK names it.
        keep_newlines: keep the line ends that follow a sentence as its last characters.

    Raises:
        ImportError: if punkt is chosen and NLTK is not installed.
        FileNotFoundError: if NLTK finds no punkt data for the language.
    """
    if kind != "rules":
        try:
            punkt, version = _load_punkt(lang)
        except (ImportError, FileNotFoundError):
            if kind == "punkt" or lang != "english":
                raise
            log.info("sentences are split by rules: NLTK or its punkt data are not installed")
        else:
            split = partial(_split_by_punkt, punkt=punkt, keep_newlines=keep_newlines)
            return Splitter(f"punkt {lang} (nltk {version})", split)
    return Splitter("rules", partial(split_sentences, keep_newlines=keep_newlines))


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """Split a text into sentences by rules, without the white space around them.

    Args:
        text: any text.
        keep_newlines: keep the line ends that follow a sentence as its last characters.
    """
    sentences = []
    start = 0
    for end in _END.finditer(text):
        if _is_border(text, end):
            sentences.append(text[start : end.end()])
            start = end.end()
    sentences.append(text[start:])
    stripped = [_strip(sentence, keep_newlines) for sentence in sentences]
    return [sentence for sentence in stripped if sentence.strip()]


def _load_punkt(lang: str) -> tuple[Any, str]:
    try:
        import nltk
    except ImportError:
        raise ImportError(
            "--sentence-splitter punkt needs the extra: pip install 'mcore-data[punkt]'."
        ) from None
    try:
        return nltk.tokenize.PunktTokenizer(lang), nltk.__version__
    except LookupError:
        raise FileNotFoundError(
            f"NLTK has no punkt data for --lang {lang}. Put the package punkt_tab into a "
            "folder that NLTK_DATA names, or use --sentence-splitter rules."
        ) from None


def _split_by_punkt(text: str, *, punkt: Any, keep_newlines: bool) -> list[str]:
    """Split by punkt; white space between sentences is treated as by ``split_sentences``."""
    spans = list(punkt.span_tokenize(text))
    ends = [*(start for start, _ in spans[1:]), len(text)][: len(spans)]
    pieces = [text[start:end] for (start, _), end in zip(spans, ends, strict=True)]
    stripped = [_strip(piece, keep_newlines) for piece in pieces]
    return [sentence for sentence in stripped if sentence.strip()]


def _is_border(text: str, end: re.Match[str]) -> bool:
    if end["space"] is None:  # a full stop that needs no white space
        return True
    following = text[end.end() :][:3].lstrip(_OPENING)[:1]
    if following.islower():
        return False
    word = end["word"]
    is_period = text[end.end("word")] == "."
    return not (is_period and _is_short_form(word))


def _is_short_form(word: str) -> bool:
    """Whether a period after this word belongs to it, as in Dr., e.g. or J. Smith."""
    is_letter = len(word) == 1 and word.isalpha() and word != "I"
    return is_letter or word.lower() in _TITLES or word.lower() in _SHORT


def _strip(sentence: str, keep_newlines: bool) -> str:
    bare = sentence.strip()
    if not keep_newlines:
        return bare
    tail = sentence[len(sentence.rstrip()) :]
    return bare + "\n" * tail.count("\n")
