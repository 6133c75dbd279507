import json

import numpy as np
import pytest
from forks import exit_code, fork

from mcore_data.indexed.index_format import CorruptDatasetError
from mcore_data.indexed.inspection import quick_check, verify_pair
from mcore_data.indexed.manifest import (
    manifest_path,
    read_manifest,
    replace_json,
    write_manifest,
)
from mcore_data.indexed.merging import merge_pairs
from mcore_data.indexed.output_lock import only_writer
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter


def make(prefix, documents, **facts):
    with IndexedWriter(prefix, "uint16", checksum=True) as writer:
        for tokens in documents:
            writer.add_document(tokens)
        checksum = writer.finalize()
    count = sum(map(len, documents))
    basis = {"documents": len(documents), "tokens": count, "bin_sha256": checksum}
    write_manifest(prefix, {**basis, **facts})
    return prefix


@pytest.fixture
def pair(tmp_path):
    return make(
        tmp_path / "x", [[1, 2, 3], [], [4]], tokenizer={"sha256": "a", "vocab_size": 5}
    )


def test_a_sound_pair_is_verified_with_checksums_or_says_that_it_has_none(pair):
    assert "3 documents, 4 tokens, largest id 4, checksums as in its" in verify_pair(pair)
    manifest_path(pair).unlink()
    assert "no manifest" in verify_pair(pair)


def test_a_look_at_a_pair_says_what_its_index_and_manifest_tell(pair):
    fits = "index, pointers and sizes fit"
    assert quick_check(pair) == f"{fits}, also to the manifest"
    facts = read_manifest(pair)
    more = {"tokenizer": {"engine": "words"}, "verification": {"mode": "full"}}
    replace_json(manifest_path(pair), facts | more)
    assert quick_check(pair).endswith("also to the manifest; encoded by words, verified: full")
    facts["files"]["x.bin"]["bytes"] += 1
    replace_json(manifest_path(pair), facts)
    assert quick_check(pair) == f"{fits}, but the sizes in the manifest differ"
    manifest_path(pair).unlink()
    assert quick_check(pair) == f"{fits}; no manifest"


def test_one_flipped_bit_does_not_verify(pair):
    path = pair.with_suffix(".bin")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # token 260: nothing but the checksum can tell
    path.write_bytes(data)
    with pytest.raises(CorruptDatasetError, match=r"x\.bin does not have the checksum"):
        verify_pair(pair)


def test_other_counts_sizes_and_vocabularies_do_not_verify(pair, tmp_path):
    facts = read_manifest(pair)

    def with_facts(**changed):
        replace_json(manifest_path(pair), {**facts, **changed})

    with_facts(documents=4)
    with pytest.raises(CorruptDatasetError, match="has 3 documents, and 4 by its manifest"):
        verify_pair(pair)
    with_facts(tokenizer={"vocab_size": 4})
    with pytest.raises(CorruptDatasetError, match=r"holds id 4, but .* has 4 ids"):
        verify_pair(pair)
    with_facts(dtype="int32")
    with pytest.raises(
        CorruptDatasetError, match="has uint16 dtype, and int32 by its manifest"
    ):
        verify_pair(pair)
    with_facts(files={**facts["files"], "x.bin": {"bytes": 9, "sha256": ""}})
    with pytest.raises(CorruptDatasetError, match="has 8 bytes, and 9 by its manifest"):
        verify_pair(pair)
    manifest_path(pair).write_text("{}")
    with pytest.raises(CorruptDatasetError, match="damaged or of a later version"):
        read_manifest(pair)


def damages(data):
    """Truncations, flipped bits, and JSON whose values were deleted, swapped or changed."""
    yield from (data[:length] for length in range(0, len(data), 11))
    for bit in range(0, 8 * len(data), 19):
        yield data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
    yield from (data[:-1], data + b"\n", data.replace(b"  ", b" "))
    yield from (b"[]", b"null", b"[" * 9999)
    lines = data.splitlines(keepends=True)
    yield from (b"".join(lines[:at] + lines[at + 1 :]) for at in range(len(lines)))

    def dump(change):
        facts = json.loads(data)
        change(facts)
        return (json.dumps(facts, indent=2) + "\n").encode()

    facts = json.loads(data)
    for name in facts:
        yield dump(lambda facts, name=name: facts.pop(name))
        for other in facts:
            if facts[other] != facts[name]:
                swapped = {name: facts[other], other: facts[name]}
                yield dump(lambda facts, swapped=swapped: facts.update(swapped))
        for value in (None, 1, -1, "", [], {}, {"sha256": "a"}):
            if value != facts[name]:
                yield dump(lambda facts, one={name: value}: facts.update(one))
    for kind in ("bin", "idx"):
        yield dump(lambda facts, kind=kind: facts["files"].pop(f"x.{kind}"))
    yield dump(lambda facts: facts.update(format=1))


def test_every_damage_to_a_manifest_is_found_by_verify(pair):
    data = manifest_path(pair).read_bytes()
    old = without_digest(pair)
    for number, damage in enumerate(damages(data)):
        manifest_path(pair).write_bytes(damage)
        check = verify_pair if number % 10 == 0 else read_manifest  # verify reads it first
        with pytest.raises(CorruptDatasetError, match=r"x\.manifest\.json is damaged"):
            check(pair)
    manifest_path(pair).write_bytes(old)
    assert verify_pair(pair).endswith("as in its manifest, which has no digest of its own")


def without_digest(pair):
    """The manifest of a pair as version 0.1.0 wrote it before there were digests."""
    facts = {**read_manifest(pair), "format": 1}
    del facts["sha256"]
    return json.dumps(facts, indent=2, ensure_ascii=False).encode()


def test_a_damaged_manifest_without_a_digest_is_an_error_or_verifies_but_never_a_traceback(
    pair,
):
    found = []
    for damage in damages(without_digest(pair)):
        manifest_path(pair).write_bytes(damage)
        try:
            assert "has no digest of its own" in verify_pair(pair)
            found.append(False)
        except CorruptDatasetError:
            found.append(True)
    assert 0.6 * len(found) < sum(found) < len(found)  # as far as it can be seen


def test_a_merged_pair_names_its_parts_and_sums_their_counts(pair, tmp_path):
    other = make(tmp_path / "y", [[0]], tokenizer={"sha256": "a", "vocab_size": 5})
    merged = merge_pairs([pair, other], tmp_path / "z")
    facts = read_manifest(tmp_path / "z")
    assert (facts["documents"], facts["tokens"]) == (4, 5) == (4, merged.num_tokens)
    assert [one["pair"] for one in facts["merged_from"]] == ["x", "y"]
    assert facts["tokenizer"] == {"sha256": "a", "vocab_size": 5}
    assert "checksums" in verify_pair(tmp_path / "z")


def test_a_merge_replaces_what_other_files_made_only_when_asked(pair, tmp_path):
    other = make(tmp_path / "y", [[0]], tokenizer={"sha256": "a", "vocab_size": 5})
    merge_pairs([pair], tmp_path / "z")
    merge_pairs([pair], tmp_path / "z")
    before = {path.name: path.read_bytes() for path in tmp_path.glob("z*")}
    for target in (tmp_path / "z", other):  # joined from others, and not joined
        with pytest.raises(ValueError, match=rf"{target.name}\.bin exists.*--overwrite"):
            merge_pairs([other, pair], target)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("z*")} == before
    merge_pairs([other, pair], tmp_path / "z", overwrite=True)
    assert len(read_manifest(tmp_path / "z")["merged_from"]) == 2
    assert "checksums" in verify_pair(tmp_path / "z")
    manifest_path(pair).unlink()
    manifest_path(other).unlink()
    merge_pairs([pair, other], tmp_path / "n")
    with pytest.raises(ValueError, match="have no manifests to compare"):
        merge_pairs([pair, other], tmp_path / "n")
    with pytest.raises(ValueError, match="no pairs to join"):
        merge_pairs([], tmp_path / "n")


def test_two_merges_do_not_write_one_prefix(pair, tmp_path):
    path = tmp_path / "z.lock"
    with only_writer(tmp_path / "z"):
        assert exit_code(fork(lambda: refused(pair, path))) == 0


def refused(pair, path):
    with pytest.raises(ValueError, match="another process is writing"):
        merge_pairs([pair], path.with_suffix(""))


def test_pairs_of_two_tokenizers_or_damaged_ones_are_not_merged(pair, tmp_path):
    other = make(tmp_path / "y", [[0]], tokenizer={"sha256": "b", "vocab_size": 5})
    with pytest.raises(ValueError, match=r"different tokenizer: .*x \(.a.\) and .*y \(.b.\)"):
        merge_pairs([pair, other], tmp_path / "z")
    np.full(4, 7, "<u2").tofile(tmp_path / "x.bin")
    with pytest.raises(CorruptDatasetError, match="checksum"):
        merge_pairs([pair], tmp_path / "z")
    assert not list(tmp_path.glob("z*"))


def test_a_negative_id_is_named_by_its_sequence_but_not_among_images(tmp_path):
    prefix = tmp_path / "x"
    with IndexedWriter(prefix, "int32") as writer:
        writer.add_document([1, 2, 3, -4, 5], [2, 0, 3])
    with pytest.raises(ValueError, match="sequence 2 has a negative token id"):
        verify_pair(prefix)
    with IndexedWriter(prefix, "int32", multimodal=True) as writer:
        writer.add_document([1, 2, -3, 9], [2, 2], [0, 1])
    assert "largest id 2" in verify_pair(prefix)
    with IndexedWriter(prefix, "int32", multimodal=True) as writer:
        writer.add_document([9, 9, -3], [2, 1], [1, 0])
    with pytest.raises(ValueError, match="sequence 1 has a negative token id"):
        verify_pair(prefix)


@pytest.mark.parametrize("mmap", [True, False])
def test_stretches_are_all_tokens_in_the_order_of_the_file(tmp_path, mmap):
    with IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.add_documents(np.arange(100), np.array([30, 0, 69, 1]))
    found = [*IndexedDataset(tmp_path / "x", mmap=mmap).chunks(num_tokens=33)]
    assert [len(part) for part in found] == [33, 33, 33, 1]
    assert np.concatenate(found).tolist() == list(range(100))
