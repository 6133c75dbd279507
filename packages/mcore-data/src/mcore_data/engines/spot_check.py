"""Holding an engine to its tokenizer on the texts of the corpus itself.

``full`` encodes every text a second time by the tokenizer; ``sample`` one in
``1 / SAMPLE_SHARE``, drawn by where its block lies, so that a run and its repetition check
the same ones. A difference is an error that names the text; nothing of its block is written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_data.tokenizers.protocol import Tokenizer

SAMPLE_SHARE = 1 / 1024
LONGEST_SAMPLED = 1 << 20
_SHOWN = 160


class EngineDifferenceError(RuntimeError):
    """An engine gave other ids than its tokenizer."""


@dataclass(slots=True)
class CheckReport:
    """What was encoded twice.

    Attributes:
        texts: how many.
        characters: how long they are together.
    """

    texts: int = 0
    characters: int = 0


@dataclass(frozen=True, slots=True)
class Verifier:
    """Encodes texts by the reference and compares.

    Attributes:
        reference: the tokenizer.
        mode: ``full``, ``sample`` or ``off``.
        engine: name of what is checked, for the message.
    """

    reference: Tokenizer
    mode: Literal["full", "sample", "off"]
    engine: str

    def check(
        self,
        texts: Sequence[str],
        encoded: Sequence[NDArray[Any]],
        *,
        seed: Sequence[int],
        describe: Callable[[int], str],
    ) -> CheckReport:
        """Compare the ids of some texts with the reference's.

        Args:
            texts: all texts of a block.
            encoded: what the engine made of them.
            seed: numbers that say which block it is; with them the sample is drawn.
            describe: says where text ``i`` comes from.
        """
        chosen = self._choose(texts, seed)
        again = self.reference.encode_batch([texts[i] for i in chosen]) if chosen else []
        for i, expected in zip(chosen, again, strict=True):
            if len(expected) != len(encoded[i]) or encoded[i].tolist() != expected:
                raise EngineDifferenceError(
                    _difference(self.engine, describe(i), texts[i], encoded[i], expected)
                )
        return CheckReport(len(chosen), sum(len(texts[i]) for i in chosen))

    def _choose(self, texts: Sequence[str], seed: Sequence[int]) -> list[int]:
        if self.mode == "off":
            return []
        if self.mode == "full":
            return list(range(len(texts)))
        drawn = np.random.default_rng(list(seed)).random(len(texts)) < SAMPLE_SHARE
        return [i for i in np.flatnonzero(drawn).tolist() if len(texts[i]) <= LONGEST_SAMPLED]


def _difference(
    engine: str, where: str, text: str, found: NDArray[Any], expected: Sequence[int]
) -> str:
    """One message with the place, the text, and the ids around the first difference."""
    pairs = zip(found.tolist(), expected, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
    around = slice(max(same - 2, 0), same + 6)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return (
        f"--engine {engine} and the tokenizer differ on {where}, from id {same} on: "
        f"{found[around].tolist()} instead of {list(expected[around])}. The text is {shown!r}. "
        "Its block was not written; give the same command with --engine reference to go on "
        "from there, or begin anew if earlier blocks are in doubt."
    )
