"""Joining pairs into one, with a manifest that names what it was made of."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_data.indexed import IndexedDataset
from mcore_data.indexed_writing import IndexedWriter
from mcore_data.manifest import check_files, read_manifest, write_manifest
from mcore_data.outputs import make_folder


def merge_pairs(prefixes: Sequence[str | Path], output_prefix: str | Path) -> IndexedDataset:
    """Write all documents of some pairs, in order, as one pair.

    Args:
        prefixes: pairs of one dtype and kind.
        output_prefix: the pair to write; its files appear once they are whole.

    Raises:
        ValueError: if pairs differ in dtype or kind, or by their manifests in tokenizer.
        CorruptDatasetError: if a pair is damaged, as its index or its manifest tells.
    """
    make_folder(Path(output_prefix).parent, f"--output-prefix {output_prefix}")
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
    for prefix, facts in zip(prefixes, manifests, strict=True):
        if facts:
            check_files(prefix, facts)
    first = IndexedDataset(prefixes[0])
    multimodal = first.index.modes is not None
    with IndexedWriter(
        output_prefix, first.dtype, multimodal=multimodal, checksum=True
    ) as writer:
        for prefix in prefixes:
            writer.add_index(prefix)
        checksum = writer.finalize()
    merged = IndexedDataset(output_prefix)
    write_manifest(
        output_prefix,
        {
            "documents": merged.num_documents,
            "tokens": merged.num_tokens,
            "dtype": merged.dtype.name,
            **_common(manifests),
            "merged_from": [
                {"pair": Path(prefix).name, "files": facts.get("files", {})}
                for prefix, facts in zip(prefixes, manifests, strict=True)
            ],
            "bin_sha256": checksum,
        },
    )
    return merged


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
