"""Parses the bytes of a block into records, and records into texts.

A record is a line of JSON, a row of a table, a page of a WET file or a whole text file. Bad
records are returned with the reason, never dropped silently. A key with dots, such as
``data.text``, is a path into nested objects unless the record has a key with exactly this name.
JSON is parsed by orjson if it is installed (extra ``fast``); lines that orjson refuses are
parsed again by the standard library, so that both give the same texts.
"""

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

# First bytes of binary formats, to explain why a file is not UTF-8.
_MAGIC = {
    b"\x1f\x8b": "gzip's bytes: name the file .gz, or unpack it into the pipe",
    b"\x28\xb5\x2f\xfd": "Zstandard's bytes: name the file .zst, or unpack it into the pipe",
    b"BZh": "bzip2's bytes: name the file .bz2, or unpack it into the pipe",
    b"\xfd7zXZ": "xz's bytes: name the file .xz, or unpack it into the pipe",
    b"PAR1": "Parquet's bytes: name the file .parquet",
    b"\xff\xfe": "UTF-16: convert the file to UTF-8",
    b"\xfe\xff": "UTF-16: convert the file to UTF-8",
}

Kind = Literal["lines", "text_lines", "text", "table", "wet"]
Text = str | list[str]
"""Value of one key of a record: a text, or a list of its sentences."""
_LONG_LINE = 2000
_HEAD_BYTES = 1 << 17


class BadRecordError(ValueError):
    """A record of the input lacks a text for one of the keys."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that lacks a text for one of the keys.

    Attributes:
        number: number of the record in its block, from 1.
        reason: fault of the record.
    """

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class ParsedRecords:
    """Texts of the records of a block.

    Attributes:
        columns: for each key, the values of the good records.
        bad: the bad records.
        num_records: number of good and bad records.
        kept: for each good record a line of JSON, the list of its values of the kept keys;
            empty if no keys are kept.
    """

    columns: list[list[Text]]
    bad: list[BadRecord]
    num_records: int
    kept: list[bytes]

    def number_of(self, good: int) -> int:
        """Return the number, from 1 over all records, of the good record at index ``good``."""
        number = good + 1
        for bad in self.bad:
            number += bad.number <= number
        return number


def parse_records(
    kind: Kind, data: bytes, json_keys: Sequence[str], keep_keys: Sequence[str] = ()
) -> ParsedRecords:
    """Parse the bytes of a block.

    Args:
        kind: JSON lines, lines of text, one text, a table as an Arrow stream, or WET records.
        data: the bytes.
        json_keys: keys of a record, or columns of a table; plain text belongs to the only
            key.
        keep_keys: keys whose values are kept; the value of a missing key is null.
    """
    if kind == "lines":
        return parse_lines(data, json_keys, keep_keys)
    if kind == "table":
        return _parse_table(data, json_keys, keep_keys)
    if kind == "wet":
        pages = [_decode_page(*page) for page in split_pages(data)]
        return _collect(pages, lambda page: _values(page, json_keys), json_keys, keep_keys)
    texts = _split_lines(data) if kind == "text_lines" else [data]
    return _collect(texts, lambda text: ((_decode(text),), {}), json_keys, ())


def parse_lines(
    data: bytes, json_keys: Sequence[str], keep_keys: Sequence[str] = ()
) -> ParsedRecords:
    """Parse JSON lines; return the values of the keys, and the bad lines with their faults."""
    parsed = _parse_all(data, json_keys, keep_keys)
    if parsed is not None:
        return parsed
    lines = _split_lines(data)
    return _collect(lines, lambda line: _pick(line, json_keys), json_keys, keep_keys)


_ABSENT = object()


def find_value(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, or of a path of keys with dots; ``_ABSENT`` if none."""
    if key in record or "." not in key:
        return record.get(key, _ABSENT)
    value: Any = record
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _ABSENT
        value = value[name]
    return value


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse one line of JSON, with or without a byte order mark; raises ``BadRecordError``."""
    if not line.strip():
        raise BadRecordError("the line is empty")
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        state = "truncated JSON" if cut else "not JSON"
        raise BadRecordError(
            f"{state} ({error.msg}: column {error.colno}); a record is one object on one line"
        ) from None
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None
    except RecursionError:
        raise BadRecordError("JSON nested too deeply") from None
    except ValueError as error:
        raise BadRecordError(f"JSON that Python cannot read ({error})") from None
    if not isinstance(record, dict):
        raise BadRecordError(
            f"a JSON {type(record).__name__}, not an object; a record is one object on one line"
        )
    return record


def _views_of_lines(data: bytes) -> Iterator[memoryview]:
    """Yield lines without copying them; faster than ``split`` for long lines."""
    view, find = memoryview(data), data.find
    start = 0
    while start < len(data):
        end = find(b"\n", start)
        end = len(data) if end < 0 else end
        yield view[start:end]
        start = end + 1


def _split_lines(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _collect(
    raw: Sequence[Any],
    read: Callable[[Any], tuple[tuple[Text, ...], Mapping[str, Any]]],
    json_keys: Sequence[str],
    keep_keys: Sequence[str],
) -> ParsedRecords:
    """Convert each raw record to texts by ``read``; collect texts, kept values and faults."""
    columns: list[list[Text]] = [[] for _ in json_keys]
    bad: list[BadRecord] = []
    kept: list[bytes] = []
    for number, raw_record in enumerate(raw, 1):
        try:
            values, record = read(raw_record)
            _refuse_lone_surrogates(values)
        except BadRecordError as error:
            bad.append(BadRecord(number, str(error)))
            continue
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        if keep_keys:
            kept.append(_kept_line(record, keep_keys))
    return ParsedRecords(columns, bad, len(raw), kept)


def _kept_line(record: Mapping[str, Any], keep_keys: Sequence[str]) -> bytes:
    values = [find_value(record, key) for key in keep_keys]
    # Written by the standard library also if orjson is installed: the same bytes everywhere.
    line = json.dumps([None if value is _ABSENT else value for value in values])
    return line.encode() + b"\n"


@cache
def _json_reader() -> tuple[Callable[[Any], Any], bool]:
    """Return the fastest installed JSON parser, and whether it refuses lone surrogates."""
    try:
        from orjson import loads
    except ImportError:
        return json.loads, False
    return loads, True


def _parse_all(
    data: bytes, json_keys: Sequence[str], keep_keys: Sequence[str]
) -> ParsedRecords | None:
    """Parse all lines at once; return None if a line may be bad and needs ``_collect``."""
    loads, is_strict = _json_reader()
    if not is_strict and (b"\\ud" in data or b"\\uD" in data):
        return None
    head = min(len(data), _HEAD_BYTES)
    has_views = is_strict and data.count(b"\n", 0, head) * _LONG_LINE < head
    lines = _views_of_lines(data) if has_views else _split_lines(data)
    kept: list[bytes] = []
    try:
        if len(json_keys) == 1 and "." not in json_keys[0] and not keep_keys:
            key = json_keys[0]
            columns = [[loads(line)[key] for line in lines]]
        else:
            records = [loads(line) for line in lines]
            columns = [[find_value(record, key) for record in records] for key in json_keys]
            if keep_keys:
                kept = [_kept_line(record, keep_keys) for record in records]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not all(map(_all_texts, columns)):
        return None
    return ParsedRecords(columns, [], len(columns[0]), kept)


def _all_texts(column: list[Any]) -> bool:
    return set(map(type, column)) <= {str} or all(map(_is_text, column))


def _pick(line: bytes, json_keys: Sequence[str]) -> tuple[tuple[Text, ...], Mapping[str, Any]]:
    return _values(parse_object(line), json_keys)


def _values(
    record: Mapping[str, Any], json_keys: Sequence[str]
) -> tuple[tuple[Text, ...], Mapping[str, Any]]:
    values = [find_value(record, key) for key in json_keys]
    for key, value in zip(json_keys, values, strict=True):
        if value is _ABSENT:
            raise BadRecordError(f"no key {key!r} (keys: {', '.join(record) or 'none'})")
    return tuple(map(_checked, values, json_keys)), record


def _parse_table(
    data: bytes, json_keys: Sequence[str], keep_keys: Sequence[str]
) -> ParsedRecords:
    """Parse rows of an Arrow stream that ``tables.py`` wrote; its columns are the keys."""
    from pyarrow import ipc

    with ipc.open_stream(io.BytesIO(data)) as stream:
        table = stream.read_all()
    columns = {key: table.column(key).to_pylist() for key in table.column_names}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return _collect(rows, lambda row: _values(row, json_keys), json_keys, keep_keys)


def split_pages(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield headers and content of each record in a block of a WET file."""
    start = 0
    while start < len(data):
        head_end = data.index(b"\r\n\r\n", start)
        content_start = head_end + 4
        content_end = content_start + page_bytes(data[start:head_end])
        yield data[start:head_end], data[content_start:content_end]
        start = content_end + 4  # two line ends follow each record


def page_bytes(head: bytes) -> int:
    """Return the Content-Length of the headers of a WARC record.

    Raises:
        ValueError: if the headers are not those of a WARC record.
    """
    match = re.search(rb"(?mi)^Content-Length:[ \t]*(\d+)[ \t]*\r?$", head)
    if not head.startswith(b"WARC/") or match is None:
        raise ValueError(f"not a WARC record: {head[:40]!r}")
    return int(match[1])


def _decode_page(head: bytes, content: bytes) -> dict[str, Any]:
    """Return a page as a record: its headers by name, and ``text``."""
    lines = head.decode("utf-8", "replace").split("\r\n")[1:]
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    return {**headers, "text": content}


def _checked(value: object, key: str) -> Text:
    if isinstance(value, bytes):
        return _decode(value)
    if not _is_text(value):
        raise BadRecordError(f"key {key!r} holds {type(value).__name__}, not text")
    return value  # pyrefly: ignore


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    )


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None


def _not_utf8(error: UnicodeDecodeError) -> BadRecordError:
    first = bytes(error.object[:8])
    for magic, name in _MAGIC.items():
        if first.startswith(magic):
            return BadRecordError(f"not UTF-8 but {name}")
    return BadRecordError(f"not UTF-8 ({error.reason} at byte {error.start})")


def _refuse_lone_surrogates(record: tuple[Text, ...]) -> None:
    for value in record:
        try:
            (value if isinstance(value, str) else "".join(value)).encode()
        except UnicodeEncodeError:
            raise BadRecordError("a lone surrogate, which is not a character") from None
