"""Reads and writes recipes: TOML files whose fields are flags, later files override earlier.

Tables of a recipe (``[model]``, ``[batch]``) are only headings for people. The name of a field
is the flag with underscores, and occurs once in a file.
"""

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path

from mcore_base.command_line import OptionsError, unknown

Value = bool | int | float | str | list


def read_recipe(path: Path, known: Collection[str]) -> dict[str, Value]:
    """Read one recipe into a flat table, field to value.

    Raises:
        ValueError: for a file that is not valid TOML.
        OptionsError: (a ValueError) with every unknown and every doubled field.
        FileNotFoundError: if there is no such file.
    """
    if path.is_dir():
        raise ValueError(f"--recipe {path} is a folder: give a TOML file.")
    if not path.exists():
        raise FileNotFoundError(f"--recipe {path} does not exist: give a TOML file.")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: not UTF-8 ({error.reason}).") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {_plain(str(error), path)}") from None
    fields: dict[str, Value] = {}
    faults = []
    for name, value in _flatten(tables):
        if name not in known:
            faults.append(f"{path}: {unknown(name, known, 'field')}")
        elif name in fields:
            faults.append(f"{path}: {name} is given twice: leave one of the two out.")
        fields[name] = value
    if faults:
        raise OptionsError(faults)
    return fields


def to_flags(fields: Mapping[str, Value]) -> list[str]:
    """Return the flags, with values, of a recipe's fields."""
    words = []
    for name, value in fields.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif isinstance(value, list):
            words += [f"--{dashed}", *map(str, value)]
        else:
            words += [f"--{dashed}", str(value)]
    return words


def changed_options(config: object) -> dict[str, Value]:
    """List the options of a config that differ from their defaults: the run's own recipe."""
    table: dict[str, Value] = {}
    for part in fields(config):  # pyrefly: ignore
        value = getattr(config, part.name)
        for field in fields(value):
            option_value = getattr(value, field.name)
            if option_value != field.default:
                table[field.name] = (
                    list(option_value) if isinstance(option_value, tuple) else option_value
                )
    return table


def write_recipe(table: Mapping[str, Value]) -> str:
    """Write a flat table as TOML that ``read_recipe`` reads back."""
    # JSON's strings, numbers, booleans and lists of these are TOML's too.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items())


def _flatten(table: Mapping[str, object]) -> list[tuple[str, Value]]:
    pairs = []
    for name, value in table.items():
        if isinstance(value, dict):
            pairs += _flatten(value)
        else:
            pairs.append((name, value))
    return pairs


def _plain(message: str, path: Path) -> str:
    """Return the parser's message; for a repeated field, one that names the field."""
    if "overwrite" not in message:
        return f"not valid TOML: {message}"
    line = int(message.rpartition("line ")[2].partition(",")[0])
    field = path.read_text(encoding="utf-8").splitlines()[line - 1].partition("=")[0].strip()
    return f"{field} is given twice (line {line}): leave one of the two out."
