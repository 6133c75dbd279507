"""Reads an optimizer's state from the buckets of Megatron's ``dp_reshardable`` format.

Buckets are flat and contain no names; ``layout`` computes the weights that they must contain.
The result is verified: every main weight, rounded, must equal the saved weight.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from mcore_ckpt.formats.dcp import DcpFolder
from mcore_ckpt.formats.megatron.layout import (
    BucketPiece,
    Chunks,
    Degrees,
    Order,
    StateBucket,
    Weight,
    laid_out,
    placed_weights,
)
from mcore_ckpt.mapping.optimizer_state import MAIN, MOMENTS, is_main
from mcore_ckpt.mapping.row_streams import Rows, Source
from mcore_ckpt.mapping.rules import Table, expand
from mcore_ckpt.storage.boxes import cover_problems
from mcore_ckpt.storage.files import Reader
from mcore_ckpt.storage.index import DTYPE_BYTES, StoredBox, TensorEntry
from mcore_parallel.sharding import flat_boxes

_BUCKET = re.compile(
    r"(?:chained_(?P<optimizer>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_\(torch\.(?P<dtype>\w+), .*\)"
    r"\.bucket_idx_(?P<bucket>\d+)\.(?P<word>\w+)"
)
_WORDS = {MAIN: "param", **{moment: moment for moment in MOMENTS}}


def has_buckets(folder: DcpFolder) -> bool:
    """Whether a directory holds an optimizer's state in buckets."""
    return any(_BUCKET.fullmatch(name) for name in folder.tensors)


def read_buckets(
    folder: DcpFolder, reader: Reader, table: Table, weights: Rows, arguments: Mapping[str, Any]
) -> tuple[dict[str, dict[str, TensorEntry]], int]:
    """Return the optimizer state of each weight, located in the buckets.

    Args:
        folder: directory of the step.
        reader: reader of the directory's files.
        table: rules of the weights that the optimizer updates.
        weights: complete weights under Megatron's names.
        arguments: arguments of the run, with the sizes of its parallel groups.

    Returns:
        The entries of the weights by kind of state, and the number of tensors of the directory
        that hold them.

    Raises:
        ValueError: if no known order of the weights fills the buckets with main weights that
            equal the weights.
    """
    buckets = _listed(folder)
    placed = placed_weights(expand(table), weights)
    sizes = _sizes(arguments, buckets)
    if sizes is not None:
        located = {
            name: replace(entry, chunks=tuple(sorted(entry.chunks, key=_begin)))
            for name, entry in folder.locate(_names(buckets)).items()
        }
        for own_norm, by_matrix in product((False, True), repeat=2):
            pieces = laid_out(Order(own_norm, by_matrix), placed, buckets, sizes)
            if pieces is None:
                continue
            mains = _entries(MAIN, pieces, placed, located)
            source = Source(reader, mains)
            if len(mains) == len(placed) and all(is_main(source, weights, n) for n in mains):
                moments = {kind: _entries(kind, pieces, placed, located) for kind in MOMENTS}
                return {MAIN: mains, **moments}, len(located)
    raise ValueError(
        f"{folder.path} holds the optimizer's state in buckets (dp_reshardable), which match "
        "no known order of the weights. Load and save the run once in Megatron with "
        "--dist-ckpt-optim-fully-reshardable, or leave --optimizer out to convert the weights."
    )


def _listed(folder: DcpFolder) -> dict[int, dict[int, Chunks]]:
    """Return the buckets of each optimizer (dense, experts') and each of its ranks.

    Empty if the kinds of state in a bucket differ in size.
    """
    bucket_of: dict[tuple[int, ...], StateBucket] = {}
    dtypes: dict[tuple[int, ...], str] = {}
    kinds = {word: kind for kind, word in _WORDS.items()}
    for name in folder.tensors:
        match = _BUCKET.fullmatch(name)
        if match is not None and match["word"] in kinds:
            numbers = ("optimizer", "rank", "buffer", "bucket")
            position = tuple(int(match[number] or 0) for number in numbers)
            size = folder.tensors[name].shape[0]
            bucket = bucket_of.setdefault(position, StateBucket(size, {}))
            if bucket.size != size:
                return {}
            bucket.names[kinds[match["word"]]] = name
            dtypes[position] = match["dtype"]
    buckets_of_ranks: dict[int, dict[int, Chunks]] = defaultdict(dict)
    previous = None
    for position in sorted(bucket_of):
        optimizer, rank, buffer, _ = position
        chunks = buckets_of_ranks[optimizer].setdefault(rank, [])
        dtype = dtypes[position]
        if (optimizer, rank, buffer) != previous:
            # A model chunk has one buffer for each dtype: a repeated dtype starts a new chunk.
            if not chunks or dtype in chunks[-1]:
                chunks.append({})
            chunks[-1][dtype] = []
            previous = (optimizer, rank, buffer)
        chunks[-1][dtype].append(bucket_of[position])
    return buckets_of_ranks


def _names(buckets_of_ranks: Mapping[int, Mapping[int, Chunks]]) -> Iterator[str]:
    for ranks in buckets_of_ranks.values():
        for chunk in (chunk for chunks in ranks.values() for chunk in chunks):
            for bucket in (bucket for buckets in chunk.values() for bucket in buckets):
                yield from bucket.names.values()


def _sizes(
    arguments: Mapping[str, Any], buckets: Mapping[int, Mapping[int, Chunks]]
) -> Degrees | None:
    """Return the sizes of parallel groups; None if the buckets do not fit such groups."""
    tp = arguments.get("tensor_model_parallel_size")
    if not isinstance(tp, int) or not buckets.keys() <= {0, 1}:
        return None
    ranks = len(buckets.get(0, {}))
    ep = arguments.get("expert_model_parallel_size") or 1
    etp = arguments.get("expert_tensor_parallel_size") or tp
    is_whole = ranks > 0 and ranks % tp == 0 and set(buckets[0]) == set(range(ranks))
    return Degrees(tp, ranks // tp, etp, ep) if is_whole else None


def _entries(
    kind: str,
    pieces: Mapping[str, Sequence[BucketPiece]],
    weights: Sequence[Weight],
    located: Mapping[str, TensorEntry],
) -> dict[str, TensorEntry]:
    """Return entries of one kind of state by weight; incomplete entries are omitted."""
    firsts = {name: [_begin(c) for c in entry.chunks] for name, entry in located.items()}
    entries = {}
    for weight in weights:
        chunks: list[StoredBox] = []
        dtypes = set()
        for piece in pieces.get(weight.name, ()):
            name = piece.bucket.names.get(kind, "")
            if name:
                chunks += _cut(located[name], firsts[name], piece)
                dtypes.add(located[name].dtype)
        is_complete = not cover_problems(weight.shape, [(c.offsets, c.lengths) for c in chunks])
        if is_complete and len(dtypes) == 1:
            entries[weight.name] = TensorEntry(weight.shape, dtypes.pop(), tuple(chunks))
    return entries


def _cut(entry: TensorEntry, firsts: Sequence[int], piece: BucketPiece) -> Iterator[StoredBox]:
    """Yield the boxes of a weight within the chunks of a bucket."""
    # `begin` to `end` is the range of one box of the weight in the flat bucket. Its overlap
    # with a chunk is a flat range of the box, which is up to three boxes for a matrix.
    begin = piece.start
    for origin, lengths in piece.boxes:
        end = begin + prod(lengths)
        for chunk in entry.chunks[bisect_right(firsts, begin) - 1 :]:
            first, last = _begin(chunk), _begin(chunk) + chunk.lengths[0]
            if first >= end:
                break
            where = (max(begin, first), min(end, last))
            inside = (where[0] - begin, where[1] - begin)
            skipped = (where[0] - first) * DTYPE_BYTES[entry.dtype]
            for box in flat_boxes(lengths, *inside):
                offsets = tuple(o + b for o, b in zip(box[0], origin, strict=True))
                yield StoredBox(chunk.file, chunk.offset + skipped, offsets, box[1])
                skipped += prod(box[1]) * DTYPE_BYTES[entry.dtype]
        begin = end


def _begin(chunk: StoredBox) -> int:
    return chunk.offsets[0]
