import bz2
import gzip
import io
import json
import lzma
import os
import sys
import threading

import pytest

from mcore_data.preprocessing.records import BadRecordError
from mcore_data.preprocessing.sources import divide, find_inputs, read_blocks, read_texts

TEXTS = ["one", "", "three \u4f60 words", "a line\nbreak", "x" * 500, "last"]
LINES = b"".join(json.dumps({"text": text, "id": 7}).encode() + b"\n" for text in TEXTS)


def texts_of(word, block_bytes=40, json_keys=("text",), **options):
    found = []
    for source in find_inputs([str(word)], **options):
        for block in read_blocks(source, json_keys, 0, block_bytes):
            parsed = block.parse(json_keys)
            assert parsed.bad == []
            found += parsed.columns[0]
    return found


def zstd(data):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


CODECS = [
    (".gz", gzip.compress),
    (".bz2", bz2.compress),
    (".xz", lzma.compress),
    (".zst", zstd),
]


@pytest.mark.parametrize(("suffix", "compress"), CODECS)
def test_compressed_lines_are_read_and_a_cut_file_is_named(tmp_path, suffix, compress):
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(compress(LINES) + compress(LINES))  # as cat joins files
    assert texts_of(path) == TEXTS * 2
    path.write_bytes(compress(LINES)[:-9])
    with pytest.raises(RuntimeError, match=r"in\.jsonl\..* is truncated or damaged"):
        texts_of(path)
    path.write_bytes(b"no archive at all")
    with pytest.raises(RuntimeError, match="truncated or damaged"):
        texts_of(path)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_reading_goes_on_from_any_block(tmp_path, suffix):
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(dict(CODECS)[suffix](LINES) if suffix else LINES)
    source = find_inputs([str(path)])[0]
    blocks = list(read_blocks(source, ("text",), 0, 40))
    assert len(blocks) > 3
    for number, block in enumerate(blocks):
        rest = list(read_blocks(source, ("text",), block.start, 40))
        assert [b.parse(("text",)) for b in rest] == [
            b.parse(("text",)) for b in blocks[number:]
        ]
    assert blocks[-1].done_bytes == path.stat().st_size


def test_a_text_file_is_one_document_or_one_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("first\nsecond\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"third"))
    (tmp_path / "c.txt").write_text("")
    assert texts_of(tmp_path) == ["first\nsecond\n", "third", ""]
    assert texts_of(tmp_path, text_lines=True) == ["first", "second", "third"]
    (tmp_path / "d.jsonl").write_bytes(LINES)
    assert texts_of(tmp_path) == TEXTS  # texts beside records are not data


def test_lines_come_from_standard_input(monkeypatch):
    class Stdin:
        buffer = io.BytesIO(LINES)

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert texts_of("-") == TEXTS


@pytest.mark.parametrize(
    ("name", "compress"), [("pipe", bytes), ("pipe.jsonl.gz", gzip.compress)]
)
def test_lines_come_through_a_named_pipe(tmp_path, name, compress):
    path = tmp_path / name
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(compress(LINES),))
    writer.start()
    assert texts_of(path) == TEXTS
    writer.join()
    with pytest.raises(ValueError, match=f"{name} cannot be divided"):
        divide(find_inputs([str(path)]), 0, 2)


def test_hidden_files_of_a_folder_are_no_inputs(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / ".a.jsonl.swp.jsonl").write_bytes(b"half written")
    assert texts_of(tmp_path) == TEXTS


def test_urls_are_read_through_fsspec_by_file_folder_and_pattern(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.pipe("/corpus/a.jsonl", LINES)
    store.pipe("/corpus/b.jsonl.gz", gzip.compress(LINES))
    store.pipe("/corpus/readme.txt", b"not data")
    try:
        assert texts_of("memory://corpus/a.jsonl") == TEXTS
        assert texts_of("memory://corpus") == TEXTS * 2
        assert texts_of("memory://corpus/*.gz") == TEXTS
        with pytest.raises(FileNotFoundError, match="memory://corpus/none"):
            texts_of("memory://corpus/none.jsonl")
    finally:
        store.rm("/corpus", recursive=True)


@pytest.mark.parametrize("form", ["parquet", "arrow file", "arrow stream"])
def test_tables_are_read_by_rows_and_go_on_from_any(tmp_path, form):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    table = arrow.table({"id": list(range(60)), "text": TEXTS * 10, "parts": [["a", "b"]] * 60})
    path = tmp_path / ("in.parquet" if form == "parquet" else "in.arrow")
    if form == "parquet":
        parquet.write_table(table, path, row_group_size=25)
    else:
        new = ipc.new_file if form == "arrow file" else ipc.new_stream
        with new(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=25)
    assert texts_of(path) == TEXTS * 10
    assert texts_of(path, json_keys=("parts",)) == [["a", "b"]] * 60
    source = find_inputs([str(path)])[0]
    blocks = list(read_blocks(source, ("text",), 0, 400))
    assert len(blocks) > 5
    for block in blocks:
        rest = [t for b in read_blocks(source, ("text",), block.start, 400)
                for t in b.parse(("text",)).columns[0]]  # fmt: skip
        assert rest == (TEXTS * 10)[block.start :]
    with pytest.raises(ValueError, match=r"no column 'body' \(columns: id, text, parts\)"):
        texts_of(path, json_keys=("body",))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RuntimeError, match="truncated or damaged"):
        texts_of(path)


def test_a_null_in_a_table_is_a_bad_row(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"text": ["a", None, "b"]}), tmp_path / "in.parquet")
    source = find_inputs([str(tmp_path / "in.parquet")])[0]
    with pytest.raises(BadRecordError, match=r"in\.parquet, row 2: key 'text' holds NoneType"):
        list(read_texts(source, ("text",)))


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [("zstandard", "a.jsonl.zst", "zstd"), ("pyarrow", "a.parquet", "arrow"),
     ("fsspec.core", "memory://a.jsonl", "remote"), ("s3fs", "s3://bucket/a.jsonl", "s3")],
)  # fmt: skip
def test_a_missing_extra_names_itself(tmp_path, monkeypatch, module, name, extra):
    monkeypatch.setitem(sys.modules, module, None)
    path = name if "://" in name else tmp_path / name
    if path != name:
        path.write_bytes(b"x")
    with pytest.raises(ImportError, match=rf"mcore-data\[{extra}\]"):
        texts_of(path)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 40])
def test_parts_together_are_the_whole_in_order(tmp_path, num_parts):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "c.jsonl").write_bytes(LINES * 3)
    sources = find_inputs([str(tmp_path)])
    found = []
    for part in range(num_parts):
        for source in divide(sources, part, num_parts):
            found += read_texts(source, ("text",))
    assert found == TEXTS * 5


def test_standard_input_cannot_be_divided():
    with pytest.raises(ValueError, match="standard input cannot be divided"):
        divide(find_inputs(["-"]), 0, 2)
