"""Every document leads back to the record that it was made from."""

import gzip
import json
from pathlib import Path

import pytest

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.indexed.index_format import CorruptDatasetError, origins_path
from mcore_data.indexed.inspection import verify_pair
from mcore_data.indexed.manifest import manifest_path, read_manifest, replace_json
from mcore_data.indexed.merging import merge_pairs
from mcore_data.indexed.origins import Origins
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter
from mcore_data.preprocessing.blocks import describe
from mcore_data.preprocessing.preprocessing import preprocess
from mcore_data.preprocessing.sources import count_records
from mcore_data.tracing.explaining import draw_origin

BAD = {0, 1, 9, 10, 40, 79}


def run(prefix, *inputs, on_progress=None, **options):
    options = {"on_bad_record": "skip", "json_keys": ("text", "title"), **options}
    config = PreprocessConfig(
        input=tuple(map(str, inputs)), output_prefix=str(prefix), **options
    )
    tokenizer = TokenizerConfig(tokenizer_type="ByteTokenizer")
    preprocess(config, tokenizer, on_progress, block_bytes=500)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Three inputs with bad lines at both ends and inside, and with empty texts."""
    folder = tmp_path_factory.mktemp("inputs")
    paths = [folder / "a.jsonl", folder / "b.jsonl.gz", folder / "c.jsonl"]
    for path in paths:
        records = [
            {"text": f"Nr {i} is here. In {path.name}. " * (i % 3), "title": f"{path} {i}"}
            for i in range(80)
        ]
        lines = ["oops" if i in BAD else json.dumps(record) for i, record in enumerate(records)]
        data = ("\n".join(lines) + "\n").encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return paths


def num_right(prefix, key="title"):
    """Documents that are what stands in the records that they come from; all must be."""
    dataset, origins = IndexedDataset(prefix), Origins(prefix)
    for number in range(dataset.num_documents):
        origin = origins.find(number)
        raw = Path(origin.path).read_bytes()
        lines = (gzip.decompress(raw) if origin.path.endswith(".gz") else raw).splitlines()
        before = count_records(origin.path, origin.kind, origin.start) if origin.start else 0
        record = json.loads(lines[before + origin.record - 1])
        borders = dataset.documents[number : number + 2].tolist()
        stored = "".join(bytes(one.tolist()).decode() for one in dataset[slice(*borders)])
        assert stored.replace(" ", "") == record[key].replace(" ", "")
    return dataset.num_documents


@pytest.mark.parametrize(
    "options",
    [{"workers": 1}, {"workers": 2, "split_sentences": True}, {"workers": 1, "partitions": 3}],
    ids=["whole", "sentences", "parts"],
)
def test_each_document_names_its_record(tmp_path, inputs, options):
    run(tmp_path / "out", *inputs, **options)
    level = "sentence" if "split_sentences" in options else "document"
    for key in ("text", "title"):
        prefix = tmp_path / f"out_{key}_{level}"
        assert num_right(prefix, key) == 3 * (80 - len(BAD))
        assert "checksums" in verify_pair(prefix)


def test_a_run_that_was_stopped_names_the_same_records(tmp_path, inputs):
    run(tmp_path / "whole", *inputs)
    cut, whole = (tmp_path / f"{name}_text_document" for name in ("cut", "whole"))
    for num_blocks in (4, 9, 1000):
        seen = []

        def stop(progress, seen=seen, last=num_blocks):
            seen.append(progress)
            if len(seen) == last or progress.done_bytes == progress.total_bytes:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", *inputs, on_progress=stop)
    # As a kill leaves it while files get their final names.
    Path(f"{cut}.origins.partial").rename(origins_path(cut))
    run(tmp_path / "cut", *inputs)
    assert origins_path(cut).read_bytes() == origins_path(whole).read_bytes()


def test_merged_pairs_name_the_records_of_all_inputs_or_say_that_they_know_none(
    tmp_path, inputs
):
    pairs = []
    for number, path in enumerate(inputs):
        run(tmp_path / f"{number}", path, json_keys=("title",))
        pairs.append(tmp_path / f"{number}_title_document")
    with IndexedWriter(tmp_path / "foreign", "uint16") as writer:
        writer.add_document([1, 2])
        writer.add_document([3])
    merge_pairs(pairs[:2], tmp_path / "two")
    merge_pairs([tmp_path / "two", pairs[2]], tmp_path / "all")
    assert num_right(tmp_path / "all") == 3 * (80 - len(BAD))
    merge_pairs([pairs[1], tmp_path / "foreign", pairs[2]], tmp_path / "mixed")
    good = 80 - len(BAD)
    origins = Origins(tmp_path / "mixed")
    assert [origins.find(number) for number in (good, good + 1)] == [None, None]
    first, last = origins.find(good - 1), origins.find(good + 2)
    assert describe(first.path, first.kind, first.record) == f"{inputs[1]}, line 79"
    assert describe(last.path, last.kind, last.record) == f"{inputs[2]}, line 3"
    assert Origins(tmp_path / "foreign").find(0) is None
    assert "input unknown" in draw_origin("", "foreign")


def test_origins_of_other_files_are_not_believed(tmp_path, inputs):
    run(tmp_path / "out", inputs[0], json_keys=("title",))
    prefix = tmp_path / "out_title_document"
    assert Origins(prefix).find(0).record == 3
    with IndexedWriter(tmp_path / "other", "uint16") as writer:
        writer.add_document([1, 2])
    for kind in ("bin", "idx"):  # as another program would write them
        (tmp_path / f"other.{kind}").replace(f"{prefix}.{kind}")
    assert Origins(prefix).find(0) is None
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_document([1, 2])
    assert not origins_path(prefix).exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data + bytes(8),  # no whole row
        lambda data: data[:8] + (10**12).to_bytes(8, "little") + data[16:],  # no such input
        lambda data: (10**12).to_bytes(8, "little") + data[8:] + data,  # documents that fall
    ],
)
def test_damaged_origins_are_an_error_and_no_wrong_record(tmp_path, inputs, damage):
    run(tmp_path / "out", *inputs, json_keys=("title",))
    prefix = tmp_path / "out_title_document"
    path = origins_path(prefix)
    path.write_bytes(damage(path.read_bytes()))
    facts = read_manifest(prefix)
    facts["files"][path.name]["bytes"] = path.stat().st_size
    replace_json(manifest_path(prefix), facts)
    with pytest.raises(CorruptDatasetError, match=r"out_title_document\.origins is damaged"):
        Origins(prefix)
