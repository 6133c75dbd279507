"""Parses entries of ``--parameter-groups``: ``PATTERN key=value ...``.

A pattern is a kind (embedding, head, norm, bias, router, vector, matrix) or matches logical
names (``blocks.*.mlp.*``). No torch: a plan reads the entries before a model exists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from mcore_models.parameter_kinds import KINDS, tensor_kind


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupEntry:
    """One entry of ``--parameter-groups``."""

    pattern: str
    lr: float = 0.0
    """Highest learning rate; 0: --lr."""
    min_lr: float = 0.0
    lr_factor: float = 1.0
    decay_factor: float | None = None
    """Factor on --weight-decay; None: 1 for matrices, else 0."""
    beta1: float | None = None
    beta2: float | None = None
    optimizer: str = ""
    """``adam``: a matrix is updated by AdamW."""

    def matches(self, names: Sequence[str], kind: str) -> bool:
        """Whether the entry is for a parameter with these logical names."""
        if self.pattern in KINDS:
            return self.pattern == kind
        return any(fnmatchcase(name, self.pattern) for name in names)


def read_entries(texts: Sequence[str]) -> tuple[GroupEntry, ...]:
    """Read the entries of ``--parameter-groups``.

    Raises:
        ValueError: with the entry that cannot be read.
    """
    return tuple(map(_read_entry, texts))


@cache
def _read_entry(text: str) -> GroupEntry:
    pattern, *words = text.split()
    known = ("lr", "min_lr", "lr_factor", "decay_factor", "beta1", "beta2")
    values: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        try:
            values[key] = value if key == "optimizer" else float(value)
        except ValueError:
            values[key] = None
        is_wrong = values[key] is None or (key not in known and word != "optimizer=adam")
        if is_wrong or (key != "optimizer" and values[key] < 0):
            raise ValueError(
                f"--parameter-groups {text!r}: {word!r} is none of {'=X, '.join(known)}=X with "
                "a number of 0 or more, or optimizer=adam."
            )
    if not values or ("min_lr" in values and "lr" not in values):
        raise ValueError(
            f"--parameter-groups {text!r}: give a pattern and what is set for it, such as "
            "'embedding lr=1e-3 min_lr=1e-5'."
        )
    return GroupEntry(pattern=pattern, **values)


def find_idle_entries(texts: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Describe the entries that match no logical tensor of a model.

    Raises:
        ValueError: see ``read_entries``.
    """
    kinds = {name: tensor_kind(name, shape) for name, shape in shapes.items()}
    return [
        f"--parameter-groups {text!r} matches no parameter: use one of {', '.join(KINDS)}, "
        f"or a pattern of names such as {next(iter(kinds))}."
        for text, entry in zip(texts, read_entries(texts), strict=True)
        if not any(entry.matches((name,), kind) for name, kind in kinds.items())
    ]
