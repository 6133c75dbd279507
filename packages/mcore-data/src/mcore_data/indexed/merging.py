"""Joins pairs into one pair or one logical dataset, whose manifest names the pairs.

Manifests determine which pairs may be joined and in which order: all parts of one division,
each once, by number; other pairs only if their ids have the same meaning. Of pairs without a
manifest, such as Megatron's, only dtype and kind are known.
"""

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mcore_data.indexed.index_format import CorruptDatasetError, bin_path, idx_path, read_index
from mcore_data.indexed.manifest import (
    check_files,
    has_files,
    logical_bins,
    manifest_path,
    parse_json,
    read_manifest,
    replace_json,
    write_manifest,
)
from mcore_data.indexed.origins import UNKNOWN, read_origins
from mcore_data.indexed.output_lock import make_parent_folder, naming_full_disks, only_writer
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter

log = logging.getLogger(__name__)

_COPY_BYTES = 8 << 20
_SAVED_EVERY_S = 5.0

# Facts that must be equal in all pairs, with the option that determines each; a dot leads to a
# key inside a fact.
_SETTINGS = {
    "tokenizer.sha256": "tokenizer",
    "tokenizer.vocab_size": "tokenizer",
    "key": "--json-keys",
    "append_eod": "--append-eod",
    "eod": "end-of-document id",
    "sentence_splitter": "--sentence-splitter",
    "keep_newlines": "--keep-newlines",
    "keep_keys": "--keep-keys",
}
Pair = tuple[str, dict[str, Any]]
"""Prefix and manifest of a pair; the manifest is empty if there is none."""


def merge_pairs(
    prefixes: Sequence[str | Path],
    output_prefix: str | Path,
    *,
    overwrite: bool = False,
    allow_missing: bool = False,
    logical: bool = False,
    bins_elsewhere: bool = False,
    workers: int = 1,
) -> IndexedDataset:
    """Write all documents of some pairs as one pair, or as one logical dataset.

    Parts of a division (``preprocess --partitions``) are joined in the order of their numbers,
    other pairs in the order given.

    Args:
        prefixes: pairs of one dtype and kind.
        output_prefix: the pair to write; its files get their names once they are complete.
        overwrite: replace an existing pair at ``output_prefix``. A pair that was joined from
            the same files, by its manifest, is always replaced.
        allow_missing: join parts of a division although some are missing.
        logical: write index, origins and manifest only, and leave the tokens in the pairs,
            which must have manifests. Sizes of the ``.bin`` files and checksums of all others
            are compared, and no token is read.
        bins_elsewhere: the ``.bin`` files of a logical dataset are on another machine, at the
            same paths relative to its manifest.
        workers: threads that copy tokens, if all pairs have manifests. After a kill, the same
            call continues with the pairs that were not copied yet.

    Raises:
        ValueError: if there are no pairs, or they differ in dtype or kind, or by their
            manifests in a setting that determines ids; if parts are missing, given twice, or of
            two divisions, or two pairs have the same input; if ``output_prefix`` is another
            finished pair, or another process is writing it.
        CorruptDatasetError: if a pair is damaged, by its index or its manifest.
    """
    if not prefixes:
        raise ValueError(f"there are no pairs to join into {output_prefix}.")
    make_parent_folder(output_prefix)
    pairs = [(str(prefix), read_manifest(prefix)) for prefix in prefixes]
    _refuse_different_settings(pairs)
    parts: dict[str, Any] = {}
    if any("parts" in facts for _, facts in pairs):
        pairs, parts = _order_parts(pairs, allow_missing)
    else:
        _refuse_repeated_inputs(pairs)
    manifests = [facts for _, facts in pairs]
    merged_from = [
        {"pair": Path(prefix).name, "files": facts.get("files", {})} for prefix, facts in pairs
    ]
    with only_writer(output_prefix), naming_full_disks(output_prefix):
        if not overwrite:
            _refuse_other(output_prefix, merged_from)
        for prefix, facts in pairs:
            if logical and not bins_elsewhere:
                _refuse_incomplete(prefix, facts)
            if facts and not bins_elsewhere:
                _check_without_bin(prefix, facts)
        checksum = _join(pairs, output_prefix, logical, bins_elsewhere, workers)
        tokens = (
            {"pairs": _list_pairs(pairs, output_prefix)}
            if logical
            else {"bin_sha256": checksum}
        )
        index = read_index(idx_path(output_prefix))
        write_manifest(
            output_prefix,
            {
                "documents": len(index.documents) - 1,
                "tokens": int(index.lengths.sum(dtype=np.int64)),
                "dtype": index.dtype.name,
                **_common(manifests),
                **parts,
                "inputs": [source for facts in manifests for source in facts.get("inputs", ())],
                "merged_from": merged_from,
                **tokens,
            },
        )
    return IndexedDataset(output_prefix)


def _refuse_different_settings(pairs: Sequence[Pair]) -> None:
    """Refuse pairs whose manifests differ in a setting that determines ids."""
    without = [prefix for prefix, facts in pairs if not facts]
    if without and len(pairs) > 1:
        log.warning(
            "%d of %d pairs have no manifest, so that only their dtype is compared: %s%s",
            *(len(without), len(pairs), without[0], ", ..." if len(without) > 1 else ""),
        )
    for name, option in _SETTINGS.items():
        first: dict[str, str] = {}  # a pair for each value of the setting
        without_setting = []
        for prefix, facts in pairs:
            group, _, inner = name.rpartition(".")
            values = facts.get(group, {}) if group else facts
            if facts and name == "keep_keys":
                values = {"keep_keys": [], **values}  # manifests of earlier versions
            if inner in values:
                first.setdefault(repr(values[inner]), prefix)
            elif facts:
                without_setting.append(prefix)
        if first and without_setting:
            log.warning(
                "%s is not recorded in the manifest of %s: assuming that it is as in %s.",
                *(option, ", ".join(without_setting), next(iter(first.values()))),
            )
        if len(first) > 1:
            values_and_pairs = " and ".join(
                f"{prefix} ({value})" for value, prefix in first.items()
            )
            raise ValueError(
                f"different {option}: {values_and_pairs}, by their manifests. Merge only pairs "
                "of equal settings; --data-path of a run takes pairs of different settings."
            )


def _order_parts(
    pairs: Sequence[Pair], allow_missing: bool
) -> tuple[list[Pair], dict[str, Any]]:
    """Order the parts of a division by number, and describe their union.

    Returns:
        The pairs in order, and the fact ``parts`` of the joined pair's manifest; no fact if
        no part is missing.
    """
    whole = [prefix for prefix, facts in pairs if "parts" not in facts]
    if whole:
        other = next(prefix for prefix, facts in pairs if "parts" in facts)
        raise ValueError(
            f"{other} is a part of a corpus, and {whole[0]} is not, by its manifest: merge the "
            "parts alone first, by their prefixes or from a folder that holds only them."
        )
    ordered = sorted(pairs, key=lambda pair: pair[1]["parts"]["numbers"])
    first_prefix, first = ordered[0][0], ordered[0][1]["parts"]
    owners: dict[int, str] = {}
    for prefix, facts in ordered:
        parts = facts["parts"]
        if (parts["of"], parts["corpus"]) != (first["of"], first["corpus"]):
            raise ValueError(
                f"{first_prefix} (one of {first['of']} parts) and {prefix} (one of "
                f"{parts['of']}) are of different divisions, or their inputs changed in "
                "between: merge the parts of one division, written from the same inputs."
            )
        for number in parts["numbers"]:
            if number in owners:
                raise ValueError(
                    f"{owners[number]} and {prefix} both hold part {number} of {parts['of']}: "
                    "give each part once."
                )
            owners[number] = prefix
    _warn_of_changed_inputs(ordered)
    numbers = list(owners)
    if numbers != sorted(numbers):
        raise ValueError(
            f"parts {numbers} of {first['of']} cannot be ordered: some of the pairs were "
            "joined before. Merge the single parts."
        )
    missing = sorted(set(range(first["of"])) - owners.keys())
    if not missing:
        return ordered, {}
    message = (
        f"{len(missing)} of {first['of']} parts are missing: {', '.join(map(str, missing))}"
    )
    if not allow_missing:
        raise ValueError(
            f"{message} (by the manifests; {first_prefix} is part {numbers[0]}). Make or copy "
            "them, or give --allow-missing to join the others."
        )
    log.warning("%s", message)
    return ordered, {"parts": {**first, "numbers": numbers}}


def _warn_of_changed_inputs(parts: Sequence[Pair]) -> None:
    """Warn of an input whose modification time, or ETag, differs between two parts."""
    first: dict[str, tuple[str, str]] = {}  # by path: the stamp in the first part, its prefix
    for prefix, facts in parts:
        for source in facts.get("inputs", ()):
            path, stamp = source["path"], source.get("stamp")
            first_stamp, first_prefix = first.setdefault(path, (stamp, prefix))
            if stamp != first_stamp:
                log.warning(
                    "%s has different modification times in the manifests of %s and %s: unless "
                    "it was only copied, write all parts again.",
                    *(path, first_prefix, prefix),
                )
                return


def _refuse_repeated_inputs(pairs: Sequence[Pair]) -> None:
    """Refuse two pairs made from the same bytes of an input, such as a pair and its copy."""
    ranges_of: dict[tuple[Any, ...], list[tuple[int, float, str]]] = {}
    for prefix, facts in pairs:
        for source in facts.get("inputs", ()):
            identity = tuple(source.get(name) for name in ("path", "size", "stamp"))
            ranges_of.setdefault(identity, []).append(
                (source.get("start", 0), source.get("stop") or float("inf"), prefix)
            )
    for (path, *_), ranges in ranges_of.items():
        ranges.sort()
        for (_, stop, before), (start, _, prefix) in pairwise(ranges):
            if start < stop and before != prefix:
                raise ValueError(
                    f"{before} and {prefix} both hold {path}, so its documents would occur "
                    "twice: leave one out. To read a corpus more often, give it a larger "
                    "weight in --data-path."
                )
    names = [str(Path(prefix).absolute()) for prefix, _ in pairs]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{name} is given twice: give each pair once.")


def _refuse_other(prefix: str | Path, merged_from: list[dict[str, Any]]) -> None:
    """Raise if a pair exists that was not joined from the same files, by the manifests."""
    have_manifests = all(pair["files"] for pair in merged_from)
    existing = [path for path in (bin_path(prefix), idx_path(prefix)) if path.is_file()]
    if existing and not (
        have_manifests and read_manifest(prefix).get("merged_from") == merged_from
    ):
        raise ValueError(
            f"{existing[0]} exists, and was not joined from these pairs as they are now, "
            "or they have no manifests to compare: choose another --output-prefix, or give "
            "--overwrite to replace it."
        )


def _refuse_incomplete(prefix: str, facts: dict[str, Any]) -> None:
    """Refuse a pair without manifest, or with files of other sizes than in its manifest."""
    if not facts:
        raise ValueError(
            f"{prefix} has no manifest, which a logical dataset needs: write the pair with "
            "mcore-data preprocess, or merge without --logical."
        )
    if not has_files(prefix, facts):
        raise CorruptDatasetError(
            f"{prefix}: a file is missing or of another size than in its manifest. Write the "
            "pair again."
        )


def _list_pairs(pairs: Sequence[Pair], output_prefix: str | Path) -> list[dict[str, Any]]:
    """Return prefix, relative to the output's folder, bytes and SHA-256 of each ``.bin``."""
    folder = Path(output_prefix).parent
    return [
        {
            "prefix": os.path.relpath(str(path)[: -len(".bin")], folder),
            "bytes": file["bytes"],
            "sha256": file["sha256"],
        }
        for prefix, facts in pairs
        for path, file in _bins(prefix, facts).items()
    ]


def _bins(prefix: str, facts: dict[str, Any]) -> dict[Path, dict[str, Any]]:
    """Return the ``.bin`` files of a pair or logical dataset, with their manifest entries."""
    entry = next((file for name, file in facts["files"].items() if name.endswith(".bin")), None)
    return logical_bins(prefix, facts) if entry is None else {bin_path(prefix): entry}


def _join(
    pairs: Sequence[Pair],
    output_prefix: str | Path,
    logical: bool,
    bins_elsewhere: bool,
    workers: int,
) -> str:
    """Write the files of the joined pair; returns the checksum of its ``.bin``."""
    checksum, copied = "", None
    if not logical and all(facts for _, facts in pairs):
        copied = Path(f"{output_prefix}.bin.copied")
        checksum = copy_bins(
            [item for prefix, facts in pairs for item in _bins(prefix, facts).items()],
            copied,
            workers,
        )
    origins = [read_origins(*pair, bins_elsewhere=bins_elsewhere) for pair in pairs]
    some_known = any(rows is not UNKNOWN for rows in origins)
    num_inputs = 0
    first = read_index(idx_path(pairs[0][0]))
    multimodal = first.modes is not None
    with IndexedWriter(
        output_prefix,
        first.dtype,
        multimodal=multimodal,
        checksum=not logical and copied is None,
        index_only=logical or copied is not None,
        bin_from=copied,
    ) as writer:
        for (prefix, facts), rows in zip(pairs, origins, strict=True):
            if some_known:  # inputs are numbered over all pairs
                inputs = np.where(rows[:, 1] < 0, -1, rows[:, 1] + num_inputs)
                writer.add_origins(np.stack([rows[:, 0], inputs, rows[:, 2]], axis=1))
            num_inputs += len(facts.get("inputs", ()))
            writer.add_index(prefix)
        manifest_path(output_prefix).unlink(missing_ok=True)  # of an earlier pair
        checksum = writer.finalize() or checksum
    Path(f"{output_prefix}.bin.copied.json").unlink(missing_ok=True)
    return checksum


def copy_bins(bins: Sequence[tuple[Path, dict[str, Any]]], target: Path, workers: int) -> str:
    """Concatenate files into one, on several threads, and compare each with its checksum.

    ``<target>.json`` lists the files that were copied and flushed. After a kill, the same call
    copies only the others.

    Args:
        bins: files with their bytes and SHA-256, in order.
        target: file to write.
        workers: number of threads.

    Returns:
        SHA-256 of the target, which the calling thread computes in order.

    Raises:
        CorruptDatasetError: if a file has another size or checksum.
    """
    sizes = [file["bytes"] for _, file in bins]
    starts = [0, *accumulate(sizes)]
    identity = hashlib.sha256(repr([file for _, file in bins]).encode()).hexdigest()
    journal = Path(f"{target}.json")
    stored = (parse_json(journal.read_bytes()) or {}) if journal.is_file() else {}
    done: set[int] = set()
    if stored.get("identity") == identity and target.is_file():
        done = set(stored["done"])
    digest = hashlib.sha256()
    with target.open("r+b" if done else "w+b") as out, ThreadPoolExecutor(workers) as pool:
        out.truncate(starts[-1])
        remaining = [number for number in range(len(bins)) if number not in done]
        copies = {
            number: pool.submit(_copy_bin, *bins[number], out.fileno(), starts[number])
            for number in remaining
        }
        saved_at = time.monotonic()
        try:
            for number in range(len(bins)):
                if number in copies:
                    copies[number].result()
                position = starts[number]
                while position < starts[number + 1]:  # mostly still in the page cache
                    data = os.pread(
                        out.fileno(), min(_COPY_BYTES, starts[number + 1] - position), position
                    )
                    digest.update(data)
                    position += len(data)
                if time.monotonic() - saved_at > _SAVED_EVERY_S or number == len(bins) - 1:
                    finished = {n for n, copy in copies.items() if copy.done()}
                    finished = {n for n in finished if copies[n].exception() is None}
                    os.fsync(out.fileno())
                    facts = {"identity": identity, "done": sorted(done | finished)}
                    replace_json(journal, facts)
                    saved_at = time.monotonic()
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            if isinstance(error, CorruptDatasetError):
                target.unlink()
                journal.unlink(missing_ok=True)
            raise
    return digest.hexdigest()


def _copy_bin(path: Path, file: dict[str, Any], out: int, start: int) -> None:
    digest, position = hashlib.sha256(), start
    if not path.is_file() or path.stat().st_size != file["bytes"]:
        raise CorruptDatasetError(
            f"{path} is missing or does not have the {file['bytes']} bytes of its manifest. "
            "Write the dataset again."
        )
    with path.open("rb", buffering=0) as source:
        while data := source.read(_COPY_BYTES):
            digest.update(data)
            position += os.pwrite(out, data, position)
    if digest.hexdigest() != file["sha256"] or position != start + file["bytes"]:
        raise CorruptDatasetError(
            f"{path} does not have the checksum of its manifest: bytes have changed. Write the "
            "dataset again, or copy it again."
        )


def _check_without_bin(prefix: str, facts: dict[str, Any]) -> None:
    """Check the small files of a pair; its tokens are checked while they are copied."""
    files = {name: file for name, file in facts["files"].items() if not name.endswith(".bin")}
    check_files(prefix, {**facts, "files": files, "pairs": ()})


def _common(manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts that all manifests share, and sums of verified and skipped records."""
    if not all(manifests):
        return {}
    names = [name.partition(".")[0] for name in _SETTINGS]
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
    left_out = {path for facts in manifests for path in facts.get("left_out", ())}
    return {**common, "left_out": sorted(left_out)}
