"""Joining pairs into one, with a manifest that names what it was made of."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mcore_data.indexed.index_format import bin_path
from mcore_data.indexed.manifest import (
    check_files,
    manifest_path,
    read_manifest,
    write_manifest,
)
from mcore_data.indexed.origins import UNKNOWN, read_origins
from mcore_data.indexed.output_lock import make_parent_folder, naming_full_disks, only_writer
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter


def merge_pairs(
    prefixes: Sequence[str | Path], output_prefix: str | Path, *, overwrite: bool = False
) -> IndexedDataset:
    """Write all documents of some pairs, in order, as one pair.

    Args:
        prefixes: pairs of one dtype and kind.
        output_prefix: the pair to write; its files appear once they are whole.
        overwrite: replace a pair that stands there. One that by its manifest was joined from
            the same files always may be.

    Raises:
        ValueError: if there are none, or they differ in dtype or kind, or by their manifests
            in tokenizer; if another pair stands at ``output_prefix``, or another process is
            writing there.
        CorruptDatasetError: if a pair is damaged, by its index or its manifest.
    """
    if not prefixes:
        raise ValueError(f"there are no pairs to join into {output_prefix}.")
    make_parent_folder(output_prefix)
    manifests = [read_manifest(prefix) for prefix in prefixes]
    hashes = {
        facts["tokenizer"]["sha256"]: str(prefix)
        for prefix, facts in zip(prefixes, manifests, strict=True)
        if "sha256" in facts.get("tokenizer", {})
    }
    if len(hashes) > 1:
        raise ValueError(
            f"{' and '.join(hashes.values())} were made by different tokenizers, as their "
            "manifests say: their ids do not mean the same. Merge pairs of one tokenizer."
        )
    merged_from = [
        {"pair": Path(prefix).name, "files": facts.get("files", {})}
        for prefix, facts in zip(prefixes, manifests, strict=True)
    ]
    with only_writer(output_prefix), naming_full_disks(output_prefix):
        if not overwrite:
            _refuse_other(output_prefix, merged_from)
        for prefix, facts in zip(prefixes, manifests, strict=True):
            if facts:
                check_files(prefix, facts)
        checksum = _join(prefixes, manifests, output_prefix)
        merged = IndexedDataset(output_prefix)
        write_manifest(
            output_prefix,
            {
                "documents": merged.num_documents,
                "tokens": merged.num_tokens,
                "dtype": merged.dtype.name,
                **_common(manifests),
                "inputs": [one for facts in manifests for one in facts.get("inputs", ())],
                "merged_from": merged_from,
                "bin_sha256": checksum,
            },
        )
    return merged


def _refuse_other(prefix: str | Path, merged_from: list[dict[str, Any]]) -> None:
    """Refuse to replace a pair, but by one of the same files, by their manifests."""
    have_manifests = all(pair["files"] for pair in merged_from)
    if bin_path(prefix).is_file() and not (
        have_manifests and read_manifest(prefix).get("merged_from") == merged_from
    ):
        raise ValueError(
            f"{bin_path(prefix)} exists, and was not joined from these pairs as they are, or "
            "they have no manifests that would say: choose another --output-prefix, or give "
            "--overwrite to replace it."
        )


def _join(
    prefixes: Sequence[str | Path],
    manifests: Sequence[dict[str, Any]],
    output_prefix: str | Path,
) -> str:
    """Write the files of the joined pair; returns the checksum of its ``.bin``."""
    origins = [read_origins(*pair) for pair in zip(prefixes, manifests, strict=True)]
    some_known = any(rows is not UNKNOWN for rows in origins)
    num_inputs = 0
    first = IndexedDataset(prefixes[0])
    multimodal = first.index.modes is not None
    with IndexedWriter(
        output_prefix, first.dtype, multimodal=multimodal, checksum=True
    ) as writer:
        for prefix, facts, rows in zip(prefixes, manifests, origins, strict=True):
            if some_known:  # inputs are numbered over all pairs
                inputs = np.where(rows[:, 1] < 0, -1, rows[:, 1] + num_inputs)
                writer.add_origins(np.stack([rows[:, 0], inputs, rows[:, 2]], axis=1))
            num_inputs += len(facts.get("inputs", ()))
            writer.add_index(prefix)
        manifest_path(output_prefix).unlink(missing_ok=True)  # of what stood there before
        return writer.finalize()


def _common(manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the manifests agree on, and sums of what was verified and left out."""
    if not all(manifests):
        return {}
    names = ("key", "append_eod", "eod", "sentence_splitter", "tokenizer")
    common = {
        name: manifests[0][name]
        for name in names
        if name in manifests[0] and all(m.get(name) == manifests[0][name] for m in manifests)
    }
    checks = [m["verification"] for m in manifests if "verification" in m]
    if len(checks) == len(manifests) and len({check["mode"] for check in checks}) == 1:
        counts = ("texts", "characters", "checked_texts", "checked_characters", "differences")
        common["verification"] = checks[0] | {
            name: sum(check[name] for check in checks) for name in counts
        }
    skipped = [m["bad_records"] for m in manifests if "bad_records" in m]
    if len(skipped) == len(manifests):
        common["bad_records"] = {
            "skipped": sum(bad["skipped"] for bad in skipped),
            "first": [line for bad in skipped for line in bad["first"]],
        }
    return common
