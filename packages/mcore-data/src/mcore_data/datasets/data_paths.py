"""Parses ``--data-path`` and similar options: prefixes of pairs, and their weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_data.config import DataConfig

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, slots=True)
class Blend:
    """Datasets to mix.

    Attributes:
        prefixes: prefixes of the ``.bin``/``.idx`` pairs.
        weights: share of each dataset, or None to use each dataset once.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(words: Sequence[str]) -> Blend:
    """Parse prefixes, or alternating weights and prefixes.

    An even number of words is parsed as pairs if the first word of every pair is a number.
    """
    if not words:
        raise ValueError("--data-path is empty: give the prefix of a .bin/.idx pair.")
    numbers = [_as_number(word) for word in words[::2]]
    named = [word for word in words if _as_number(word) is None]
    if len(words) % 2 and named and None not in numbers and len(words) > 1:
        raise ValueError(
            f"--data-path {' '.join(words)}: {len(words)} words cannot be alternating weights "
            "and prefixes. Add the missing weight or prefix."
        )
    if len(words) % 2 or all(number is None for number in numbers):
        return Blend(tuple(words), None)
    weights = tuple(number for number in numbers if number is not None)
    if len(weights) != len(numbers):
        raise ValueError(
            f"--data-path {' '.join(words)}: give prefixes only, or a weight before each."
        )
    return Blend(tuple(words[1::2]), weights)


def read_words(config: DataConfig) -> Sequence[str]:
    """Return the words of ``--data-path``, or of the file of ``--data-args-path``."""
    if config.data_args_path:
        return _read("--data-args-path", config.data_args_path).split()
    return config.data_path


def read_split_words(config: DataConfig) -> tuple[Sequence[str], ...] | None:
    """Return the words of each split if splits have separate options, else None."""
    if config.per_split_data_args_path:
        path = config.per_split_data_args_path
        fields = read_json("--per-split-data-args-path", path)
        if not isinstance(fields, dict):
            raise ValueError(
                f"--per-split-data-args-path {path}: give an object of {', '.join(SPLITS)}."
            )
        unknown = set(fields) - set(SPLITS)
        if unknown:
            raise ValueError(
                f"--per-split-data-args-path {path} has the key "
                f"{min(unknown)!r}; it takes {', '.join(SPLITS)}."
            )
        lists = [fields.get(name) or [] for name in SPLITS]
        return tuple(
            words.split() if isinstance(words, str) else list(map(str, words))
            for words in lists
        )
    paths = (config.train_data_path, config.valid_data_path, config.test_data_path)
    return paths if any(paths) else None


def read_json(flag: str, path: str | Path) -> Any:
    """Return the parsed JSON file that a flag names.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is not JSON.
    """
    try:
        return json.loads(_read(flag, path))
    except ValueError as error:
        raise ValueError(f"{flag} {path} is not JSON: {error}") from error


def _read(flag: str, path: str | Path) -> str:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{flag} {path} is not a file.")
    return Path(path).read_text(encoding="utf-8")


def _as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
