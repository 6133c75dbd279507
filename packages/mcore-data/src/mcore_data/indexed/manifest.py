"""The manifest of a pair: a JSON file with the pair's content and how it was made.

``<pair>.manifest.json`` holds counts, inputs, checksums of the files, the tokenizer's hash, how
many texts were verified, which records and files were left out, versions, and a digest of its
other keys. Manifests of format 1 have no digest.

A manifest with ``pairs`` makes a *logical* dataset: an ``.idx`` (and ``.origins``) without a
``.bin``, whose tokens are the concatenated ``.bin`` files of other pairs.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from mcore_base.atomic_files import replace_file, write_durably
from mcore_base.stores import as_path, is_store
from mcore_data.indexed.index_format import (
    CorruptDatasetError,
    bin_path,
    idx_path,
    kept_path,
    origins_path,
)

DIGEST = "sha256"
"""Last key of a JSON file: the digest of all other keys."""

FORMAT = 2
_TYPES = {
    "files": dict,
    "documents": int,
    "tokens": int,
    "tokenizer": dict,
    "verification": dict,
    "bad_records": dict,
    "inputs": list,
    "merged_from": list,
    "pairs": list,
}


def manifest_path(prefix: str | Path) -> Path:
    """Path of the manifest of a pair."""
    return as_path(f"{prefix}.manifest.json")


def write_manifest(prefix: str | Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of a finished pair; adds sizes and checksums of its files.

    Args:
        prefix: prefix of the pair.
        facts: all other facts. ``bin_sha256`` is the checksum of the ``.bin``; without it the
            ``.bin`` is read. With ``pairs`` there is no ``.bin``.
    """
    facts = dict(facts)
    bin_sha256 = facts.pop("bin_sha256", "")
    paths = [idx_path(prefix)] if "pairs" in facts else [bin_path(prefix), idx_path(prefix)]
    paths += [path for path in (origins_path(prefix), kept_path(prefix)) if path.is_file()]
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": (bin_sha256 if path == bin_path(prefix) else "") or file_sha256(path),
        }
        for path in paths
    }
    manifest = {"format": FORMAT, **facts, "files": files, "versions": versions()}
    replace_json(manifest_path(prefix), manifest)


def read_manifest(prefix: str | Path) -> dict[str, Any]:
    """Read the manifest of a pair; empty if there is none.

    Raises:
        CorruptDatasetError: if the manifest was changed, or has a later format.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return {}
    data = path.read_bytes()
    facts = parse_json(data) or _parse_format_1(data)
    if facts is None or not 1 <= facts.get("format", 0) <= FORMAT:
        raise CorruptDatasetError(
            f"{path} is damaged or of a later version. Remove it to use the pair without a "
            "manifest."
        )
    return facts


def has_digest(facts: Mapping[str, Any]) -> bool:
    """Whether a manifest has a digest, which ``read_manifest`` has checked."""
    return DIGEST in facts


def _parse_format_1(data: bytes) -> dict[str, Any] | None:
    """Parse a manifest without a digest; None if it has one, or a fact of a wrong type."""
    try:
        facts: dict[str, Any] = json.loads(data)
        files = facts["files"]
        is_plausible = (
            facts["format"] == 1
            and DIGEST not in facts
            and all(isinstance(facts.get(name, kind()), kind) for name, kind in _TYPES.items())
            and {".bin", ".idx"} <= {Path(name).suffix for name in files}
            and all(
                isinstance(file["bytes"], int) and isinstance(file["sha256"], str)
                for file in files.values()
            )
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return facts if is_plausible else None


def is_of_other_tokenizer(prefix: str | Path, fingerprint: str) -> bool:
    """Whether the manifest names a tokenizer with another fingerprint."""
    made_by = read_manifest(prefix).get("tokenizer", {}).get("sha256", "")
    return bool(made_by) and made_by != fingerprint


def logical_bins(prefix: str | Path, facts: Mapping[str, Any]) -> dict[Path, dict[str, Any]]:
    """The ``.bin`` files of a logical dataset in order, each with its bytes and SHA-256.

    Their prefixes in the manifest start at the manifest's folder. Empty for a pair.
    """
    folder = as_path(prefix).parent
    return {bin_path(folder / pair["prefix"]): pair for pair in facts.get("pairs", ())}


def _files(prefix: str | Path, facts: Mapping[str, Any]) -> dict[Path, dict[str, Any]]:
    """All files of a manifest, each with its bytes and SHA-256."""
    pair_files = {
        as_path(f"{prefix}{Path(name).suffix}"): file for name, file in facts["files"].items()
    }
    return pair_files | logical_bins(prefix, facts)


def has_files(prefix: str | Path, facts: Mapping[str, Any]) -> bool:
    """Whether all files exist in the sizes of the manifest; reads no file."""
    return all(
        path.is_file() and path.stat().st_size == file["bytes"]
        for path, file in _files(prefix, facts).items()
    )


def check_files(prefix: str | Path, facts: Mapping[str, Any]) -> None:
    """Read all files and compare them with the sizes and checksums of the manifest.

    A pair may be renamed together with its manifest: files are found by their suffixes.

    Raises:
        CorruptDatasetError: if a file is missing or differs.
    """
    for path, stored in _files(prefix, facts).items():
        if not path.is_file():
            raise CorruptDatasetError(
                f"{path} is missing, and the manifest of the pair names it: copy it here too."
            )
        size = path.stat().st_size
        if size != stored["bytes"]:
            raise CorruptDatasetError(
                f"{path} has {size} bytes, and {stored['bytes']} by its manifest: it is "
                "truncated or from another run. Write the dataset again."
            )
        if file_sha256(path) != stored["sha256"]:
            raise CorruptDatasetError(
                f"{path} does not have the checksum of its manifest: bytes have changed. "
                "Write the dataset again, or copy it again."
            )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits, as ``sha256sum`` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that determine the tokens."""
    installed = {"python": platform.python_version(), "numpy": np.__version__}
    for name in ("mcore-data", "tokenizers", "sentencepiece", "gigatoken", "orjson", "nltk"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def replace_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a JSON file with a digest of its keys; only one process may write at a time."""
    if is_store(path):
        write_durably(path, _render(facts))
        return
    replace_file(path, lambda file: file.write(_render(facts)), Path(f"{path}.partial"))


def parse_json(data: bytes) -> dict[str, Any] | None:
    """Parse a file of ``replace_json``; None if any of its bytes changed.

    The text is rendered again and compared, so that changes of white space and of the order of
    keys, and repeated keys, are noticed too.
    """
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and _render(facts) == data else None


def _render(facts: Mapping[str, Any]) -> bytes:
    """Return the text of a JSON file, with the digest added or renewed."""
    rest = {name: value for name, value in facts.items() if name != DIGEST}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**rest, DIGEST: digest}, indent=2) + "\n").encode()
