"""Compares an engine's ids with the tokenizer's on some texts of a corpus.

``full`` encodes every text a second time. ``sample`` encodes the first ``FIRST_TEXTS`` texts,
each text with a new character, the first ``PER_NAME`` texts with each added token, and a share
``SAMPLE_SHARE`` of the others, drawn with a seed from the position of their block. A difference
is an error that names the text; nothing of the text's block is written.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcore_data.engines.protocol import Engine
from mcore_data.tokenizers.protocol import Tokenizer

SAMPLE_SHARE = 1 / 1024
FIRST_TEXTS = 256
PER_NAME = 16
LONGEST_DRAWN = 1 << 20
LONGEST_CHOSEN = 1 << 13
"""Largest number of compared characters of a drawn text and of any other text. Of a longer text
engine and tokenizer encode a part."""
_SHOWN = 160
_CHUNK = 1 << 16


class EngineDifferenceError(RuntimeError):
    """An engine gave other ids than its tokenizer."""


@dataclass(slots=True)
class CheckReport:
    """Counts of the texts that were encoded twice.

    Attributes:
        texts: number of texts.
        characters: number of their characters.
    """

    texts: int = 0
    characters: int = 0


class Verifier:
    """Encodes texts by the reference and compares ids; records the characters of a run.

    Each process has its own verifier, which checks a part of the texts in order. So the first
    text with a character or token in the run is also the first in its process, and is checked.

    Args:
        engine: the engine to check.
        reference: the tokenizer.
        mode: ``full``, ``sample`` or ``off``.
    """

    def __init__(
        self, engine: Engine, reference: Tokenizer, mode: Literal["full", "sample", "off"]
    ) -> None:
        self._engine = engine
        self._reference = reference
        self._mode = mode
        self._num_texts = 0
        self._seen = SeenCharacters()
        self._names = AddedNames(getattr(reference, "special_names", []))

    def begin(self) -> "Verifier":
        """Return a verifier with the same settings for a new run."""
        return Verifier(self._engine, self._reference, self._mode)

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
            encoded: the engine's ids of all texts.
            seed: numbers that identify the block, from which the sample is drawn.
            describe: returns the origin of text ``i``, for messages.

        Raises:
            EngineDifferenceError: if the ids of a text differ.
        """
        chosen = self._choose(texts, seed)
        parts = [texts[i][start:stop] for i, (start, stop) in chosen.items()]
        reference = self._reference.encode_batch(parts) if parts else []
        for i, part, expected in zip(chosen, parts, reference, strict=True):
            is_whole = len(part) == len(texts[i])
            ids = encoded[i] if is_whole else self._engine.encode([part])[0]
            if len(expected) != len(ids) or ids.tolist() != expected:
                raise EngineDifferenceError(
                    _difference(self._engine.name, describe(i), part, ids, expected)
                )
        return CheckReport(len(parts), sum(map(len, parts)))

    def _choose(self, texts: Sequence[str], seed: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return the texts to check, by index, with the part of each to compare."""
        if self._mode == "off":
            return {}
        if self._mode == "full":
            return {i: (0, len(text)) for i, text in enumerate(texts)}
        first = range(min(max(FIRST_TEXTS - self._num_texts, 0), len(texts)))
        self._num_texts += len(texts)
        positions = {**self._names.places(texts), **self._seen.places(texts)}
        chosen = {
            i: _window(texts[i], positions.get(i, 0)) for i in sorted({*first, *positions})
        }
        drawn = np.random.default_rng(list(seed)).random(len(texts)) < SAMPLE_SHARE
        for i in np.flatnonzero(drawn).tolist():
            if i not in chosen or len(texts[i]) <= LONGEST_DRAWN:
                chosen[i] = _window(texts[i], 0, LONGEST_DRAWN)
        return chosen


def has_flagged(text: str, flags: NDArray[np.bool_]) -> bool:
    """Whether a text has a UTF-16 unit whose flag is set.

    Args:
        text: of any length.
        flags: of each of the 65536 units; a character beyond U+FFFF has two surrogates.
    """
    for start in range(0, len(text), _CHUNK):
        units = text[start : start + _CHUNK].encode("utf-16-le", "surrogatepass")
        if flags.take(np.frombuffer(units, "<u2")).any():
            return True
    return False


class SeenCharacters:
    """The characters of all texts so far."""

    def __init__(self) -> None:
        self._seen = np.zeros(0x110000, bool)
        self._seen_bytes = b""  # of the characters of ASCII
        self._is_open = np.ones(0x10000, bool)  # UTF-16 units: not seen, or half a character

    def places(self, texts: Sequence[str]) -> dict[int, int]:
        """Return the texts with a new character, by index, with the character's position."""
        positions: dict[int, int] = {}
        for i, text in enumerate(texts):
            if text.isascii():
                may_be_new = bool(text.encode().translate(None, self._seen_bytes))
            else:
                may_be_new = has_flagged(text, self._is_open)
            if not may_be_new:
                continue
            codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
            new = np.flatnonzero(~self._seen[codes])
            if len(new):
                positions[i] = int(new[0])
                self._note(np.unique(codes[new]))
        return positions

    def _note(self, codes: NDArray[np.integer]) -> None:
        self._seen[codes] = True
        self._is_open[codes[codes < len(self._is_open)]] = False
        self._is_open[0xD800:0xE000] = True
        self._seen_bytes = np.flatnonzero(self._seen[:0x80]).astype(np.uint8).tobytes()


class AddedNames:
    """The added tokens of a tokenizer, each until ``PER_NAME`` texts have contained it.

    Args:
        names: the tokens as written in texts.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._remaining = dict.fromkeys(filter(None, names), PER_NAME)  # texts to find
        self._patterns = {
            name[0]: _any_of(self._remaining, name[0]) for name in self._remaining
        }

    def places(self, texts: Sequence[str]) -> dict[int, int]:
        """Return the texts with a token that is still counted, by index, with its position."""
        positions: dict[int, int] = {}
        for i, text in enumerate(texts):
            for first in [first for first in self._patterns if first in text]:
                matches = list(self._patterns[first].finditer(text))
                if matches:
                    positions[i] = min(positions.get(i, len(text)), matches[0].start())
                    self._count(first, {match[0] for match in matches})
        return positions

    def _count(self, first: str, names: set[str]) -> None:
        """Count a text for each name; a name in ``PER_NAME`` texts is not searched any more."""
        for name in names:
            self._remaining[name] -= 1
        if all(self._remaining[name] for name in names):
            return
        self._remaining = {name: count for name, count in self._remaining.items() if count}
        del self._patterns[first]
        if any(name[0] == first for name in self._remaining):
            self._patterns[first] = _any_of(self._remaining, first)


def _any_of(names: Iterable[str], first: str) -> re.Pattern[str]:
    """Return a pattern that matches the names beginning with ``first``, the longest first."""
    matching = sorted((name for name in names if name[0] == first), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, matching)))


def _window(text: str, center: int, longest: int = LONGEST_CHOSEN) -> tuple[int, int]:
    """Return (start, stop) of a text, or of a part around ``center`` if the text is long."""
    if len(text) <= longest:
        return 0, len(text)
    start = max(0, min(center - longest // 2, len(text) - longest))
    return start, start + longest


def _difference(
    engine: str, where: str, text: str, ids: NDArray[Any], expected: Sequence[int]
) -> str:
    """Return an error message with origin, text, and ids around the first difference."""
    pairs = zip(ids.tolist(), expected, strict=False)
    first_difference = next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(expected))
    )
    window = slice(max(first_difference - 2, 0), first_difference + 6)
    excerpt = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return (
        f"--engine {engine} and the tokenizer differ on {where}, from id {first_difference} "
        f"on: {ids[window].tolist()} instead of {list(expected[window])}. The text is "
        f"{excerpt!r}."
    )
