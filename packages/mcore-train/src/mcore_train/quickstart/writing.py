"""Text that a model writes, and how much of it is the book's."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.config import SamplingConfig
from mcore_infer.generation import generate
from mcore_models.protocol import LanguageModel

_WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?")
COPY_WORDS = 20
"""Length of a run of words that counts as copied."""


@dataclass(frozen=True, slots=True)
class Originality:
    """How a text stands to the book that the model was trained on."""

    num_words: int
    known_share: float
    """Share of words that stand anywhere in the book, 0 to 1."""
    has_copied_run: bool
    """Whether some 20 words in a row stand so in the training chapters."""


def write(
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    num_words: int,
    context_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Sample a text of ``num_words`` words, longer than the model's context if need be.

    Written in stretches of half a context, each after the half before it. Ends of documents
    become line breaks.

    Args:
        model: whole, in eval mode.
        tokenizer: has an end-of-document token, which begins the text.
        num_words: length of the text, after which it is cut.
        context_tokens: tokens that the model was trained to see.
        temperature: scores are divided by it; below 1 the likely becomes likelier.
        seed: of the draws.
    """
    eod, half = tokenizer.eod, context_tokens // 2
    assert eod is not None
    sampling = SamplingConfig(num_tokens=half, temperature=temperature, ignore_eod=True)
    tokens, text = [eod], ""
    while len(text.split()) <= num_words:
        (more,) = generate(model, [tokens[-half:]], sampling, seed=seed + len(tokens))
        tokens += more.ids
        text = _decode(tokens, tokenizer)
    return " ".join(text.split()[:num_words])


def originality(text: str, book: Iterable[str], train: Iterable[str]) -> Originality:
    """Compare a text with the words of a book and with the runs of words trained on."""
    known = {word for chapter in book for word in split_words(chapter)}
    runs = {
        tuple(words[i : i + COPY_WORDS])
        for words in map(split_words, train)
        for i in range(len(words) - COPY_WORDS + 1)
    }
    words = split_words(text)
    copied = any(
        tuple(words[i : i + COPY_WORDS]) in runs for i in range(len(words) - COPY_WORDS + 1)
    )
    return Originality(
        len(words), sum(word in known for word in words) / max(1, len(words)), copied
    )


def _decode(tokens: list[int], tokenizer: Tokenizer) -> str:
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == tokenizer.eod:
            parts.append([])
        else:
            parts[-1].append(token)
    return "\n".join(tokenizer.decode(part) for part in parts if part)


def split_words(text: str) -> list[str]:
    """Split a text into words in small letters, without punctuation."""
    return [word.lower() for word in _WORD.findall(text)]
