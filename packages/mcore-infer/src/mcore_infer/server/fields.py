"""Fields of request bodies: tables of what each may be, which read it and describe it.

A table gives each field a kind. ``read_fields`` takes every field with its type and range or
refuses it; ``object_schema`` is the same as JSON schema, for ``/openapi.json``.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class RequestError(Exception):
    """What a client did wrong, or why it gets no answer; the message is for its user.

    Attributes:
        status: HTTP status.
        message: one line.
        field: of the body that is wrong; empty: none.
    """

    def __init__(self, status: int, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field


def read_body(raw: bytes) -> dict[str, Any]:
    """Parse a body, which must be a JSON object of numbers and text that can be written."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
        if b"\\ud" in raw.lower():  # halves of characters are text that no tokenizer reads
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is no valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(400, "the body must be a JSON object.")
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


Schema = dict[str, Any]
"""A JSON schema."""


class Kind(Protocol):
    """What a field may be."""

    def read(self, name: str, value: Any) -> Any:
        """Return what a value means, None being a field that is left out, or refuse it."""

    def schema(self) -> Schema | None:
        """Describe the values that are read; None: the field is there to be refused."""


Table = Mapping[str, Kind]
"""The fields of one object, by name."""


def read_fields(
    body: Mapping[str, Any], table: Table, without_effect: Iterable[str] = ()
) -> dict[str, Any]:
    """Return every field of a table; null is as good as left out.

    Args:
        body: the object as it was sent.
        table: all fields that are read.
        without_effect: fields that are accepted and change nothing.

    Raises:
        RequestError: with status 400, for a wrong or an unknown field.
    """
    given = {name: value for name, value in body.items() if value is not None}
    found = {name: kind.read(name, given.pop(name, None)) for name, kind in table.items()}
    left = sorted(set(given) - set(without_effect))
    if left:
        near = difflib.get_close_matches(left[0], table, n=1)
        meant = f": did you mean {near[0]}?" if near else "."
        raise RequestError(400, f"unknown field {left[0][:100]}{meant}", left[0][:100])
    return found


def object_schema(table: Table, without_effect: Iterable[str] = ()) -> Schema:
    """Describe the objects that ``read_fields`` reads."""
    schemas = {name: kind.schema() for name, kind in table.items()}
    required = [name for name, kind in table.items() if getattr(kind, "required", False)]
    properties = {
        name: schema if name in required else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in schemas.items()
        if schema is not None
    }
    properties |= {name: {"description": "Has no effect."} for name in without_effect}
    found: Schema = {"type": "object", "properties": properties}
    if required:
        found["required"] = required
    return {**found, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def read(self, name: str, value: Any) -> bool:
        """Return a field that is true or false; left out, it is false."""
        if not isinstance(value, bool | None):
            raise RequestError(400, f"{name} must be true or false.", name)
        return bool(value)

    def schema(self) -> Schema:
        """Return a boolean."""
        return {"type": "boolean", "default": False}


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number in a range, its ends included."""

    default: int | None
    low: int
    high: int

    def read(self, name: str, value: Any) -> Any:
        """Return the number, or the default."""
        if value is None:
            return self.default
        low, high = self.low, self.high
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(
                400, f"{name} must be a whole number from {low} to {high}.", name
            )
        return value

    def schema(self) -> Schema:
        """Return an integer with its bounds."""
        found: Schema = {"type": "integer", "minimum": self.low, "maximum": self.high}
        has_default = self.default is not None and self.low <= self.default <= self.high
        return found | ({"default": self.default} if has_default else {})


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a range, its ends included; with ``above`` the lower one not."""

    default: float
    low: float | int
    high: float | int
    above: bool = False

    def read(self, name: str, value: Any) -> float:
        """Return the number, or the default."""
        if value is None:
            return self.default
        low, high = self.low, self.high
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (self.above and value == low):
            begin = f"above {low:g}, at most" if self.above else f"from {low:g} to"
            raise RequestError(400, f"{name} must be a number {begin} {high:g}.", name)
        return float(value)

    def schema(self) -> Schema:
        """Return a number with its bounds."""
        low = "exclusiveMinimum" if self.above else "minimum"
        return {"type": "number", low: self.low, "maximum": self.high, "default": self.default}


@dataclass(frozen=True, slots=True)
class Text:
    """A string."""

    def read(self, name: str, value: Any) -> str:
        """Return the string; left out, it is empty."""
        if not isinstance(value, str | None):
            raise RequestError(400, f"{name} must be a string.", name)
        return value or ""

    def schema(self) -> Schema:
        """Return a string."""
        return {"type": "string"}


@dataclass(frozen=True, slots=True)
class Texts:
    """A string or a list of strings, none empty."""

    most: int

    def read(self, name: str, value: Any) -> tuple[str, ...]:
        """Return the strings; left out, there are none."""
        values = [value] if isinstance(value, str) else [] if value is None else value
        is_list = isinstance(values, list) and len(values) <= self.most
        if not is_list or not all(isinstance(v, str) and v for v in values):
            raise RequestError(
                400,
                f"{name} must be a string or a list of at most {self.most}, none empty.",
                name,
            )
        return tuple(values)

    def schema(self) -> Schema:
        """Return a string or a list of them."""
        one = {"type": "string", "minLength": 1}
        return {"anyOf": [one, {"type": "array", "items": one, "maxItems": self.most}]}


@dataclass(frozen=True, slots=True)
class Only:
    """One of a few values; with none of them, a field that is refused for a reason."""

    why: str
    allowed: tuple[Any, ...] = ()
    default: Any = None

    def read(self, name: str, value: Any) -> Any:
        """Return the value, or the default."""
        is_allowed = any(value == one and type(value) is type(one) for one in self.allowed)
        if value is not None and not is_allowed:
            raise RequestError(400, f"{name} {self.why}", name)
        return self.default if value is None else value

    def schema(self) -> Schema | None:
        """Return the values, if there are any."""
        return {"enum": list(self.allowed)} if self.allowed else None


@dataclass(frozen=True, slots=True)
class Group:
    """An object with fields of its own."""

    table: Table
    without_effect: tuple[str, ...] = ()

    def read(self, name: str, value: Any) -> dict[str, Any]:
        """Return its fields; left out, it is empty."""
        return read_fields(as_object(name, value), self.table, self.without_effect)

    def schema(self) -> Schema:
        """Return an object."""
        return object_schema(self.table, self.without_effect)


@dataclass(frozen=True, slots=True)
class Variants:
    """An object whose ``type`` says which other fields it has; without one it is the first."""

    tables: Mapping[str, Table]

    def read(self, name: str, value: Any) -> tuple[str, dict[str, Any]]:
        """Return the type and its fields."""
        given = as_object(name, value)
        kind = Text().read("type", given.pop("type", None)) or next(iter(self.tables))
        if kind not in self.tables:
            known = ", ".join(self.tables)
            raise RequestError(400, f"{name}: type {kind[:40]} is none of {known}.", name)
        return kind, read_fields(given, self.tables[kind])

    def schema(self) -> Schema:
        """Return one object for each type."""
        found = []
        for kind, table in self.tables.items():
            one = object_schema(table)
            one["properties"] = {"type": {"const": kind}, **one["properties"]}
            found.append({**one, "required": ["type", *one.get("required", [])]})
        return {"oneOf": found}


@dataclass(frozen=True, slots=True)
class Own:
    """A field with a reader of its own."""

    reader: Callable[[Any], Any]
    """Takes the value, None where it is left out; raises ``RequestError``."""
    described: Schema
    required: bool = False

    def read(self, name: str, value: Any) -> Any:
        """Return what the reader makes of the value."""
        del name
        return self.reader(value)

    def schema(self) -> Schema:
        """Return what was given."""
        return self.described


def as_object(name: str, value: Any) -> dict[str, Any]:
    """Return an object, empty where it is left out; refuse anything else."""
    if not isinstance(value, dict | None):
        raise RequestError(400, f"{name} must be an object.", name)
    return dict(value or {})
