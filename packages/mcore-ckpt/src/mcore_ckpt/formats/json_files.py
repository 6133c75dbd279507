"""Reads and writes JSON files of other programs; errors name the file, output is strict JSON.

Numbers that JSON lacks (infinity, NaN) are written like transformers, as objects such as
``{"__float__": "Infinity"}``, and read in this form and in Python's.
"""

import json
import math
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointError

_TAG = "__float__"
_WORDS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: if the file is damaged or does not hold one object.
        FileNotFoundError: if the file does not exist.
    """
    return parse_json_object(path.read_bytes(), str(path))


def parse_json_object(content: bytes | str, where: str) -> dict[str, Any]:
    """Parse one JSON object; ``where`` is the file that errors name.

    Raises:
        CheckpointError: if the text is damaged or is not one object.
    """
    try:
        value = json.loads(content, object_hook=_without_tag)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is damaged: it is not a JSON object")
    return value


def json_bytes(value: Any) -> bytes:
    """Return a value as strict JSON, with a line break at the end."""
    return json.dumps(_with_tags(value), indent=2, allow_nan=False).encode() + b"\n"


def _without_tag(table: dict[str, Any]) -> Any:
    return _WORDS.get(str(table[_TAG]), table) if table.keys() == {_TAG} else table


def _with_tags(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_tags(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_tags(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"}
    return value
