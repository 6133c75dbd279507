"""Text that a model writes, and how much of it is the book's.

Works with any function from tokens to the scores of the next one. Numbers are drawn on the
CPU from an own seed, so that a text does not depend on the device's generator.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_data.tokenizer import Tokenizer

_WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?")
COPY_WORDS = 20
"""Length of a run of words that counts as copied."""

NextScores = Callable[[Int[Tensor, "1 S"]], Float[Tensor, " V"]]
"""Scores of the token after a sequence, without padding."""


@dataclass(frozen=True, slots=True)
class Originality:
    """How a text stands to the book that the model was trained on."""

    num_words: int
    known_share: float
    """Share of words that stand anywhere in the book, 0 to 1."""
    has_copied_run: bool
    """Whether some 20 words in a row stand so in the training chapters."""


def write(
    next_scores: NextScores,
    tokenizer: Tokenizer,
    *,
    num_words: int,
    context_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Sample a text of at least ``num_words`` words, then cut it to that many.

    Args:
        next_scores: the model.
        tokenizer: has an end-of-document token, which begins the text and is not drawn.
        num_words: length of the text.
        context_tokens: latest tokens that the model is shown.
        temperature: scores are divided by it; below 1 the likely becomes likelier.
        seed: of the draws.
    """
    eod = tokenizer.eod
    assert eod is not None
    generator = torch.Generator().manual_seed(seed)
    tokens = [eod]
    text = ""
    while len(text.split()) <= num_words:
        scores = next_scores(torch.tensor([tokens[-context_tokens:]]))
        scores = scores.double().cpu() / temperature
        scores[eod] = -torch.inf
        prob = torch.softmax(scores, 0)
        tokens.append(int(torch.multinomial(prob, 1, generator=generator).item()))
        text = tokenizer.decode(tokens[1:])
    return " ".join(text.split()[:num_words])


def originality(text: str, book: Iterable[str], train: Iterable[str]) -> Originality:
    """Compare a text with the words of a book and with the runs of words trained on."""
    known = {word for chapter in book for word in words_of(chapter)}
    runs = {
        tuple(words[i : i + COPY_WORDS])
        for words in map(words_of, train)
        for i in range(len(words) - COPY_WORDS + 1)
    }
    words = words_of(text)
    copied = any(
        tuple(words[i : i + COPY_WORDS]) in runs for i in range(len(words) - COPY_WORDS + 1)
    )
    return Originality(
        len(words), sum(word in known for word in words) / max(1, len(words)), copied
    )


def words_of(text: str) -> list[str]:
    """Split a text into words in small letters, without punctuation."""
    return [word.lower() for word in _WORD.findall(text)]
