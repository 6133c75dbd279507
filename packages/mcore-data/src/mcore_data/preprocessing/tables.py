"""Reads Parquet, Arrow and CSV files as blocks of rows (extra ``arrow``).

Rows are read in order, batch by batch, and sent to the workers as an Arrow stream of the
columns to tokenize. Memory holds one batch, for a file of any size.
"""

import codecs
import csv
import io
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import PurePath
from typing import Any

from mcore_data.preprocessing.blocks import Block, InputSource, open_local, open_raw
from mcore_data.preprocessing.compression import open_compressed

TABLES = (".parquet", ".pq", ".arrow", ".feather")
"""Lower-case suffixes of tables."""
CSVS = (".csv", ".tsv")
"""Lower-case suffixes of tables as text, which may be compressed as a whole."""
_PARQUET = TABLES[:2]
_LONGEST_CSV_ROW = 64 << 20
_CSV_ROWS = 1000
_ARROW_MAGIC = b"ARROW1"


def read_tables(
    source: InputSource, json_keys: Sequence[str], start: int, block_bytes: int
) -> Iterator[Block]:
    """Yield the blocks of a table, or of a part's row groups, from row ``start`` on."""
    if source.is_stream:
        raise ValueError(
            f"--input {source.path}: a table cannot be read from a pipe. Write it to a file."
        )
    try:
        import pyarrow
        from pyarrow import ipc
    except ImportError:
        raise ImportError(
            f"{source.path} needs the extra: pip install 'mcore-data[arrow]'."
        ) from None
    row = 0  # of the part
    try:
        with open_raw(source) as stored:
            if _is_csv(source):
                raw = stored
                batches, num_rows = _read_csv(source, stored, json_keys), 0
            else:
                raw = _BoundedFile(stored)
                batches, num_rows = _open_table(source, raw, json_keys, block_bytes)
            for batch in batches:
                batch.validate(
                    full=True
                )  # Arrow itself does not check offsets of damaged files
                skipped = min(max(start - row, 0), batch.num_rows)
                row += skipped
                columns = _project(source, batch.slice(skipped), json_keys)
                for piece in _cut(columns, block_bytes):
                    sink = pyarrow.BufferOutputStream()
                    with ipc.new_stream(sink, piece.schema) as stream:
                        stream.write_batch(piece)
                    end = row + piece.num_rows
                    done = source.num_bytes * end // num_rows if num_rows else raw.tell()
                    data = sink.getvalue().to_pybytes()
                    yield Block(source.path, "table", row, end, done, data)
                    row = end
    except (pyarrow.ArrowException, OSError) as error:
        raise RuntimeError(f"{source.path} is truncated or damaged: {error}") from error


class _BoundedFile:
    """A file whose reads are limited to its remaining bytes.

    Arrow requests as many bytes as a length field in the file gives, and Python allocates them
    before reading. A damaged length must not allocate more memory than the file has bytes.
    """

    closed = False

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._num_bytes = raw.seek(0, io.SEEK_END)
        raw.seek(0)
        self.seek, self.tell = raw.seek, raw.tell

    def read(self, num_bytes: int = -1) -> bytes:
        remaining = max(self._num_bytes - self._raw.tell(), 0)
        return self._raw.read(remaining if num_bytes < 0 else min(num_bytes, remaining))


def _open_table(
    source: InputSource, raw: _BoundedFile, json_keys: Sequence[str], block_bytes: int
) -> tuple[Iterator[Any], int]:
    """Return record batches with the columns ``json_keys``, and the table's rows or 0."""
    import pyarrow
    from pyarrow import parquet

    keys = list(json_keys)
    if is_parquet(source):
        file = parquet.ParquetFile(
            pyarrow.PythonFile(raw, mode="r"),
            buffer_size=1 << 20,
            page_checksum_verification=True,
        )
        _check_columns(source, file.schema_arrow.names, keys)
        numbers = [*range(file.num_row_groups)]
        if source.start or source.stop:
            stop, starts = source.stop or source.size, _starts(file.metadata)
            numbers = [i for i in numbers if source.start <= starts[i] < stop]
        groups = [file.metadata.row_group(i) for i in numbers]
        num_rows = sum(group.num_rows for group in groups)
        stored = sum(group.total_byte_size for group in groups)
        batch_rows = max(1, min(65_536, block_bytes * num_rows // max(stored, 1)))
        batches = file.iter_batches(batch_size=batch_rows, row_groups=numbers, columns=keys)
        return batches, num_rows
    return _read_arrow(source, raw, keys), 0


def is_parquet(source: InputSource) -> bool:
    """Whether a source is a Parquet file, by its name."""
    return source.path.lower().endswith(_PARQUET)


def row_group_starts(path: str) -> list[int]:
    """Return the first byte of each row group of a local Parquet file; 0 for the first.

    The list is empty if the row groups are not stored in their order.
    """
    from pyarrow import parquet

    with open_local(path) as stored:
        starts = _starts(parquet.read_metadata(stored))
    return starts if all(a < b for a, b in pairwise(starts)) else []


def count_rows(path: str, stop: int) -> int:
    """Count the rows of a local Parquet file's row groups before byte ``stop``."""
    from pyarrow import parquet

    with open_local(path) as stored:
        facts = parquet.read_metadata(stored)
    starts = _starts(facts)
    return sum(facts.row_group(i).num_rows for i, start in enumerate(starts) if start < stop)


def _starts(facts: Any) -> list[int]:
    starts = [0] * facts.num_row_groups
    for number in range(1, facts.num_row_groups):
        group = facts.row_group(number)
        columns = [group.column(i) for i in range(group.num_columns)]
        starts[number] = min(
            column.dictionary_page_offset or column.data_page_offset for column in columns
        )
    return starts


def _read_arrow(source: InputSource, raw: _BoundedFile, keys: list[str]) -> Iterator[Any]:
    """Yield the record batches of Arrow's stream or file format, which HF datasets writes.

    The file format is a stream between a magic word and a footer. Arrow's readers accept a
    stream that was truncated between two batches, and ignore bytes after the end marker; both
    are checked here.
    """
    import pyarrow
    from pyarrow import ipc

    has_footer = raw.read(8) == _ARROW_MAGIC + b"\0\0"
    raw.seek(8 if has_footer else 0)
    reader = ipc.open_stream(pyarrow.PythonFile(raw, mode="r"))
    _check_columns(source, reader.schema.names, keys)
    end = raw.tell()
    for batch in reader:
        yield batch
        end = raw.tell()
    # The end marker has 8 bytes, or 4 in files of Arrow before 0.15.
    if raw.tell() - end not in (4, 8):
        raise OSError("the last record batch is not followed by an end-of-stream marker")
    rest = raw.read()
    # The footer ends with its own length (4 bytes) and the magic word (6 bytes).
    footer_bytes = int.from_bytes(rest[-10:-6], "little") + 10
    if has_footer and not (rest.endswith(_ARROW_MAGIC) and len(rest) == footer_bytes):
        raise OSError("the record batches are not followed by exactly one footer")
    if not has_footer and rest:
        raise OSError(f"{len(rest)} bytes follow the end of the stream")


def _is_csv(source: InputSource) -> bool:
    return any(suffix in CSVS for suffix in PurePath(source.path.lower()).suffixes[-2:])


def _read_csv(source: InputSource, stored: Any, keys: Sequence[str]) -> Iterator[Any]:
    """Yield the record batches of a CSV file with a line of names; all values are text.

    Arrow's CSV reader accepts a file that ends inside a quoted value, so the rows are read by
    Python's reader in strict mode.
    """
    import pyarrow

    lines = codecs.iterdecode(open_compressed(stored, source.codec), "utf-8-sig")
    csv.field_size_limit(_LONGEST_CSV_ROW)
    delimiter = "\t" if ".tsv" in source.path.lower() else ","
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        missing = [key for key in keys if key not in names]
        if missing:
            raise ValueError(
                f"{source.path} has no column {missing[0]!r} (columns: {', '.join(names)}). "
                "Its first line must have the names of --json-keys."
            )
        indices = [names.index(key) for key in keys]
        rows = (_whole_row(row, len(names), reader.line_num) for row in reader if row)
        while batch := list(islice(rows, _CSV_ROWS)):
            columns = [
                pyarrow.array([row[i] for row in batch], pyarrow.string()) for i in indices
            ]
            yield pyarrow.RecordBatch.from_arrays(columns, names=list(keys))
    except csv.Error as error:
        raise OSError(f"line {reader.line_num}: {error}") from error
    except (UnicodeDecodeError, EOFError) as error:
        raise OSError(str(error)) from error


def _whole_row(row: list[str], num_columns: int, line: int) -> list[str]:
    """Return a row; raise ``OSError`` if it does not have one value for each column."""
    if len(row) != num_columns:
        raise OSError(f"line {line}: {len(row)} values in a row of {num_columns} columns")
    return row


def _project(source: InputSource, batch: Any, keys: Sequence[str]) -> Any:
    """Return the columns of the keys; the key data.text may be a field of the column data."""
    import pyarrow
    from pyarrow import compute

    columns = []
    for key in keys:
        name, *path = [key] if key in batch.schema.names else key.split(".")
        column = batch.column(name) if name in batch.schema.names else None
        try:
            columns.append(compute.struct_field(column, path) if path else column)  # pyrefly: ignore
        except (pyarrow.ArrowException, TypeError):
            raise ValueError(f"{source.path} has no column {key!r}.") from None
    return pyarrow.RecordBatch.from_arrays(columns, names=list(keys))


def _cut(batch: Any, block_bytes: int) -> Iterator[Any]:
    """Yield slices of a batch of about ``block_bytes`` each."""
    rows = max(1, batch.num_rows * block_bytes // max(batch.nbytes, 1))
    for first in range(0, batch.num_rows, rows):
        yield batch.slice(first, rows)


def _check_columns(source: InputSource, names: Sequence[str], json_keys: Sequence[str]) -> None:
    for key in json_keys:
        if key not in names and key.partition(".")[0] not in names:
            raise ValueError(
                f"{source.path} has no column {key!r} (columns: {', '.join(names)}). Name "
                "others with --json-keys."
            )
