"""Well-known models by name: TOML files of flags, which serve as recipes too.

Shapes are those of the published configurations; sources stand in each file.
"""

import difflib
import tomllib
from importlib.resources import files
from typing import Any

from mcore_models.description import ModelDescription


def preset_names() -> list[str]:
    """List the models that ``load_preset`` knows."""
    folder = files("mcore_models").joinpath("presets")
    names = [entry.name for entry in folder.iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_preset(name: str) -> ModelDescription:
    """Read a preset.

    Raises:
        ValueError: if there is none of that name, with the nearest one.
    """
    return ModelDescription.from_flags(read_preset(name))


def read_preset(name: str) -> dict[str, Any]:
    """Read a preset as a flat table of flags.

    Raises:
        ValueError: if there is none of that name, with the nearest one.
    """
    known = preset_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
        raise ValueError(f"no preset is called {name}: {hint}")
    text = files("mcore_models").joinpath("presets", f"{name}.toml").read_text("utf-8")
    return tomllib.loads(text)
