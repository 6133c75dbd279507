"""Finds inputs by file, folder, pattern or URL; cuts them into blocks and into parts."""

import hashlib
import io
import logging
import os
import re
import stat
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO, cast

from mcore_data.preprocessing.blocks import (
    BLOCK_BYTES,
    GIVE_AGAIN,
    STDIN,
    Block,
    InputSource,
    IteratorBytes,
    describe,
    open_local,
    open_raw,
)
from mcore_data.preprocessing.compression import DAMAGE, codec_of, open_compressed
from mcore_data.preprocessing.entries import next_entry, open_part
from mcore_data.preprocessing.records import BadRecordError, Kind, page_bytes
from mcore_data.preprocessing.remote import find_remote, without_parents
from mcore_data.preprocessing.tables import CSVS, TABLES, count_rows, read_tables

log = logging.getLogger(__name__)

_LINES = (".jsonl", ".json", ".ndjson", ".jsonlines", ".jl")
_TEXTS = (".txt", ".text")
_PAGES = (".wet",)
_OUTPUT_SUFFIXES = (".manifest.json", ".journal.json", ".plan.json", ".failed.json")
_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a corpus that was divided.

    Attributes:
        number: from 0.
        num_parts: parts of the division.
        corpus: hash of the names, kinds and sizes of all inputs of the corpus.
    """

    number: int
    num_parts: int
    corpus: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """The inputs of one pair.

    Attributes:
        sources: inputs, in the order of reading.
        left_out: files of the given folders and patterns that are not read.
        part: number of these sources in a division; None for an undivided corpus.
    """

    sources: Sequence[InputSource]
    left_out: Sequence[str] = ()
    part: Part | None = None


def find_inputs(words: Sequence[str], *, text_lines: bool = False) -> list[InputSource]:
    """Return the sources of ``--input``, in the order given; in folders and patterns by name.

    A folder means all record files in it and in its sub-folders, or if it has none its text
    files; ``report_left_out`` lists the other files.

    Args:
        words: files, named pipes, folders, patterns, URLs, or ``-`` for JSON lines on
            standard input.
        text_lines: each line of a ``.txt`` file is a document, not the whole file.

    Raises:
        FileNotFoundError: if a word matches no file.
        ImportError: if a URL needs an extra that is not installed.
        ValueError: if a table is compressed as a whole.
    """
    inputs: list[InputSource] = []
    for word in words:
        sources, left_out = _resolve(word, text_lines)
        if not sources:
            others = f" Left out: {_list_some(left_out)}." if left_out else ""
            raise FileNotFoundError(
                f"--input {word} is not a file, and not a folder or pattern with inputs."
                f"{others}"
            )
        inputs += sources
    return inputs


def report_left_out(words: Sequence[str]) -> list[str]:
    """Log and return the files of folders and patterns that ``find_inputs`` leaves out."""
    left_out = [path for word in words for path in _resolve(word, False)[1]]
    if left_out:
        log.warning("--input: left out %s", _list_some(left_out))
    return left_out


def data_files(names: Sequence[str]) -> list[str]:
    """Choose a folder's inputs: its records, or if it has none its CSV files, or its texts.

    Args:
        names: relative paths of all files. Hidden files, files in hidden folders, manifests,
            journals and plans are not chosen.
    """
    candidates = [
        name
        for name in names
        if not any(part.startswith(".") for part in Path(name).parts)
        and not name.endswith(_OUTPUT_SUFFIXES)
    ]
    for suffixes in ((*_LINES, *TABLES, *_PAGES), CSVS, _TEXTS):
        chosen = [name for name in candidates if _bare_suffix(name) in suffixes]
        if chosen:
            return sorted(chosen)
    return []


def read_blocks(
    source: InputSource,
    json_keys: Sequence[str],
    start: int = 0,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[Block]:
    """Yield the blocks of a source, from the block that starts at ``start`` on.

    A record longer than ``block_bytes`` makes a longer block.

    Raises:
        RuntimeError: if a file is truncated or damaged.
        ValueError: if a table lacks a key.
        ImportError: if the format needs an extra that is not installed.
    """
    if source.kind == "table":
        yield from read_tables(source, json_keys, start, block_bytes)
    elif source.kind == "text" and source.is_local and not source.codec:
        if start == 0:
            data = None if source.size else b""
            yield Block(source.path, "text", 0, max(source.size, 1), source.size, data)
    elif source.is_divisible:
        yield from _plain_blocks(source, max(start, source.start), block_bytes)
    else:
        try:
            with open_raw(source) as raw:
                yield from _stream_blocks(source, raw, start, block_bytes)
        except DAMAGE as error:
            raise RuntimeError(f"{source.path} is truncated or damaged: {error}") from error


def refuse_changed(sources: Sequence[InputSource]) -> None:
    """Raise ``RuntimeError`` if a source changed in size, modification time or ETag."""
    for change in list_changes(sources):
        raise RuntimeError(f"{change}: the file changed while it was read. {GIVE_AGAIN}")


def list_changes(sources: Sequence[InputSource]) -> Iterator[str]:
    """Yield a phrase for each source that changed in size, modification time or ETag."""
    for source in sources:
        if source.is_stream:
            continue
        if source.is_local:
            info = Path(source.path).stat() if Path(source.path).is_file() else None
            now = (info.st_size, str(info.st_mtime_ns)) if info else None
        else:
            files, _ = find_remote(source.path, refresh=True)
            now = files[0][1:] if files else None
        if now == (source.size, source.stamp):
            continue
        if now is None:
            yield f"{source.path} does not exist any more"
        elif now[0] == source.size:
            yield f"{source.path} was written again, with {now[0]:,} bytes as before"
        else:
            yield f"{source.path} had {source.size:,} bytes and now has {now[0]:,} bytes"


def divide(corpus: Corpus, num_parts: int) -> list[Corpus]:
    """Divide a corpus into consecutive parts of about equal size.

    Files are cut at entries (``entries.py``): plain files between lines, Zstandard files
    between frames, gzip files between members, Parquet files between row groups. Any other file
    belongs to the part that contains its first byte.
    """
    sources = corpus.sources
    streams = [source.path for source in sources if source.is_stream]
    if streams:
        name = "standard input" if streams[0] == STDIN else streams[0]
        raise ValueError(
            f"--partitions needs files: {name} is a stream and cannot be divided. Write it to "
            "a file first."
        )
    total = sum(source.size for source in sources)
    borders = [total * number // num_parts for number in range(num_parts + 1)]
    chosen: list[list[InputSource]] = [[] for _ in range(num_parts)]
    offset = 0
    for source in sources:
        number = min(bisect_right(borders, offset), num_parts) - 1
        if not source.size:
            chosen[number].append(source)
        start = 0
        while start < source.size:
            end = next_entry(source, borders[number + 1] - offset, start)
            if start < end:
                stop = end if end < source.size else 0
                chosen[number].append(replace(source, start=start, stop=stop))
            start, number = end, number + 1
        offset += source.size
    listing = digest([[Path(source.path).name, source.kind, source.size] for source in sources])
    return [
        replace(corpus, sources=part, part=Part(number, num_parts, listing))
        for number, part in enumerate(chosen)
    ]


def count_records(path: str, kind: Kind, stop: int) -> int:
    """Count the records of a local file before the part that begins at stored byte ``stop``."""
    source = InputSource(path, kind, os.path.getsize(path), "", stop=stop)
    if kind == "table":
        return count_rows(path, stop)
    if kind == "wet":
        return sum(block.parse(()).num_records for block in read_blocks(source, ()))
    with open_raw(source) as raw:
        return sum(piece.count(b"\n") for piece in open_part(source, raw))


def read_texts(source: InputSource, json_keys: Sequence[str]) -> Iterator[str]:
    """Yield the texts of a source; lists of sentences are joined by a blank.

    Raises:
        BadRecordError: at the first bad record.
    """
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


def fingerprint(corpus: Corpus) -> list[Any]:
    """Return the facts of a corpus that determine the output and the manifest's ``parts``."""
    sources = [[s.path, s.kind, s.size, s.stamp, s.start, s.stop] for s in corpus.sources]
    return [*sources, astuple(corpus.part)] if corpus.part else sources


def _resolve(word: str, text_lines: bool) -> tuple[list[InputSource], list[str]]:
    """Return the sources of a word of ``--input``, and the files that are left out."""
    if word == STDIN:
        return [InputSource(STDIN, "lines", 0, _stream_stamp(), is_stream=True)], []
    if "://" in word:
        files, left_out = find_remote(word, data_files)
        sources = [
            InputSource(url, _kind(url, text_lines), size, stamp) for url, size, stamp in files
        ]
        return sources, left_out
    if os.path.isdir(word):
        names = _names_below(word)
        chosen = [
            name for name in data_files(names) if os.path.isfile(os.path.join(word, name))
        ]
        paths = [os.path.join(word, name) for name in chosen]
        left_out = [os.path.join(word, name) for name in sorted({*names} - {*chosen})]
    elif os.path.exists(word):
        paths, left_out = [word], []
    else:
        matches = {path: os.path.isfile(path) for path in sorted(glob(word, recursive=True))}
        paths = [path for path, is_file in matches.items() if is_file]
        others = [path for path, is_file in matches.items() if not is_file]
        left_out = without_parents(others, paths)
    return [_local(Path(path), text_lines) for path in paths], left_out


def _names_below(folder: str) -> list[str]:
    """Return the relative paths of all files in a folder and its sub-folders, sorted.

    Links to folders are followed. A folder that is not entered, since it is hidden or was
    entered before through a link, is itself listed, with a slash at its end.
    """
    names: list[str] = []
    entered = {os.path.realpath(folder)}

    def refuse(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        for name in sorted(folders):
            real = os.path.realpath(os.path.join(root, name))
            if name.startswith(".") or real in entered:
                folders.remove(name)
                names.append(os.path.relpath(os.path.join(root, name), folder) + "/")
            else:
                entered.add(real)
        folders.sort()
        names += [os.path.relpath(os.path.join(root, name), folder) for name in files]
    return sorted(names)


def _list_some(paths: Sequence[str]) -> str:
    """Return the number of files, and the names of the first of them."""
    listed = ", ".join(paths[:_MAX_LISTED])
    more = len(paths) - _MAX_LISTED
    rest = f" and {more:,} more" if more > 0 else ""
    return f"{len(paths):,} file{'s' * (len(paths) > 1)}: {listed}{rest}"


def _local(path: Path, text_lines: bool) -> InputSource:
    kind, info = _kind(str(path), text_lines), path.stat()
    if not stat.S_ISREG(info.st_mode):
        return InputSource(str(path), kind, 0, _stream_stamp(), is_stream=True)
    return InputSource(str(path), kind, info.st_size, str(info.st_mtime_ns))


def _stream_stamp() -> str:
    """Return a unique stamp: an interrupted run cannot continue in a stream."""
    return f"{time.time_ns()}"


def _kind(path: str, text_lines: bool) -> Kind:
    suffix = _bare_suffix(path)
    if suffix in _PAGES:
        return "wet"
    if suffix in (*TABLES, *CSVS):
        if codec_of(path) and suffix in TABLES:
            raise ValueError(
                f"--input {path}: Parquet and Arrow files are compressed internally and cannot "
                "be read from a compressed file. Unpack it first."
            )
        return "table"
    if suffix in _TEXTS:
        return "text_lines" if text_lines else "text"
    return "lines"


def _bare_suffix(path: str) -> str:
    """Return the lower-case suffix of a file name, without the suffix of a compression."""
    bare = Path(path).with_suffix("") if codec_of(path) else Path(path)
    return bare.suffix.lower()


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
    if source.start or source.stop:
        pieces = open_part(source, raw)
        stream = cast(BinaryIO, io.BufferedReader(IteratorBytes(pieces), 1 << 16))
    else:
        stream = open_compressed(raw, source.codec)
    _skip(stream, start)
    if source.kind == "text":
        if start == 0:
            data = stream.read()
            yield Block(source.path, "text", 0, max(len(data), 1), source.size, data)
        return
    while data := stream.read(block_bytes):
        end = start + len(data)
        if source.kind == "wet":
            data, end = _take_pages(source, stream, data, end)
        else:
            data += stream.readline()
            end = start + len(data)
        done = min(raw.tell() - source.start, source.num_bytes) if source.size else 0
        yield Block(source.path, source.kind, start, end, done, data)
        start = end


def _take_pages(
    source: InputSource, stream: BinaryIO, data: bytes, end: int
) -> tuple[bytes, int]:
    """Complete the last WARC record of ``data``, and return only the pages of text.

    Args:
        source: for messages.
        stream: the file after ``data``.
        data: begins with a record.
        end: bytes of the file up to the end of ``data``.

    Returns:
        The pages, and the bytes of the file up to the next record.
    """
    pages, start = [], 0
    while start < len(data):
        while (head_end := data.find(b"\r\n\r\n", start)) < 0 and (more := stream.readline()):
            data, end = data + more, end + len(more)
        head = data[start : max(head_end, start)]
        try:
            stop = head_end + 4 + page_bytes(head) + 4
        except ValueError as error:
            raise OSError(f"at byte {end - len(data) + start}: {error}") from None
        if stop > len(data):
            more = stream.read(stop - len(data))
            data, end = data + more, end + len(more)
        if stop > len(data) or data[stop - 4 : stop] != b"\r\n\r\n":
            raise OSError(f"the record at byte {end - len(data) + start} is truncated")
        kind = re.search(rb"(?mi)^WARC-Type:[ \t]*(\w+)", head)
        if kind and kind[1] == b"conversion":
            pages.append(data[start:stop])
        elif kind and kind[1] == b"response":
            raise ValueError(
                f"{source.path} holds raw web pages, not their text: extract the text first, "
                "for example with datatrove."
            )
        start = stop
    return b"".join(pages), end


def _skip(stream: BinaryIO, num_bytes: int) -> None:
    while num_bytes > 0 and (data := stream.read(min(1 << 20, num_bytes))):
        num_bytes -= len(data)


def digest(facts: object) -> str:
    """Return the SHA-256 of a value's ``repr``."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()
