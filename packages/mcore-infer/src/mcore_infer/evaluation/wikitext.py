"""Perplexity of WikiText-103, as defined by Megatron's zero-shot task.

The file is one text. The model reads the detokenised text, and the adjusted perplexity is per
word of the original text, so that tokenizers can be compared. A window begins every ``overlap``
tokens, and each window but the first counts only its last ``overlap`` targets.

Reference:
    Shoeybi et al. 2019, Megatron-LM, section 5.3 and its task WIKITEXT103. arXiv:1909.08053.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.evaluation.scoring import Window, score_windows
from mcore_models.protocol import LanguageModel
from mcore_parallel.mesh import SINGLE, Axis

_WIKI = (
    *(("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
_INSIDE = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
_AFTER_INSIDE = (
    *(
        ("= = = =", "===="),
        ("= = =", "==="),
        ("= =", "=="),
        (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    ),
    *((" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
)
_PTB = (
    *((" '", "'"), (" \n", "\n"), ("\n ", "\n"), (" n't", "n't")),
    *((" N ", "1 "), ("$ 1", "$1"), ("# 1", "#1")),
)


@dataclass(frozen=True, slots=True)
class WikitextScore:
    """Loss of one text, and measures derived from it."""

    loss_sum: float
    """Nats."""
    num_tokenized: int
    """Tokens of the detokenised text."""
    num_original: int
    """Words of the original text, separated by single spaces."""

    @property
    def loss(self) -> float:
        """Nats per target; the first token is not a target."""
        return self.loss_sum / (self.num_tokenized - 1)

    @property
    def token_ratio(self) -> float:
        """Targets per word."""
        return (self.num_tokenized - 1) / (self.num_original - 1)

    @property
    def perplexity(self) -> float:
        """Perplexity per token; the loss is capped at 20."""
        return math.exp(min(20.0, self.loss))

    @property
    def adjusted_perplexity(self) -> float:
        """Perplexity per word, comparable between tokenizers; the loss is capped at 20."""
        return math.exp(min(20.0, self.loss * self.token_ratio))


def detokenizer_name(path: str) -> str:
    """Return the detokenizer that a file's path contains: ``ptb``, ``wiki`` or empty."""
    return next((name for name in ("ptb", "wiki") if name in path.lower()), "")


def detokenize(text: str, name: str) -> str:
    """Undo the word tokenization of a benchmark's text; ``name``: ptb, wiki or none."""
    if name == "ptb":
        return _replaced(text, _PTB)
    if name != "wiki":
        return text
    text = _replaced(text, _WIKI)
    for left, right in _INSIDE:
        # Remove blanks after an opening and before a closing bracket or quote.
        begin, end = re.escape(left), re.escape(right)
        text = re.sub(rf"{begin}\s*([^{end}]*?)\s*{end}", rf"{left}\1{right}", text)
    return _replaced(text, _AFTER_INSIDE)


def _replaced(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def plan_overlapping(num_targets: int, context_tokens: int, overlap: int) -> list[Window]:
    """Cut a text into windows that begin every ``overlap`` targets; each target counts once.

    Args:
        num_targets: targets of the text.
        context_tokens: longest window.
        overlap: targets that each window but the first adds; ``context_tokens``: no overlap.

    Raises:
        ValueError: if ``overlap`` is not from 1 to ``context_tokens``.
    """
    if not 1 <= overlap <= context_tokens:
        raise ValueError(
            f"--overlapping-eval {overlap} must be from 1 to the context of {context_tokens} "
            "tokens."
        )
    num_windows = max(-(-max(num_targets - overlap, 0) // overlap) + 1, 1)
    windows = []
    for begin in range(0, num_windows * overlap, overlap):
        # The first window counts all its targets, later windows the last ``overlap``.
        first = begin + context_tokens - overlap if begin else 0
        end = min(num_targets, begin + context_tokens)
        if first < end:  # the last windows may have no target that counts
            windows.append(Window(0, begin, end, first))
    return windows


def score_wikitext(
    model: LanguageModel,
    tokenizer: Tokenizer,
    text: str,
    *,
    detokenizer: str = "wiki",
    context_tokens: int,
    overlap: int = 32,
    batch: int = 8,
    axis: Axis = SINGLE,
) -> WikitextScore:
    """Score a text as one sequence of tokens; the first token is context.

    Communicates over the model's ``tp``, and sums over ``axis`` at the end.

    Args:
        model: in eval mode.
        tokenizer: tokenizer of the model.
        text: the content of the file.
        detokenizer: see ``detokenize``.
        context_tokens: longest window.
        overlap: see ``plan_overlapping``; 0: the context length.
        batch: windows in one forward pass.
        axis: data ranks that share the work.

    Raises:
        ValueError: if the text has fewer than two words or tokens, or as ``plan_overlapping``.
    """
    num_original = len(text.strip().split(" "))
    ids = tokenizer.encode(detokenize(text, detokenizer))
    if num_original < 2 or len(ids) < 2:
        raise ValueError(
            f"a text of {num_original} words and {len(ids)} tokens has no score: use "
            "a text of two or more of each."
        )
    windows = plan_overlapping(len(ids) - 1, context_tokens, overlap or context_tokens)
    loss_sum = score_windows(
        model, [ids[1:]], windows, begin_token=ids[0], batch=batch, axis=axis
    )
    return WikitextScore(loss_sum, len(ids), num_original)
