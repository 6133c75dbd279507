"""Published models by name: one table of flags, ``models.toml``.

Shapes are those of the published configurations. Each entry has its paper or release, and the
published number of parameters if there is one; a test compares that number with our count.
"""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from mcore_models.description import ModelDescription


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One entry of the table."""

    name: str
    flags: dict[str, Any]
    """Flat table of flags, as in a recipe."""
    source: str
    """Paper or release with the shape."""
    parameters: int
    """Published number of parameters, without multi-token prediction; 0: only a rounded number
    is published."""
    family: str = "gpt"
    """Name of the architecture in ``FAMILIES``."""

    @property
    def model(self) -> ModelDescription:
        """The model that the flags describe."""
        return ModelDescription.from_flags(self.flags, self.family)


def presets() -> dict[str, Preset]:
    """Return all presets by name, grouped by family, small before large."""
    table = _table()
    return {name: _preset(name, _flags(name, table)) for name in table}


def preset_names() -> list[str]:
    """Return the names for ``load_preset``, in the order of ``presets``."""
    return list(presets())


def load_preset(name: str) -> ModelDescription:
    """Return the model of a preset.

    Raises:
        ValueError: for an unknown name; the message contains the most similar name.
    """
    return find_preset(name).model


def find_preset(name: str) -> Preset:
    """Return a preset's entry in the table."""
    table = presets()
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(table)}."
        raise ValueError(f"unknown preset {name}: {hint}")
    return table[name]


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    file = files("mcore_models").joinpath("presets", "models.toml")
    return tomllib.loads(file.read_text("utf-8"))


def _preset(name: str, entry: dict[str, Any]) -> Preset:
    source, count = entry.pop("source"), entry.pop("parameters", 0)
    family = entry.pop("family", "gpt")
    return Preset(name=name, flags=entry, source=source, parameters=count, family=family)


def _flags(name: str, table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return an entry's flags; flags of its base (``like``) that it does not set are added.

    The base's parameter count is not.
    """
    entry = dict(table[name])
    like = entry.pop("like", "")
    base = _flags(like, table) if like else {}
    return {key: value for key, value in base.items() if key != "parameters"} | entry
