"""Describes the content of ``.bin``/``.idx`` pairs, and checks them for damage."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mcore_data.indexed.index_format import CorruptDatasetError, bin_path, idx_path
from mcore_data.indexed.manifest import (
    check_files,
    has_digest,
    has_files,
    logical_bins,
    read_manifest,
)
from mcore_data.indexed.object_store import is_remote
from mcore_data.indexed.reader import IndexedDataset

_BARS = 12
_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of a dataset.

    Attributes:
        dtype: dtype of the stored tokens.
        num_documents: documents, empty ones included.
        num_sequences: sequences; several in a document if sentences were split.
        num_tokens: tokens of all sequences.
        shortest: tokens of the shortest sequence; 0 without sequences.
        median: median of the sequences' tokens.
        longest: tokens of the longest sequence.
    """

    dtype: str
    num_documents: int
    num_sequences: int
    num_tokens: int
    shortest: int
    median: float
    longest: int


def summarize(dataset: IndexedDataset) -> Summary:
    """Count documents, sequences and tokens of a dataset; reads the index only."""
    lengths = dataset.lengths if len(dataset) else np.zeros(1, np.int32)
    return Summary(
        dtype=dataset.dtype.name,
        num_documents=dataset.num_documents,
        num_sequences=len(dataset),
        num_tokens=dataset.num_tokens,
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        longest=int(lengths.max()),
    )


def length_histogram(dataset: IndexedDataset) -> list[str]:
    """Draw a histogram of the sequences' lengths in logarithmic bins, one line a bin."""
    lengths = np.maximum(dataset.lengths, 1)
    if not len(lengths):
        return []
    top = max(int(lengths.max()), 2)
    edges = np.unique(np.geomspace(1, top + 1, _BARS + 1).astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    return [
        f"{low:>9,} - {high - 1:<9,} {count:>11,} {'#' * round(_WIDTH * count / counts.max())}"
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]


def find_pairs(name: str | Path, output_prefix: str | Path = "") -> list[str]:
    """List the prefixes of all pairs in a folder and its sub-folders, or the one prefix given.

    A logical dataset is listed instead of its pairs.

    Args:
        name: folder or prefix.
        output_prefix: pair that the command writes; it is not listed.

    Returns:
        Prefixes sorted by name, numbers in names by their value: ``p_2`` before ``p_10``.

    Raises:
        FileNotFoundError: if there is no pair.
        ValueError: if a pair lacks a file, or its writing was interrupted.
    """
    folder = Path(name)
    kinds = ("bin", "idx", "bin.partial")
    files = [path for kind in kinds for path in folder.rglob(f"*.{kind}")]
    stems = {Path(re.sub(r"\.(bin|idx|bin\.partial)$", "", str(path))) for path in files}
    if not folder.is_dir() and (bin_path(name).is_file() or idx_path(name).is_file()):
        stems = {folder}
    stems = {stem for stem in stems if stem.absolute() != Path(output_prefix).absolute()}
    logical = {
        stem: logical_bins(stem, read_manifest(stem))
        for stem in stems
        if not bin_path(stem).is_file()
    }
    members = {path.absolute() for bins in logical.values() for path in bins}
    stems = {stem for stem in stems if bin_path(stem).absolute() not in members}
    if not stems:
        raise FileNotFoundError(
            f"{name} holds no .bin/.idx pair, and is not the prefix of one."
        )
    for stem in stems:
        for path in (bin_path(stem), idx_path(stem)):
            if not path.is_file() and not (path.suffix == ".bin" and logical[stem]):
                raise ValueError(f"{path} is missing: {stem.name} is not a complete pair.")
    return sorted(map(str, stems), key=_by_numbers)


def _by_numbers(name: str) -> list[str | int]:
    """Sort key that compares digits as numbers."""
    return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", name)]


def quick_check(prefix: str | Path, *, cache_path: str | Path = "") -> str:
    """Check a pair by its index and manifest without reading tokens; describe the result.

    Args:
        prefix: prefix of the pair.
        cache_path: local folder for the index of a pair in an object store.

    Raises:
        FileNotFoundError: if a file is missing.
        CorruptDatasetError: if the index is damaged or does not fit the ``.bin``.
    """
    IndexedDataset(prefix, cache_path=cache_path)
    facts = read_manifest(prefix)
    fits = "index, pointers and sizes fit"
    if not facts:
        return f"{fits}; no manifest"
    if "pairs" in facts:
        fits = f"logical dataset of {len(facts['pairs'])} pairs; {fits}"
    if not has_files(prefix, facts):
        return f"{fits}, but the sizes in the manifest differ"
    engine = facts.get("tokenizer", {}).get("engine", "")
    checked = facts.get("verification", {}).get("mode", "")
    made = f"; encoded by {engine}, verified: {checked}" if engine and checked else ""
    return f"{fits}, also to the manifest{made}"


def verify_pair(prefix: str | Path) -> str:
    """Check a pair completely, and describe it in one line.

    Opening the pair checks index, pointers, borders and sizes. Then every token is read, and
    if there is a manifest, its own digest is checked and the files are compared with its
    checksums, counts, dtype and vocabulary.

    Raises:
        FileNotFoundError: if a file is missing.
        CorruptDatasetError: if the index, a file or the manifest is damaged or differs.
        ValueError: if a token is negative, or the pair is in an object store.
    """
    if is_remote(str(prefix)):
        raise ValueError(
            f"{prefix} is in an object store, and verify reads every byte: copy the pair to "
            "this machine first."
        )
    dataset = IndexedDataset(prefix)
    facts = read_manifest(prefix)
    largest = largest_token(dataset)
    counted = (
        f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens, "
        f"largest id {largest}"
    )
    if not facts:
        return f"{counted}; no manifest, so no checksums"
    check_files(prefix, facts)
    counts = {
        "documents": dataset.num_documents,
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
    }
    for name, count in counts.items():
        if facts.get(name, count) != count:
            raise CorruptDatasetError(
                f"{prefix} has {count} {name}, and {facts[name]} by its manifest: one of the "
                "two is from another run. Write the dataset again."
            )
    vocab_size = facts.get("tokenizer", {}).get("vocab_size", largest + 1)
    if largest >= vocab_size:
        raise CorruptDatasetError(
            f"{prefix} holds id {largest}, but its manifest's tokenizer has {vocab_size} ids."
        )
    note = "" if has_digest(facts) else ", which has no digest of its own"
    return f"{counted}, checksums as in its manifest{note}"


def largest_token(dataset: IndexedDataset) -> int:
    """Read every token and return the largest id; -1 without tokens.

    Of a multimodal pair only texts are read, the sequences of mode 0.
    """
    modes = dataset.index.modes
    if modes is None:
        chunks = dataset.chunks()
    else:
        chunks = map(dataset.get, np.flatnonzero(modes == 0).tolist())
    largest = -1
    for tokens in chunks:
        if not len(tokens):
            continue
        if tokens.min() < 0:
            number = _first_negative(dataset)
            raise ValueError(
                f"{dataset.prefix}: sequence {number} has a negative token id. Write the "
                "dataset again."
            )
        largest = max(largest, int(tokens.max()))
    return largest


def _first_negative(dataset: IndexedDataset) -> int:
    """Number of the first text with a negative id."""
    modes = dataset.index.modes
    texts = range(len(dataset)) if modes is None else np.flatnonzero(modes == 0).tolist()
    return next(number for number in texts if (dataset.get(number) < 0).any())
