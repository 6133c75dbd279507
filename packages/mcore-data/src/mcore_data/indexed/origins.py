"""The file that names, for each document of a pair, the input record it was made from.

``<pair>.origins`` holds rows of three little-endian int64: document, input, record. A row
describes the documents from ``document`` up to the next row: they are consecutive records of
the input at index ``input`` of the manifest's ``inputs``, and the first is record ``record``,
counted from 1. So each input has a row, and one more after each record that was left out. Of
several rows for one document the last one is valid; input -1 means that the origin is unknown.

``<pair>.kept`` holds a line of JSON for each document: the values that ``--keep-keys`` stored,
in the order of the manifest's ``keep_keys``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.indexed.index_format import CorruptDatasetError, kept_path, origins_path
from mcore_data.indexed.manifest import has_files, read_manifest
from mcore_data.indexed.object_store import fetch_file, is_remote

_KEPT_BYTES = 1 << 22
UNKNOWN: NDArray[np.int64] = np.array([[0, -1, 0]])
"""Rows of a pair whose origins are unknown."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The record that a document was made from.

    Attributes:
        path: path of the input, as in the command that read it.
        kind: format of the input's records (see ``records.Kind``).
        size: bytes of the input as stored; 0 if it was a stream.
        start: byte of the input from which records are counted.
        record: number of the record from ``start`` on, counted from 1.
    """

    path: str
    kind: Any
    size: int
    start: int
    record: int


class Origins:
    """Looks up the origins of a pair's documents.

    Args:
        prefix: prefix of the pair; without a manifest or origins all lookups give None.

    Raises:
        CorruptDatasetError: if the manifest or the origins are damaged.
    """

    def __init__(self, prefix: str | Path) -> None:
        facts = read_manifest(prefix)
        self._inputs: list[dict[str, Any]] = facts.get("inputs", [])
        self._rows = read_origins(prefix, facts)

    def find(self, document: int) -> Origin | None:
        """Return the origin of a document of the pair; None if it is unknown."""
        row = int(np.searchsorted(self._rows[:, 0], document, side="right")) - 1
        if row < 0 or self._rows[row, 1] < 0:
            return None
        first, number, record = self._rows[row].tolist()
        names = ("path", "kind", "size", "start")
        return Origin(
            **{name: self._inputs[number][name] for name in names},
            record=record + document - first,
        )


def read_kept(prefix: str | Path, cache_path: str | Path = "") -> Iterator[list[list[Any]]]:
    """Yield the kept values of all documents of a pair, some thousand documents at a time.

    Raises:
        CorruptDatasetError: if a line is damaged.
    """
    path = kept_path(prefix)
    if is_remote(prefix):
        path = fetch_file(str(prefix), ".kept", cache_path)
    with path.open("rb") as file:
        while lines := file.readlines(_KEPT_BYTES):
            try:
                yield json.loads(b"[" + b",".join(lines) + b"]")
            except ValueError as error:
                raise CorruptDatasetError(f"{path} is damaged: {error}.") from error


def kept_values(
    prefix: str | Path, document: int, cache_path: str | Path = ""
) -> dict[str, Any]:
    """Return the kept values of one document by key; empty if the pair has none."""
    names = read_manifest(prefix).get("keep_keys", ())
    if not names:
        return {}
    for rows in read_kept(prefix, cache_path):
        if document < len(rows):
            return dict(zip(names, rows[document], strict=True))
        document -= len(rows)
    raise CorruptDatasetError(f"{kept_path(prefix)} has fewer lines than documents.")


def read_origins(
    prefix: str | Path, facts: Mapping[str, Any], *, bins_elsewhere: bool = False
) -> NDArray[np.int64]:
    """Return the rows [N, 3] of a pair; ``UNKNOWN`` without origins or if file sizes differ.

    Args:
        prefix: prefix of the pair.
        facts: manifest of the pair.
        bins_elsewhere: the ``.bin`` may be missing on this machine.

    Raises:
        CorruptDatasetError: if the file ends within a row, its documents are not ascending, or
            an input is not in the manifest.
    """
    is_listed = any(name.endswith(".origins") for name in facts.get("files", ()))
    if not is_listed or not (bins_elsewhere or is_remote(prefix) or has_files(prefix, facts)):
        return UNKNOWN
    data = origins_path(prefix).read_bytes()
    rows = np.frombuffer(data, "<i8", len(data) // 24 * 3).reshape(-1, 3)
    if (
        rows.nbytes != len(data)
        or (np.diff(rows[:, 0]) < 0).any()
        or (rows[:, 1] >= len(facts.get("inputs", ()))).any()
    ):
        raise CorruptDatasetError(
            f"{origins_path(prefix)} is damaged. Remove it and the manifest to use the pair "
            "without them, or write the dataset again."
        )
    return rows
