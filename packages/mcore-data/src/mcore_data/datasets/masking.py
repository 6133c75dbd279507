"""Chooses the tokens of a text that are masked: spans of one or more words.

Words are visited in random order. At each word a random span length n is drawn, and the span of
n words is masked if it fits the remaining budget and overlaps no masked span.

Reference:
    Devlin et al. 2018, BERT. arXiv:1810.04805. Spans: Joshi et al. 2019, SpanBERT.
    arXiv:1907.10529.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_data.tokenizers.protocol import Tokenizer

_GEOMETRIC_PROB = 0.2  # SpanBERT's


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceOptions:
    """How samples are made of sentences: share of short ones, masked tokens.

    Attributes:
        mask_prob: share of the tokens.
        max_ngram: words of the longest span.
        geometric: draw the number of a span's words geometrically with p = 0.2, limited to
            ``max_ngram``, instead of with a probability proportional to 1/n.
        whole_words: mask complete words, together with their continuation pieces.
        short_seq_prob: share of the samples that are shorter than a row.
    """

    mask_prob: float = 0.15
    max_ngram: int = 3
    geometric: bool = False
    whole_words: bool = True
    short_seq_prob: float = 0.1


def word_continuations(tokenizer: Tokenizer) -> NDArray[np.bool_] | None:
    """Return for each id of a WordPiece tokenizer whether it continues a word; else None."""
    core = getattr(tokenizer, "core", None)
    names = {} if core is None else core.get_vocab()
    continuations = [number for name, number in names.items() if name.startswith("##")]
    if not continuations:
        return None
    table = np.zeros(tokenizer.vocab_size, bool)
    table[continuations] = True
    return table


def choose_spans(
    tokens: NDArray[np.int64],
    maskable: NDArray[np.bool_],
    continues: NDArray[np.bool_] | None,
    options: SentenceOptions,
    budget: int,
    random: np.random.Generator,
    *,
    max_spans: int = 0,
) -> list[tuple[int, int]]:
    """Return the (start, stop) of the spans to mask, in text order, without overlap.

    Args:
        tokens: the text.
        maskable: False at positions that must not be masked, such as [CLS].
        continues: for each id of the vocabulary whether it continues a word; None: no id does.
        options: units and spans.
        budget: largest number of masked tokens.
        random: random generator.
        max_spans: largest number of spans; 0 means any number.
    """
    words = _words(tokens, maskable, continues if options.whole_words else None)
    sizes = 1 + np.arange(options.max_ngram)
    chances = (1 / sizes) / (1 / sizes).sum()
    hidden = np.zeros(len(words), bool)
    spans: list[tuple[int, int]] = []
    remaining = budget
    for first in random.permutation(len(words)).tolist():
        if remaining <= 0 or len(spans) == max_spans > 0:
            break
        if options.geometric:
            n = min(int(random.geometric(_GEOMETRIC_PROB)), options.max_ngram)
        else:
            n = int(random.choice(sizes, p=chances))
        n = min(n, _unbroken(words, first, n))
        while n and words[first + n - 1][1] - words[first][0] > remaining:
            n -= 1
        if n == 0 or hidden[first : first + n].any():
            continue
        hidden[first : first + n] = True
        spans.append((words[first][0], words[first + n - 1][1]))
        remaining -= spans[-1][1] - spans[-1][0]
    return sorted(spans)


def _words(
    tokens: NDArray[np.int64], maskable: NDArray[np.bool_], continues: NDArray[np.bool_] | None
) -> Sequence[tuple[int, int]]:
    """Return the ranges of positions that are masked together."""
    begins = maskable.copy()
    if continues is not None:
        is_continuation = continues[tokens] & maskable
        is_continuation[1:] &= maskable[:-1]
        is_continuation[:1] = False
        begins &= ~is_continuation
    starts = np.flatnonzero(begins)
    limits = np.append(starts[1:], len(tokens))
    stops = []
    for start, limit in zip(starts.tolist(), limits.tolist(), strict=True):
        broken = np.flatnonzero(~maskable[start:limit])
        stops.append(start + int(broken[0]) if len(broken) else limit)
    return list(zip(starts.tolist(), stops, strict=True))


def _unbroken(words: Sequence[tuple[int, int]], first: int, n: int) -> int:
    """Return the number of adjacent words from ``first`` on, at most ``n``."""
    count = 1
    while (
        count < n
        and first + count < len(words)
        and words[first + count][0] == words[first + count - 1][1]
    ):
        count += 1
    return count
