"""Cutting a text into sentences by rule, without data files, for sentence-pair training.

A sentence ends at ``.``, ``!`` or ``?`` (with closing quotes) before white space, unless the
next letter is small, or the word is a known abbreviation or a single initial. Rules err on
the side of long sentences; Japanese and Chinese full stops need no white space.
"""

import re

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


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """Sentences of a text, in order, without the white space around them.

    Args:
        text: any text.
        keep_newlines: leave the line ends that follow a sentence at its end.
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
