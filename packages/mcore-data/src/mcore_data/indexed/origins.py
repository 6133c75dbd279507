"""The file that names, for each document of a pair, the input record it was made from.

``<pair>.origins`` holds rows of three little-endian int64: document, input, record. Documents
from ``document`` on, up to the next row, are consecutive records of the input at index
``input`` of the manifest's ``inputs``, from ``record`` on, counted from 1. So each input has a
row, and another one after each record that was left out. Of several rows for one document the
last counts; input -1 means that the origin is unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.indexed.index_format import CorruptDatasetError, origins_path
from mcore_data.indexed.manifest import has_files, read_manifest

UNKNOWN: NDArray[np.int64] = np.array([[0, -1, 0]])
"""Rows of a pair whose origins are unknown."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The record that a document was made from.

    Attributes:
        path: path of the input, as it was given.
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
        """Origin of a document of the pair; None if it is unknown."""
        at = int(np.searchsorted(self._rows[:, 0], document, side="right")) - 1
        if at < 0 or self._rows[at, 1] < 0:
            return None
        first, number, record = self._rows[at].tolist()
        names = ("path", "kind", "size", "start")
        return Origin(
            **{name: self._inputs[number][name] for name in names},
            record=record + document - first,
        )


def read_origins(prefix: str | Path, facts: Mapping[str, Any]) -> NDArray[np.int64]:
    """Rows [N, 3] of a pair; ``UNKNOWN`` without origins or if the files differ in size.

    Raises:
        CorruptDatasetError: if the file has no whole rows, or its documents do not rise, or it
            names inputs that the manifest does not have.
    """
    named = any(name.endswith(".origins") for name in facts.get("files", ()))
    if not named or not has_files(prefix, facts):
        return UNKNOWN
    numbers = np.fromfile(origins_path(prefix), "<i8")
    rows = numbers[: len(numbers) // 3 * 3].reshape(-1, 3)
    if (
        rows.nbytes != origins_path(prefix).stat().st_size
        or (np.diff(rows[:, 0]) < 0).any()
        or (rows[:, 1] >= len(facts.get("inputs", ()))).any()
    ):
        raise CorruptDatasetError(
            f"{origins_path(prefix)} is damaged. Remove it and the manifest to use the pair "
            "without them, or write the dataset again."
        )
    return rows
