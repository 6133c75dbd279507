"""LAMBADA accuracy: the share of passages whose last word the model predicts greedily.

The target is the last token of the passage, or with ``strict`` all tokens of its last word.
Each target must be the likeliest token at its position.

Reference:
    Paperno et al. 2016, The LAMBADA dataset. arXiv:1606.06031.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.evaluation.continuations import Continuation, score_continuations
from mcore_models.protocol import LanguageModel
from mcore_parallel.mesh import SINGLE, Axis


@dataclass(frozen=True, slots=True)
class LambadaScore:
    """Number of predicted last words among the passages."""

    num_correct: int
    num_examples: int

    @property
    def accuracy(self) -> float:
        """Share of predicted last words, from 0 to 1."""
        return self.num_correct / self.num_examples


def read_texts(lines: Iterable[str]) -> list[str]:
    """Read passages from JSON lines with the field ``text``; empty lines are left out."""
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str) or not text.split():
            raise ValueError(
                f"line {number} is not a JSON object with words in its field 'text'."
            )
        texts.append(text)
    if not texts:
        raise ValueError(
            'the file has no passage: write one object a line, like {"text": "..."}.'
        )
    return texts


def continuation(
    tokenizer: Tokenizer, text: str, *, strict: bool, context_tokens: int
) -> Continuation:
    """Split a passage into context and continuation; long contexts lose their first tokens."""
    if strict:
        text = text.rstrip()
        last_word = text.rsplit(maxsplit=1)[-1]
        context = text[: text.rfind(last_word)].strip()
        # Context and word are tokenized separately, so that no token spans both.
        target = tokenizer.encode(f" {last_word}", add_special_tokens=False)
        ids, num_targets = [*tokenizer.encode(context), *target], len(target)
    else:
        ids, num_targets = tokenizer.encode(text), 1
    ids = ids[-(context_tokens + 1) :]
    if not 1 <= num_targets < len(ids):
        raise ValueError(f"the passage {text[:40]!r} has no context before its last word.")
    return Continuation(ids, num_targets)


def score_lambada(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    strict: bool = False,
    context_tokens: int,
    batch: int = 8,
    axis: Axis = SINGLE,
) -> LambadaScore:
    """Count the passages whose last word the model predicts.

    Communicates over the model's ``tp``, and sums over ``axis`` at the end.

    Args:
        model: in eval mode.
        tokenizer: tokenizer of the model.
        texts: passages.
        strict: the target is the last word instead of the last token.
        context_tokens: largest number of tokens before the last target.
        batch: passages in one forward pass.
        axis: data ranks that share the work.

    Raises:
        ValueError: as ``continuation``.
    """
    rows = [
        continuation(tokenizer, text, strict=strict, context_tokens=context_tokens)
        for text in texts
    ]
    scores = score_continuations(model, rows, batch=batch, axis=axis)
    return LambadaScore(sum(score.is_greedy for score in scores), len(scores))
