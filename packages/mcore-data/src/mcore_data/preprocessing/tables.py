"""Parquet and Arrow files as blocks of rows (extra ``arrow``).

Rows are read in order, batch by batch, and travel to the workers as an Arrow stream of the
wanted columns; a file of any size takes the memory of one batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from mcore_data.preprocessing.blocks import Block, InputSource, open_raw


def read_tables(
    source: InputSource, json_keys: Sequence[str], start: int, block_bytes: int
) -> Iterator[Block]:
    """Blocks of a table from row ``start`` on."""
    if source.is_stream:
        raise ValueError(f"--input {source.path}: a table is read from a file, not a pipe.")
    try:
        import pyarrow
        from pyarrow import ipc
    except ImportError:
        raise ImportError(
            f"{source.path} needs the extra: pip install 'mcore-data[arrow]'."
        ) from None
    row = 0
    try:
        with open_raw(source) as raw:
            batches, num_rows = _open_table(source, raw, json_keys, block_bytes)
            for batch in batches:
                skipped = min(max(start - row, 0), batch.num_rows)
                row += skipped
                for piece in _cut(batch.slice(skipped), block_bytes):
                    sink = pyarrow.BufferOutputStream()
                    with ipc.new_stream(sink, piece.schema) as stream:
                        stream.write_batch(piece)
                    end = row + piece.num_rows
                    done = source.size * end // num_rows if num_rows else raw.tell()
                    data = sink.getvalue().to_pybytes()
                    yield Block(source.path, "table", row, end, done, data)
                    row = end
    except (pyarrow.ArrowException, OSError) as error:
        raise RuntimeError(f"{source.path} is truncated or damaged: {error}") from error


def _open_table(
    source: InputSource, raw: Any, json_keys: Sequence[str], block_bytes: int
) -> tuple[Iterator[Any], int]:
    """Record batches of the wanted columns, and the rows in all (0 if not known)."""
    from pyarrow import parquet

    keys = list(json_keys)
    if source.path.endswith(".parquet"):
        file = parquet.ParquetFile(raw, buffer_size=1 << 20)
        _check_columns(source, file.schema_arrow.names, keys)
        num_rows = file.metadata.num_rows
        stored = sum(
            file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)
        )
        batch_rows = max(1, min(65_536, block_bytes * num_rows // max(stored, 1)))
        return file.iter_batches(batch_size=batch_rows, columns=keys), num_rows
    reader = _open_arrow(raw)
    _check_columns(source, reader.schema.names, keys)
    return (batch.select(keys) for batch in _arrow_batches(reader)), 0


def _open_arrow(raw: Any) -> Any:
    """Open Arrow's file form, or its stream form, which Hugging Face datasets keeps."""
    import pyarrow
    from pyarrow import ipc

    if raw.read(6) == b"ARROW1":
        raw.seek(0)
        return ipc.open_file(raw)
    raw.seek(0)
    return ipc.open_stream(pyarrow.PythonFile(raw))


def _arrow_batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        return (reader.get_batch(i) for i in range(reader.num_record_batches))
    return iter(reader)


def _cut(batch: Any, block_bytes: int) -> Iterator[Any]:
    """Pieces of a batch of about ``block_bytes`` each."""
    rows = max(1, batch.num_rows * block_bytes // max(batch.nbytes, 1))
    for first in range(0, batch.num_rows, rows):
        yield batch.slice(first, rows)


def _check_columns(source: InputSource, names: Sequence[str], json_keys: Sequence[str]) -> None:
    for key in json_keys:
        if key not in names:
            raise ValueError(
                f"{source.path} has no column {key!r} (columns: {', '.join(names)}). Name "
                "others with --json-keys."
            )
