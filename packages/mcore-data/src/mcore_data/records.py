"""JSONL files as blocks of whole lines, and lines as texts.

A block is some megabytes of a file, cut at a line end, small enough to hold and large
enough to be worth sending to another process. Blocks of a plain file name a byte range,
which the receiver reads itself; blocks of a compressed file carry their bytes.
"""

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO

BLOCK_BYTES = 4 << 20
_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
_DAMAGE = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, OSError)


class BadRecordError(ValueError):
    """A line of the input is not the record that was asked for."""


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of one file.

    Attributes:
        path: the file.
        start: offset of the first byte, counted in the decompressed file.
        num_bytes: decompressed bytes.
        data: the bytes, or None if they are to be read from the plain file at ``start``.
    """

    path: Path
    start: int
    num_bytes: int
    data: bytes | None

    def read(self) -> bytes:
        """The bytes of the lines."""
        if self.data is not None:
            return self.data
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.num_bytes)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that gave no record.

    Attributes:
        number: line in its block or file, from 1.
        reason: what is wrong with it.
    """

    number: int
    reason: str


Text = str | list[str]
"""One value of a record: a text, or its sentences one by one."""


@dataclass(frozen=True, slots=True)
class ParsedLines:
    """Records of some lines.

    Attributes:
        records: for each good line, the value of each key.
        bad: the other lines.
        num_lines: good and bad together.
    """

    records: list[tuple[Text, ...]]
    bad: list[BadLine]
    num_lines: int


def read_blocks(path: Path, start: int = 0, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Cut a file into blocks at line ends, from a (decompressed) offset on.

    A line longer than ``block_bytes`` makes a longer block.

    Raises:
        RuntimeError: if a compressed file is truncated or damaged.
    """
    opener = _OPENERS.get(path.suffix)
    if opener is None:
        yield from _plain_blocks(path, start, block_bytes)
        return
    try:
        with opener(path) as stream:
            yield from _stream_blocks(path, stream, start, block_bytes)
    except _DAMAGE as error:
        raise RuntimeError(f"{path} is truncated or damaged: {error}") from error


def find_inputs(words: Sequence[str]) -> list[Path]:
    """Files that ``--input`` names: files, folders and patterns, in the order given.

    Raises:
        FileNotFoundError: if a word names nothing.
    """
    found: list[Path] = []
    for word in words:
        if Path(word).is_dir():
            files = [path for path in Path(word).iterdir() if _is_jsonl(path)]
        elif Path(word).is_file():
            files = [Path(word)]
        else:
            files = [path for path in map(Path, glob(word)) if path.is_file()]
        if not files:
            raise FileNotFoundError(f"--input {word} is not a file, and names none.")
        found += sorted(files)
    return found


def is_compressed(path: Path) -> bool:
    """Whether ``read_blocks`` decompresses this file, by its suffix."""
    return path.suffix in _OPENERS


def parse_lines(data: bytes, json_keys: Sequence[str]) -> ParsedLines:
    """Parse JSON lines and pick keys; lines that will not do are listed, not raised."""
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    surrogates_possible = b"\\ud" in data or b"\\uD" in data
    records: list[tuple[Text, ...]] = []
    bad: list[BadLine] = []
    for number, line in enumerate(lines, 1):
        try:
            record = _pick(line, json_keys)
            if surrogates_possible:
                _refuse_lone_surrogates(record)
            records.append(record)
        except BadRecordError as error:
            bad.append(BadLine(number, str(error)))
    return ParsedLines(records, bad, len(lines))


def read_texts(path: Path, json_keys: Sequence[str]) -> Iterator[str]:
    """Stream the texts of a JSONL file, lists of sentences joined by a blank.

    Raises:
        BadRecordError: at the first line that is no record, with file and line number.
    """
    lines_before = 0
    for block in read_blocks(path):
        parsed = parse_lines(block.read(), json_keys)
        if parsed.bad:
            raise BadRecordError(describe_bad_line(path, lines_before, parsed.bad[0]))
        lines_before += parsed.num_lines
        for record in parsed.records:
            for value in record:
                yield value if isinstance(value, str) else " ".join(value)


def _is_jsonl(path: Path) -> bool:
    bare = path.with_suffix("") if is_compressed(path) else path
    return path.is_file() and bare.suffix in (".jsonl", ".json")


def describe_bad_line(path: Path, lines_before: int, bad: BadLine) -> str:
    """One sentence that names file, line and what is wrong."""
    return f"{path}, line {lines_before + bad.number}: {bad.reason}."


def _pick(line: bytes, json_keys: Sequence[str]) -> tuple[Text, ...]:
    if not line.strip():
        raise BadRecordError("the line is empty")
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        state = "truncated JSON" if cut else "not JSON"
        raise BadRecordError(f"{state} ({error.msg} at column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise BadRecordError("JSON nested too deeply") from None
    if not isinstance(record, dict):
        raise BadRecordError(f"a JSON {type(record).__name__}, not an object")
    values = []
    for key in json_keys:
        if key not in record:
            raise BadRecordError(f"no key {key!r} (keys: {', '.join(record) or 'none'})")
        value = record[key]
        if not isinstance(value, str) and not _is_texts(value):
            raise BadRecordError(f"key {key!r} holds {type(value).__name__}, not text")
        values.append(value)
    return tuple(values)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _refuse_lone_surrogates(record: tuple[Text, ...]) -> None:
    for value in record:
        try:
            (value if isinstance(value, str) else "".join(value)).encode()
        except UnicodeEncodeError:
            raise BadRecordError("half of a surrogate pair, which is no character") from None


def _plain_blocks(path: Path, start: int, block_bytes: int) -> Iterator[Block]:
    size = path.stat().st_size
    with path.open("rb") as file:
        while start < size:
            file.seek(start + block_bytes)
            file.readline()
            end = min(file.tell(), size)
            yield Block(path, start, end - start, None)
            start = end


def _stream_blocks(
    path: Path, stream: BinaryIO, start: int, block_bytes: int
) -> Iterator[Block]:
    stream.seek(start)
    while data := stream.read(block_bytes):
        data += stream.readline()
        yield Block(path, start, len(data), data)
        start += len(data)
