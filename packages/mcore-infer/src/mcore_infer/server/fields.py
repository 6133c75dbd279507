"""Reading of request bodies: every field is taken with its type and range, or refused."""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any


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


class Fields:
    """The fields of one object, taken by name; null is as good as left out."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._known: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field as it is."""
        self._known.add(name)
        return self._left.pop(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a field that is true or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise RequestError(400, f"{name} must be true or false.", name)
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """Return a whole number in a range, its ends included."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(
                400, f"{name} must be a whole number from {low} to {high}.", name
            )
        return value

    def number(
        self,
        name: str,
        default: float,
        low: float | int,
        high: float | int,
        *,
        above: bool = False,
    ) -> float:
        """Return a number in a range, its ends included; with ``above`` the lower one not."""
        value = self.take(name)
        if value is None:
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above and value == low):
            begin = f"above {low:g}, at most" if above else f"from {low:g} to"
            raise RequestError(400, f"{name} must be a number {begin} {high:g}.", name)
        return float(value)

    def text(self, name: str, default: str = "") -> str:
        """Return a string."""
        value = self.take(name, default)
        if not isinstance(value, str):
            raise RequestError(400, f"{name} must be a string.", name)
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return a string or a list of strings that are not empty, as a tuple."""
        value = self.take(name, [])
        values = [value] if isinstance(value, str) else value
        is_list = isinstance(values, list) and len(values) <= most
        if not is_list or not all(isinstance(v, str) and v for v in values):
            raise RequestError(
                400, f"{name} must be a string or a list of at most {most}, none empty.", name
            )
        return tuple(values)

    def object(self, name: str) -> dict[str, Any]:
        """Return an object; empty where it is left out."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise RequestError(400, f"{name} must be an object.", name)
        return value

    def refuse(self, name: str, why: str, allowed: Iterable[Any] = ()) -> None:
        """Refuse a field, unless its value has no effect."""
        value = self.take(name)
        if value is not None and not any(
            value == one and type(value) is type(one) for one in allowed
        ):
            raise RequestError(400, f"{name} {why}", name)

    def finish(self, without_effect: Iterable[str] = ()) -> None:
        """Refuse what nothing has taken.

        Args:
            without_effect: fields that are accepted and change nothing.
        """
        left = sorted(set(self._left) - set(without_effect))
        if left:
            near = difflib.get_close_matches(left[0], self._known, n=1)
            meant = f": did you mean {near[0]}?" if near else "."
            raise RequestError(400, f"unknown field {left[0][:100]}{meant}", left[0][:100])
