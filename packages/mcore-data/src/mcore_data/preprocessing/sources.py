"""Inputs: found by file, folder, pattern or URL, cut into blocks, divided into parts."""

import hashlib
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO

from mcore_data.preprocessing.blocks import (
    BLOCK_BYTES,
    GIVE_AGAIN,
    STDIN,
    Block,
    InputSource,
    describe,
    open_local,
    open_raw,
)
from mcore_data.preprocessing.compression import COMPRESSED, DAMAGE, open_compressed
from mcore_data.preprocessing.records import BadRecordError, Kind
from mcore_data.preprocessing.remote import find_remote
from mcore_data.preprocessing.tables import read_tables

_LINES = (".jsonl", ".json", ".ndjson")
_TABLES = (".parquet", ".arrow", ".feather")


def find_inputs(words: Sequence[str], *, text_lines: bool = False) -> list[InputSource]:
    """Sources that ``--input`` names, in the order given; each folder's and pattern's by name.

    Args:
        words: files, named pipes, folders, patterns, URLs, or ``-`` for JSON lines on
            standard input. Hidden files of a folder are left out.
        text_lines: take each line of a ``.txt`` file for a document, not the whole file.

    Raises:
        FileNotFoundError: if a word names nothing.
        ImportError: if a URL needs an extra that is not installed.
    """
    found: list[InputSource] = []
    for word in words:
        if word == STDIN:
            stamp = _stream_stamp()
            sources = [InputSource(STDIN, "lines", 0, stamp, is_stream=True)]
        elif "://" in word:
            sources = [
                InputSource(url, _kind(url, text_lines), size, stamp)
                for url, size, stamp in find_remote(word, data_files)
            ]
        else:
            sources = [_local(path, text_lines) for path in _expand(word)]
        if not sources:
            raise FileNotFoundError(f"--input {word} is not a file, and names none.")
        found += sources
    return found


def data_files(paths: Sequence[str]) -> list[str]:
    """Those of a folder's files that are data: records, or if there are none, texts."""
    shown = [path for path in paths if not Path(path).name.startswith(".")]
    for suffixes in ((*_LINES, *_TABLES), (".txt",)):
        chosen = [path for path in shown if _bare_suffix(path) in suffixes]
        if chosen:
            return sorted(chosen)
    return []


def read_blocks(
    source: InputSource,
    json_keys: Sequence[str],
    start: int = 0,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[Block]:
    """Cut a source into blocks, from the start of one of them on.

    A record longer than ``block_bytes`` makes a longer block.

    Raises:
        RuntimeError: if a file is truncated or damaged.
        ValueError: if a table lacks a key.
        ImportError: if the format needs an extra that is not installed.
    """
    start = max(start, source.start)
    if source.kind == "table":
        yield from read_tables(source, json_keys, start, block_bytes)
    elif source.kind == "text" and source.is_local and not source.suffix:
        if start == 0:
            data = None if source.size else b""
            yield Block(source.path, "text", 0, max(source.size, 1), source.size, data)
    elif source.is_divisible:
        yield from _plain_blocks(source, start, block_bytes)
    else:
        try:
            with open_raw(source) as raw:
                yield from _stream_blocks(source, raw, start, block_bytes)
        except DAMAGE as error:
            raise RuntimeError(f"{source.path} is truncated or damaged: {error}") from error


def refuse_changed(sources: Sequence[InputSource]) -> None:
    """Hold files to the size and the time of change, or ETag, that they were found with."""
    for source in sources:
        if source.is_stream:
            continue
        if source.is_local:
            info = Path(source.path).stat() if Path(source.path).is_file() else None
            now = (info.st_size, str(info.st_mtime_ns)) if info else None
        else:
            found = find_remote(source.path, list, refresh=True)
            now = found[0][1:] if found else None
        if now != (source.size, source.stamp):
            if now is None:
                change = "is gone"
            elif now[0] == source.size:
                change = f"was written to, and has {now[0]:,} bytes as before"
            else:
                change = f"had {source.size:,} bytes and now has {now[0]:,} bytes"
            raise RuntimeError(
                f"{source.path} changed while it was read: it {change}. {GIVE_AGAIN}"
            )


def divide(sources: Sequence[InputSource], part: int, num_parts: int) -> list[InputSource]:
    """The share of the inputs that is part ``part`` of ``num_parts``, all near one size.

    Plain lines are cut anywhere, other files belong whole to the part in which they start.
    The parts together, in order, are the inputs.
    """
    streams = [source.path for source in sources if source.is_stream]
    if streams:
        name = "standard input" if streams[0] == STDIN else streams[0]
        raise ValueError(f"--partitions needs files: {name} cannot be divided.")
    total = sum(source.size for source in sources)
    low, high = total * part // num_parts, total * (part + 1) // num_parts
    chosen = []
    at = 0
    for source in sources:
        if source.is_divisible:
            first, last = max(low - at, 0), min(high - at, source.size)
            first, last = _line_start(source, first), _line_start(source, last)
            if first < last:
                stop = last if last < source.size else 0
                chosen.append(replace(source, start=first, stop=stop))
        elif low <= at < high or (at == total and part == num_parts - 1):
            chosen.append(source)
        at += source.size
    return chosen


def count_lines(path: str, stop: int) -> int:
    """Line ends in the first ``stop`` bytes of a local file."""
    lines = 0
    with open(path, "rb") as file:
        while stop > 0 and (data := file.read(min(1 << 20, stop))):
            lines += data.count(b"\n")
            stop -= len(data)
    return lines


def read_texts(source: InputSource, json_keys: Sequence[str]) -> Iterator[str]:
    """Stream the texts of a source, lists of sentences joined by a blank."""
    before = 0
    for block in read_blocks(source, json_keys):
        parsed = block.parse(json_keys)
        if parsed.bad:
            bad = parsed.bad[0]
            raise BadRecordError(
                f"{describe(block.path, block.kind, before + bad.number)}: {bad.reason}."
            )
        before += parsed.num_records
        for values in zip(*parsed.columns, strict=True):
            for value in values:
                yield value if isinstance(value, str) else " ".join(value)


def fingerprint(sources: Sequence[InputSource]) -> list[list[Any]]:
    """What of the sources decides the output, for a journal."""
    return [[s.path, s.kind, s.size, s.stamp, s.start, s.stop] for s in sources]


def _expand(word: str) -> list[Path]:
    if Path(word).is_dir():
        return [*map(Path, data_files([str(p) for p in Path(word).iterdir() if p.is_file()]))]
    if Path(word).exists():
        return [Path(word)]
    return sorted(path for path in map(Path, glob(word, recursive=True)) if path.is_file())


def _local(path: Path, text_lines: bool) -> InputSource:
    kind, info = _kind(str(path), text_lines), path.stat()
    if not stat.S_ISREG(info.st_mode):
        return InputSource(str(path), kind, 0, _stream_stamp(), is_stream=True)
    return InputSource(str(path), kind, info.st_size, str(info.st_mtime_ns))


def _stream_stamp() -> str:
    """A stamp like no other: a stream cannot be read from the middle again."""
    return f"{time.time_ns()}"


def _kind(path: str, text_lines: bool) -> Kind:
    suffix = _bare_suffix(path)
    if suffix in _TABLES:
        return "table"
    if suffix == ".txt":
        return "text_lines" if text_lines else "text"
    return "lines"


def _bare_suffix(path: str) -> str:
    bare = Path(path).with_suffix("") if Path(path).suffix in COMPRESSED else Path(path)
    return bare.suffix


def _line_start(source: InputSource, at: int) -> int:
    """First line start at or behind byte ``at``."""
    if at <= 0 or at >= source.size:
        return min(max(at, 0), source.size)
    with open_local(source.path) as file:
        file.seek(at - 1)
        file.readline()
        return file.tell()


def _plain_blocks(source: InputSource, start: int, block_bytes: int) -> Iterator[Block]:
    stop = source.stop or source.size
    with open_local(source.path) as file:
        while start < stop:
            file.seek(start + block_bytes - 1)
            file.readline()
            end = min(file.tell(), stop)
            yield Block(source.path, source.kind, start, end, end - source.start, None)
            start = end


def _stream_blocks(
    source: InputSource, raw: BinaryIO, start: int, block_bytes: int
) -> Iterator[Block]:
    stream = open_compressed(raw, source.suffix)
    _skip(stream, start)
    if source.kind == "text":
        if start == 0:
            data = stream.read()
            yield Block(source.path, "text", 0, max(len(data), 1), source.size, data)
        return
    while data := stream.read(block_bytes):
        data += stream.readline()
        done = raw.tell() if source.size else 0
        yield Block(source.path, source.kind, start, start + len(data), done, data)
        start += len(data)


def _skip(stream: BinaryIO, num_bytes: int) -> None:
    while num_bytes > 0 and (data := stream.read(min(1 << 20, num_bytes))):
        num_bytes -= len(data)


def digest(facts: object) -> str:
    """Short hash of a value's text."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()
