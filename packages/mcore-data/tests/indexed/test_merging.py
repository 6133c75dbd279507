"""What may be joined, and in which order, by the pairs' manifests."""

import json
import os
import shutil

import pytest

from mcore_data.cli import main
from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.indexed import merging
from mcore_data.indexed.index_format import CorruptDatasetError, bin_path
from mcore_data.indexed.inspection import find_pairs, verify_pair
from mcore_data.indexed.manifest import manifest_path, read_manifest
from mcore_data.indexed.merging import copy_bins, merge_pairs
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter
from mcore_data.preprocessing.preprocessing import preprocess

BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")


def run(prefix, *inputs, tokenizer=BYTES, **options):
    config = PreprocessConfig(
        input=tuple(map(str, inputs)), output_prefix=str(prefix), **options
    )
    return preprocess(config, tokenizer, block_bytes=300).prefixes


def make_parts(folder, corpus, num_parts, **options):
    """Make all parts as their hosts do, and return their prefixes by number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_parts):
        run(folder / "p", corpus, corpus, partitions=num_parts, partition=number, **options)
    return [folder / f"p_{number}_text_document" for number in range(num_parts)]


def content(prefix):
    return [prefix.with_name(f"{prefix.name}.{kind}").read_bytes() for kind in ("bin", "idx")]


@pytest.fixture(scope="module")
def twelve(corpus, tmp_path_factory):
    """The pairs of twelve parts, and of the same corpus without parts."""
    folder = tmp_path_factory.mktemp("twelve")
    whole = run(folder / "whole", corpus, corpus)["text"]
    return make_parts(folder / "parts", corpus, 12), whole


def test_twelve_parts_are_joined_by_number_in_any_order(twelve, tmp_path, capsys):
    parts, whole = twelve
    words = ["merge", "--input", str(parts[0].parent), "--output-prefix", str(tmp_path / "all")]
    assert main(words) == 0
    assert "12 pairs, 120 documents" in capsys.readouterr().out
    assert content(tmp_path / "all") == content(whole)
    assert main(words) == 0  # the same command again
    merge_pairs([*parts[7:], *parts[:7]], tmp_path / "turned")
    assert content(tmp_path / "turned") == content(whole)
    assert "parts" not in read_manifest(tmp_path / "all")
    assert "checksums as in its manifest" in verify_pair(tmp_path / "all")


def test_a_missing_part_is_named_and_allowed_only_by_its_flag(twelve, tmp_path, capsys, caplog):
    parts, whole = twelve
    some = [str(part) for part in (*parts[:3], *parts[4:11])]
    words = ["merge", "--output-prefix", str(tmp_path / "some"), "--input", *some]
    assert main(words) == 2
    assert "2 of 12 parts are missing: 3, 11 (by the manifests" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
    assert main([*words, "--allow-missing"]) == 0
    assert "2 of 12 parts are missing: 3, 11" in caplog.text
    assert read_manifest(tmp_path / "some")["parts"]["numbers"] == [0, 1, 2, *range(4, 11)]
    with pytest.raises(ValueError, match="cannot be ordered"):
        merge_pairs([tmp_path / "some", parts[3], parts[11]], tmp_path / "all")
    with pytest.raises(
        ValueError, match=r"some and .*p_4_text_document both hold part 4 of 12"
    ):
        merge_pairs([tmp_path / "some", parts[4]], tmp_path / "all")
    merge_pairs(parts[:4], tmp_path / "first", allow_missing=True)
    merge_pairs([*parts[4:], tmp_path / "first"], tmp_path / "all")  # joined in two steps
    assert content(tmp_path / "all") == content(whole)


def test_an_input_that_changed_between_two_parts_is_warned_of(corpus, tmp_path, caplog):
    text = tmp_path / "corpus.jsonl"
    text.write_bytes(corpus.read_bytes())
    first = make_parts(tmp_path / "first", text, 3)
    merge_pairs(first, tmp_path / "sound")
    assert "different modification times" not in caplog.text
    os.utime(text, (1, 1))  # other content of the same size would look the same
    second = make_parts(tmp_path / "second", text, 3)
    merge_pairs([first[0], *second[1:]], tmp_path / "mixed")
    warning = f"{text} has different modification times in the manifests of {first[0]} and"
    assert f"{warning} {second[1]}" in caplog.text


def test_parts_of_two_divisions_are_not_joined(twelve, corpus, tmp_path):
    parts, whole = twelve
    three = make_parts(tmp_path / "three", corpus, 3)
    with pytest.raises(ValueError, match=r"one of 3 parts\) and .* \(one of 12\) are of diff"):
        merge_pairs([three[0], *parts[4:]], tmp_path / "mixed")
    longer = tmp_path / "corpus.jsonl"
    longer.write_bytes(corpus.read_bytes() * 2)
    others = make_parts(tmp_path / "others", longer, 3)
    with pytest.raises(ValueError, match=r"or their inputs changed in between"):
        merge_pairs([*three[:2], others[2]], tmp_path / "mixed")
    with pytest.raises(
        ValueError, match=r"is a part of a corpus, and .*whole_text_document is"
    ):
        merge_pairs([*three, whole], tmp_path / "mixed")
    shutil.copytree(tmp_path / "three", tmp_path / "copy")
    with pytest.raises(ValueError, match=r"both hold part 0 of 3: give each part once"):
        merge_pairs([*three, tmp_path / "copy" / three[0].name], tmp_path / "mixed")
    assert not [*tmp_path.glob("mixed*")]


def test_parts_of_a_folder_that_grew_are_made_anew(tmp_path):
    """Part 0 holds the same file before and after, but belongs to another division."""
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / f"{name}.txt").write_text(name * 100)
    first = run(tmp_path / "p", tmp_path / "in", partitions=2, partition=0)["text"]
    before = read_manifest(first)
    (tmp_path / "in" / "c.txt").write_text("c")
    run(tmp_path / "p", tmp_path / "in", partitions=2, partition=0, overwrite=True)
    after = read_manifest(first)
    assert before["inputs"] == after["inputs"]
    assert before["parts"]["corpus"] != after["parts"]["corpus"]


OTHER_SETTINGS = {
    "tokenizer": {"tokenizer": TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=999)},
    "--json-keys": {"json_keys": ("title",)},
    "--append-eod": {"append_eod": True},
    "--sentence-splitter": {"split_sentences": True, "sentence_splitter": "rules"},
    "--keep-newlines": {
        "split_sentences": True, "sentence_splitter": "rules", "keep_newlines": True
    },
}  # fmt: skip


@pytest.mark.parametrize("option", OTHER_SETTINGS)
def test_pairs_of_two_settings_that_decide_ids_are_not_joined(tmp_path, option):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1 2", "title": "3"}\n')
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "4 5", "title": "6"}\n')
    plain = OTHER_SETTINGS["--sentence-splitter"] if option == "--keep-newlines" else {}
    (a,) = run(tmp_path / "a", source, **plain).values()
    (b,) = run(tmp_path / "b", other, **OTHER_SETTINGS[option]).values()
    with pytest.raises(ValueError, match=f"different {option}: .*{a.name} .* and .*{b.name} "):
        merge_pairs([a, b], tmp_path / "all")
    (same,) = run(tmp_path / "same", other, **plain).values()
    assert merge_pairs([a, same], tmp_path / "all").num_documents == 2


def test_a_pair_and_what_was_joined_from_it_are_not_joined_again(corpus, tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(corpus.read_bytes())
    a = run(tmp_path / "in" / "a", corpus)["text"]
    b = run(tmp_path / "in" / "b", copy)["text"]
    merge_pairs([a, b], tmp_path / "in" / "both")
    with pytest.raises(ValueError, match=r"both hold .*, so its documents would occur twice"):
        merge_pairs(find_pairs(tmp_path / "in"), tmp_path / "all")
    with pytest.raises(ValueError, match="a_text_document is given twice"):
        merge_pairs([a, a], tmp_path / "all")
    assert find_pairs(tmp_path / "in", tmp_path / "in" / "both") == [str(a), str(b)]


def test_pairs_without_manifests_are_found_in_sub_folders_and_ordered_by_numbers(
    tmp_path, caplog
):
    names = ["p_0", "p_2", "p_10", "q/p_1"]
    for number, name in enumerate(names):
        with IndexedWriter(tmp_path / "in" / name, "uint16") as writer:
            writer.add_document([number])
    found = find_pairs(tmp_path / "in")
    assert found == [f"{tmp_path}/in/{name}" for name in names]
    merge_pairs(found, tmp_path / "all")
    assert [tokens.tolist() for tokens in IndexedDataset(tmp_path / "all")] == [
        [0],
        [1],
        [2],
        [3],
    ]
    assert "4 of 4 pairs have no manifest, so that only their dtype is compared" in caplog.text
    with pytest.raises(ValueError, match=r"p_2 is given twice"):
        merge_pairs(
            [found[1], found[0], f"{tmp_path}/in/p_2"], tmp_path / "all", overwrite=True
        )
    (tmp_path / "in" / "p_3.bin.partial").write_bytes(b"")  # its writing was interrupted
    with pytest.raises(ValueError, match=r"p_3\.bin is missing: p_3 is not a complete pair"):
        find_pairs(tmp_path / "in")


def test_manifests_of_format_1_are_joined_by_what_they_hold(corpus, tmp_path, caplog):
    (tmp_path / "copy.jsonl").write_bytes(corpus.read_bytes())
    (tmp_path / "new.jsonl").write_bytes(corpus.read_bytes())
    pairs = [run(tmp_path / "a", corpus)["text"],
             run(tmp_path / "b", tmp_path / "copy.jsonl")["text"]]  # fmt: skip
    for pair in pairs:
        facts = read_manifest(pair) | {"format": 1}
        for name in ("keep_newlines", "left_out", "sha256"):
            del facts[name]
        manifest_path(pair).write_text(json.dumps(facts))
    assert merge_pairs(pairs, tmp_path / "all").num_documents == 120
    assert "is not recorded" not in caplog.text
    # The manifest of a new pair has settings that those of format 1 do not record.
    newer = run(tmp_path / "c", tmp_path / "new.jsonl")["text"]
    assert merge_pairs([*pairs, newer], tmp_path / "more").num_documents == 180
    assert (
        f"--keep-newlines is not recorded in the manifest of {pairs[0]}, {pairs[1]}: assuming "
        f"that it is as in {newer}." in caplog.text
    )


def test_a_killed_copy_continues_with_the_pairs_that_are_missing(twelve, tmp_path, monkeypatch):
    parts, whole = twelve
    bins = [
        (bin_path(part), read_manifest(part)["files"][f"{part.name}.bin"]) for part in parts
    ]
    target = tmp_path / "whole.bin.copied"
    monkeypatch.setattr(merging, "_SAVED_EVERY_S", -1.0)
    copied = []

    def copy(path, *rest):
        if len(copied) == 7:
            raise OSError("killed")
        copied.append(path)
        return original(path, *rest)

    original = merging._copy_bin
    monkeypatch.setattr(merging, "_copy_bin", copy)
    with pytest.raises(OSError, match="killed"):
        copy_bins(bins, target, 1)
    done = set(copied)
    copied.clear()
    monkeypatch.setattr(
        merging, "_copy_bin", lambda *rest: copied.append(rest[0]) or original(*rest)
    )
    checksum = copy_bins(bins, target, 3)
    assert set(copied) == {path for path, _ in bins} - done
    assert target.read_bytes() == content(whole)[0]
    assert checksum == read_manifest(whole)["files"][f"{whole.name}.bin"]["sha256"]
    bins[3] = (bins[3][0], {**bins[3][1], "sha256": "0" * 64})
    with pytest.raises(CorruptDatasetError, match="does not have the checksum"):
        copy_bins(bins, tmp_path / "other", 2)
