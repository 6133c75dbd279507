"""``--blocklist``: documents that a run must not train on, without writing its data again.

Each line of the file is a value that ``preprocess --keep-keys`` stored (an id, a URL), or a
prefix, a tab and the number of a document. The sample index does not change: a blocked document
keeps its place, its tokens become end-of-document ids, and no position that reads or predicts
one of them has a loss. So all other text stays in the same samples at the same steps, and a run
may be continued with another blocklist.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mcore_data.indexed.caching import cached_arrays
from mcore_data.indexed.manifest import DIGEST, read_manifest
from mcore_data.indexed.object_store import is_remote
from mcore_data.indexed.origins import read_kept
from mcore_data.indexed.reader import IndexedDataset

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Blocklist:
    """Content of a blocklist.

    Attributes:
        path: the file.
        values: kept values, as text.
        numbers: numbers of documents, by absolute prefix.
        sha256: hash of the file.
    """

    path: str
    values: frozenset[str]
    numbers: Mapping[str, Sequence[int]]
    sha256: str


def read_blocklist(path: str) -> Blocklist:
    """Read a blocklist; empty lines do not count.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a tab is not followed by a number.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"--blocklist {path} is not a file.")
    data = Path(path).read_bytes()
    values: set[str] = set()
    numbers: dict[str, list[int]] = {}
    for line_number, line in enumerate(data.decode().splitlines(), 1):
        prefix, tab, document = line.strip().rpartition("\t")
        if tab and not document.isdecimal():
            raise ValueError(
                f"--blocklist {path}, line {line_number}: give a kept value, or a prefix, a "
                "tab and the number of a document."
            )
        if tab:
            numbers.setdefault(_absolute(prefix), []).append(int(document))
        elif document:
            values.add(document)
    return Blocklist(path, frozenset(values), numbers, hashlib.sha256(data).hexdigest())


def blocked_sequences(
    blocklist: Blocklist, dataset: IndexedDataset, cache_folder: str | Path = ""
) -> NDArray[np.bool_] | None:
    """Find the sequences of a dataset's blocked documents; None if there are none.

    Args:
        blocklist: the documents to block.
        dataset: an open dataset.
        cache_folder: folder in which the result is cached; "" reads all kept values again.

    Returns:
        bool [S], whether each sequence is blocked.

    Raises:
        ValueError: if the dataset has no kept values to compare, or no such document.
    """
    numbers = blocklist.numbers.get(_absolute(dataset.prefix), [])
    if numbers and max(numbers) >= dataset.num_documents:
        raise ValueError(
            f"--blocklist {blocklist.path}: {dataset.prefix} has the documents 0 to "
            f"{dataset.num_documents - 1}, not {max(numbers)}."
        )
    facts = read_manifest(dataset.prefix)
    if blocklist.values and not facts.get("keep_keys"):
        raise ValueError(
            f"--blocklist {blocklist.path}: {dataset.prefix} has no kept values to compare. "
            "Write the pair with preprocess --keep-keys, or name documents by number, as "
            "PREFIX, a tab and NUMBER."
        )

    def build() -> list[NDArray[np.bool_]]:
        documents = np.zeros(dataset.num_documents, bool)
        documents[numbers] = True
        if blocklist.values:
            first = 0
            for rows in read_kept(dataset.prefix, dataset.cache_path):
                matches = [i for i, row in enumerate(rows) if _is_named(row, blocklist.values)]
                documents[first + np.array(matches, np.int64)] = True
                first += len(rows)
        return [np.repeat(documents, np.diff(dataset.documents))]

    identity = [dataset.prefix, facts.get(DIGEST, ""), len(dataset), blocklist.sha256]
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
    (blocked,) = cached_arrays(cache_folder if facts else "", key, ("blocked",), build)
    if not blocked.any():
        return None
    log.info(
        "--blocklist %s: %d sequences of %s, %d tokens, are left out of training",
        *(blocklist.path, int(blocked.sum()), dataset.prefix),
        int(dataset.lengths[blocked].sum(dtype=np.int64)),
    )
    return blocked


def _absolute(prefix: str) -> str:
    return prefix if is_remote(prefix) else os.path.abspath(prefix)


def _is_named(row: Sequence[object], values: frozenset[str]) -> bool:
    return any(
        (value if isinstance(value, str) else json.dumps(value)) in values for value in row
    )
