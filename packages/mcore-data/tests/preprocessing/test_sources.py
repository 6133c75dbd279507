import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import re
import struct
import sys
import threading
import tracemalloc

import pytest

from mcore_data.preprocessing.records import BadRecordError
from mcore_data.preprocessing.sources import (
    Corpus,
    divide,
    find_inputs,
    read_blocks,
    read_texts,
    report_left_out,
)

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
    """As its command-line program does: with a checksum."""
    return pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(data)


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


@pytest.mark.parametrize(("suffix", "compress"), CODECS)
def test_a_compressed_file_ends_with_a_whole_member_or_is_an_error(tmp_path, suffix, compress):
    path = tmp_path / f"in.jsonl{suffix.upper()}"
    member = compress(LINES)

    def read_damaged(data):
        path.write_bytes(data)
        with pytest.raises(RuntimeError, match="is truncated or damaged"):
            texts_of(path)

    read_damaged(b"")
    for tail in (b"x", b"junk" * 5, b"\0", b"\0" * 6, member[:1], member[:9], member[:-1]):
        read_damaged(member + tail)
    for at in range(0, len(member) + 1, 7):  # a later member that is damaged, and a cut one
        read_damaged(member + member[:at] + b"\xff" * 40 + member[at + 40 :])
        if 0 < at < len(member):
            read_damaged(member + member[:at])


@pytest.mark.parametrize(("suffix", "compress"), CODECS)
def test_a_flipped_bit_of_a_compressed_file_never_changes_its_texts(tmp_path, suffix, compress):
    path = tmp_path / f"in.jsonl{suffix}"
    whole = compress(LINES) * 2
    num_seen = 0
    for bit in range(0, 8 * len(whole), 37):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            assert texts_of(path) == TEXTS * 2  # a flip of gzip's time or name
        except RuntimeError:
            num_seen += 1
    assert num_seen > 8 * len(whole) / 37 * 0.9


def test_padding_of_xz_and_skippable_frames_of_zstandard_hide_no_later_data(tmp_path):
    path = tmp_path / "in.jsonl.xz"
    stream = lzma.compress(LINES)
    path.write_bytes(stream + bytes(8) + stream + bytes(4 * 20_000))
    assert texts_of(path) == TEXTS * 2
    path.write_bytes(stream + bytes(3) + stream)
    with pytest.raises(RuntimeError, match="3 zero bytes follow an xz stream"):
        texts_of(path)
    frame, skippable = zstd(LINES), b"\x50\x2a\x4d\x18\x05\0\0\0seeks"
    path = tmp_path / "in.jsonl.zstd"
    path.write_bytes(skippable + frame + skippable + frame + skippable)
    assert texts_of(path) == TEXTS * 2
    path.write_bytes(frame + skippable[:-2])
    with pytest.raises(RuntimeError, match="ends within its Zstandard data"):
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
    with pytest.raises(ValueError, match=f"{name} is a stream and cannot be divided"):
        divide(Corpus(find_inputs([str(path)])), 2)


def test_a_folder_gives_all_records_below_it_and_names_what_it_leaves_out(
    tmp_path, tmp_path_factory, caplog
):
    taken = ["B.JSONL", "a.ndjson", "c.jsonl.ZSTD", "d.Json.GZ", "deep/er/e.jsonl", "f.jl"]
    left_out = [".hidden.jsonl", ".git/", "deep/notes.txt", "deep/.x", "g.csv", "h.jsonl.lz4",
                "out.journal.json", "out_text_document.manifest.json", "broken.jsonl",
                "loop/"]  # fmt: skip
    for name in taken:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        compress = dict(CODECS).get(path.suffix.lower().replace("zstd", "zst"), bytes)
        path.write_bytes(compress(json.dumps({"text": name}).encode() + b"\n"))
    for name in left_out[:-2]:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text("{}")
        else:
            (tmp_path / name).write_text("x")
    (tmp_path / "broken.jsonl").symlink_to(tmp_path / "none")
    (tmp_path / "loop").symlink_to(tmp_path)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "e.jsonl").write_text('{"text": "link/e.jsonl"}')
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "link2").symlink_to(elsewhere)
    taken.append("link/e.jsonl")
    left_out.append("link2/")
    assert texts_of(tmp_path) == sorted(taken)
    named = report_left_out([str(tmp_path)])
    assert named == sorted(f"{tmp_path}/{name}" for name in left_out)
    for name in left_out:
        assert f"{tmp_path}/{name}" in caplog.text
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "notes.log").write_text("x")
    with pytest.raises(
        FileNotFoundError, match=r"pattern with inputs\. Left out: 1 file: .*notes\.log"
    ):
        find_inputs([str(tmp_path / "only")])


def test_a_pattern_names_the_folders_that_it_matches_and_does_not_read(tmp_path):
    for name in ("a.jsonl", "sub/b.jsonl", "sub/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(LINES)
    assert texts_of(tmp_path / "*") == TEXTS
    assert report_left_out([f"{tmp_path}/*"]) == [f"{tmp_path}/sub"]
    assert texts_of(f"{tmp_path}/**") == TEXTS * 3
    assert report_left_out([f"{tmp_path}/**"]) == []
    assert report_left_out(["-", str(tmp_path / "a.jsonl")]) == []


def test_urls_are_read_through_fsspec_by_file_folder_and_pattern(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.pipe("/corpus/a.jsonl", LINES)
    store.pipe("/corpus/b.jsonl.gz", gzip.compress(LINES))
    store.pipe("/corpus/readme.txt", b"not data")
    store.pipe("/corpus/.git/index.json", b"hidden")
    store.pipe("/other/sub/c.JSONL", LINES)
    try:
        assert texts_of("memory://other") == TEXTS
        assert texts_of("memory://*/a.jsonl") == TEXTS
        assert report_left_out(["memory://corpus"]) == [
            "memory:///corpus/.git/index.json", "memory:///corpus/readme.txt"
        ]  # fmt: skip
        assert report_left_out(["memory://other/*"]) == ["memory:///other/sub"]
        assert texts_of("memory://corpus/a.jsonl") == TEXTS
        assert texts_of("memory://corpus") == TEXTS * 2
        assert texts_of("memory://corpus/*.gz") == TEXTS
        with pytest.raises(FileNotFoundError, match="memory://corpus/none"):
            texts_of("memory://corpus/none.jsonl")
    finally:
        store.rm("/corpus", recursive=True)
        store.rm("/other", recursive=True)


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


@pytest.mark.parametrize("form", ["file", "stream"])
def test_an_arrow_file_that_does_not_end_as_its_form_does_is_an_error(tmp_path, form):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc

    table = arrow.table({"text": ["a", "b", "c"], "n": arrow.array([1, 2, -1], arrow.int32())})
    path = tmp_path / "in.ARROW"
    sink = io.BytesIO()
    with (ipc.new_file if form == "file" else ipc.new_stream)(sink, table.schema) as out:
        borders = [sink.tell()]
        for _ in range(3):
            out.write_table(table)
            borders.append(sink.tell())
    whole = sink.getvalue()
    path.write_bytes(whole)
    assert texts_of(path) == ["a", "b", "c"] * 3
    damages = [whole[:at] for at in range(1, len(whole), 9)]
    damages += [whole[:border] for border in borders]
    damages += [whole + whole, whole + b"x", whole + bytes(8), b""]
    for data in damages:
        path.write_bytes(data)
        with pytest.raises(RuntimeError, match="truncated or damaged"):
            texts_of(path)


def test_lengths_and_offsets_in_an_arrow_file_are_bounded_by_the_file(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc

    table = arrow.table({"text": ["abc"] * 10})
    sink = io.BytesIO()
    with ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    whole = sink.getvalue()
    path = tmp_path / "in.arrow"
    tracemalloc.start()
    for at in range(0, len(whole) - 8, 4):
        path.write_bytes(whole[:at] + struct.pack("<q", 1 << 36) + whole[at + 8 :])
        with contextlib.suppress(RuntimeError, ValueError):
            texts_of(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_a_flipped_bit_of_a_parquet_page_with_a_checksum_is_seen(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"text number {i}" for i in range(400)]
    path = tmp_path / "in.PARQUET"
    plain = {"compression": "none", "use_dictionary": False}
    parquet.write_table(arrow.table({"text": texts}), path, write_page_checksum=True, **plain)
    data = bytearray(path.read_bytes())
    assert texts_of(path) == texts
    data[data.index(b"text number 250") + 13] ^= 4
    path.write_bytes(data)
    with pytest.raises(RuntimeError, match="truncated or damaged"):
        texts_of(path)


def test_a_table_that_is_compressed_as_a_whole_is_refused(tmp_path):
    (tmp_path / "in.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with pytest.raises(
        ValueError, match=r"in\.parquet\.gz: Parquet and Arrow files are compressed internally"
    ):
        find_inputs([str(tmp_path)])


def test_a_null_in_a_table_is_a_bad_row(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"text": ["a", None, "b"]}), tmp_path / "in.parquet")
    source = find_inputs([str(tmp_path / "in.parquet")])[0]
    with pytest.raises(BadRecordError, match=r"in\.parquet, row 2: key 'text' holds NoneType"):
        list(read_texts(source, ("text",)))


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [("zstandard", "a.jsonl.zst", "data[zstd]"), ("pyarrow", "a.parquet", "data[arrow]"),
     ("fsspec.core", "memory://a.jsonl", "base[remote]"),
     ("s3fs", "s3://bucket/a.jsonl", "base[s3]")],
)  # fmt: skip
def test_a_missing_extra_names_itself(tmp_path, monkeypatch, module, name, extra):
    monkeypatch.setitem(sys.modules, module, None)
    path = name if "://" in name else tmp_path / name
    if path != name:
        path.write_bytes(b"x")
    with pytest.raises(ImportError, match=re.escape(f"mcore-{extra}")):
        texts_of(path)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 40])
def test_parts_together_are_the_whole_in_order(tmp_path, num_parts):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "c.jsonl").write_bytes(LINES * 3)
    corpus = Corpus(find_inputs([str(tmp_path)]))
    found = []
    for part in divide(corpus, num_parts):
        for source in part.sources:
            found += read_texts(source, ("text",))
    assert found == TEXTS * 5


def test_standard_input_cannot_be_divided():
    with pytest.raises(ValueError, match="standard input is a stream and cannot be divided"):
        divide(Corpus(find_inputs(["-"])), 2)


def page(kind, body, uri=""):
    data = body.encode()
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {uri}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data + b"\r\n\r\n"


def test_pages_of_wet_files_are_documents_and_a_cut_one_is_named(tmp_path):
    pages = [page("conversion", text, f"http://host/{i}") for i, text in enumerate(TEXTS)]
    path = tmp_path / "c.warc.wet.gz"
    data = b"".join(map(gzip.compress, [page("warcinfo", "software: x"), *pages]))
    path.write_bytes(data)
    assert texts_of(path) == TEXTS
    (source,) = find_inputs([str(path)])
    blocks = list(read_blocks(source, ("text",), 0, 40))
    for number, block in enumerate(blocks):  # reading continues at any block
        assert list(read_blocks(source, ("text",), block.start, 40)) == blocks[number:]
    kept = [
        line for block in blocks for line in block.parse(("text",), ("WARC-Target-URI",)).kept
    ]
    assert kept[5] == b'["http://host/5"]\n'
    (tmp_path / "c.wet").write_bytes(b"".join(pages)[:-3])
    with pytest.raises(RuntimeError, match=r"c\.wet is truncated or damaged: the record at"):
        texts_of(tmp_path / "c.wet")
    (tmp_path / "c.wet").write_bytes(page("response", "<html>"))
    with pytest.raises(ValueError, match="holds raw web pages"):
        texts_of(tmp_path / "c.wet")


def test_nested_keys_of_lines_tables_and_csv_give_the_same_texts_and_kept_values(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    rows = [{"data": {"text": text}, "id": f"{i}"} for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    flat = pyarrow.table({"id": [row["id"] for row in rows], "data.text": TEXTS})
    csv.write_csv(flat, tmp_path / "a.csv")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    keys = ("data.text", "id")
    for name in ("a.jsonl", "a.parquet", "a.csv", "b.csv.gz"):
        (source,) = find_inputs([str(tmp_path / name)])
        parsed = [block.parse(keys[:1], keys[1:]) for block in read_blocks(source, keys, 0, 40)]
        assert [text for part in parsed for text in part.columns[0]] == TEXTS, name
        kept = [line for part in parsed for line in part.kept]
        assert kept == [b'["%d"]\n' % i for i in range(len(TEXTS))]
        missing = ("data.body",)
        with pytest.raises((ValueError, BadRecordError), match=r"data\.body"):
            list(read_texts(source, missing))


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ('text,id\n"open,1\nmore,2\n', "unexpected end of data"),
        ('text\n"whole"\n"cut in a value\nand a line\n', "line 4: unexpected end of data"),
        ('id,text\n1,"cut in the last column', "unexpected end of data"),
        ('text\n"a \\" b"\nc\n', "line 2: ',' expected after '\"'"),
        ("text,id\na,1\nb\n", "line 3: 1 values in a row of 2 columns"),
        ("text\n\udcff\n", "can't decode byte 0xff"),
    ],
)
def test_a_csv_file_that_is_cut_or_damaged_is_refused(rows, fault, tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "cut.csv").write_text(rows, errors="surrogateescape")
    with pytest.raises(RuntimeError, match=r"cut\.csv is truncated or damaged") as caught:
        texts_of(tmp_path / "cut.csv")
    assert fault in str(caught.value)
    (tmp_path / "cut.tsv.gz").write_bytes(gzip.compress(b"text\nwhole\n")[:-5])
    with pytest.raises(RuntimeError, match=r"cut\.tsv\.gz is truncated .* its gzip data"):
        texts_of(tmp_path / "cut.tsv.gz")
