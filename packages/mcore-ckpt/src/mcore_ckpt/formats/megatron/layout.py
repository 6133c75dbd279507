"""Computes the position of each weight in the buckets of Megatron's distributed optimizer.

The optimizer's memory consists of buckets: weights of one model rank from the last to the
first, each starting at a multiple of 64 elements. The contents follow from the order in which
modules create weights and from the sizes of the buckets; all functions here are pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from mcore_ckpt.mapping.row_streams import Rows
from mcore_ckpt.mapping.rules import Link, split_index
from mcore_ckpt.storage.boxes import Box
from mcore_ckpt.storage.index import TORCH_WORDS

_ALIGNMENT = 64
"""The start of a weight is a multiple of this many elements."""

_PLACES = (
    *("embedding.word_embeddings.", "embedding.position_embeddings."),
    *("self_attention.linear_proj.", "self_attention.linear_qkv.layer_norm_"),
    *("self_attention.linear_qkv.", "self_attention.q_layernorm."),
    *("self_attention.k_layernorm.", "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    *("mlp.linear_fc1.", "mlp.linear_fc2.", "mlp.router.", "mlp.experts."),
    *("mlp.shared_experts.gate_weight", "mlp.shared_experts.linear_fc1."),
    *("mlp.shared_experts.linear_fc2.", "decoder.final_layernorm.", "output_layer."),
)
"""Names of weights in the order in which Megatron's modules create them; then the biases."""

_OWN_NORM = "self_attention.linear_qkv.layer_norm_"
_LAYERS = "decoder.layers."
_FIRST = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_BY_ROWS = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")
_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight in Megatron's files, with its position in the model and its split over ranks."""

    name: str
    """Name in Megatron's files, with indices in brackets."""
    shape: tuple[int, ...]
    dtype: str
    stem: str
    """The name without the layer and its prefix."""
    layer: int
    """-1: before the first layer; a large number: after the last."""
    expert: int
    """-1: belongs to no expert."""
    cut: int
    """Dimension that is split over tensor parallelism; -1: replicated."""
    halves: int
    """Equal parts along dimension ``cut`` that are split separately, such as gate and up."""

    def boxes(self, rank: int, count: int) -> tuple[Box, ...]:
        """Return a rank's boxes in the order of its memory; empty if the split is uneven."""
        if self.cut < 0 or count == 1:
            return (((0,) * len(self.shape), self.shape),)
        half, rest = divmod(self.shape[self.cut], self.halves)
        length, more = divmod(half, count)
        if rest or more:
            return ()
        lengths = (*self.shape[: self.cut], length, *self.shape[self.cut + 1 :])
        zeros = [0] * len(self.shape)
        boxes = []
        for begin in range(rank * length, self.halves * half, half):
            offsets = [*zeros[: self.cut], begin, *zeros[self.cut + 1 :]]
            boxes.append((tuple(offsets), lengths))
        return tuple(boxes)


@dataclass(frozen=True, slots=True)
class Order:
    """Differences between Megatron's implementations of a layer."""

    norm_first: bool
    """The norm before attention is a separate module, created first, not part of ``qkv``."""
    by_matrix: bool
    """First matrices of all experts precede all second matrices, instead of expert by
    expert."""

    def key(self, weight: Weight) -> tuple[int, ...]:
        """Return the sort key of a stage's weights."""
        stem, is_bias = weight.stem, weight.stem.endswith("bias")
        place = next((i for i, s in enumerate(_PLACES) if stem.startswith(s)), len(_PLACES))
        if self.norm_first and stem.startswith(_OWN_NORM):
            place = -1
        matrix = int("linear_fc2" in stem)
        by_matrix_key = (matrix, is_bias, weight.expert)
        inner = by_matrix_key if self.by_matrix else (weight.expert, matrix, is_bias)
        return (weight.layer, place, *inner)


@dataclass(frozen=True, slots=True)
class Degrees:
    """Numbers of ranks along each parallel dimension."""

    tp: int
    pp: int
    etp: int
    ep: int


@dataclass(frozen=True, slots=True)
class StateBucket:
    """Flat tensors of equal size, by kind of state."""

    size: int
    names: dict[str, str]


Chunks = list[dict[str, list[StateBucket]]]
"""Model chunks of a rank; each maps dtypes to buffers."""


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """Part of a weight in a bucket."""

    bucket: StateBucket
    start: int
    boxes: tuple[Box, ...]


def placed_weights(links: Iterable[Link], weights: Rows) -> list[Weight]:
    """Return each weight with its position in Megatron's modules."""
    placed = []
    for link in links:
        stem, index = split_index(link.theirs)
        layer, numbers = (-1 if stem in _FIRST else 1 << 30), list(index)
        if stem.startswith(_LAYERS):
            stem = stem.removeprefix(_LAYERS)
            if stem[0].isdigit():
                number, _, stem = stem.partition(".")
                numbers.insert(0, int(number))
            layer = numbers.pop(0)
        rows = stem in (_FIRST[0], "output_layer.weight") or stem.endswith(_BY_ROWS)
        placed.append(
            Weight(
                link.theirs,
                weights.entries[link.theirs].shape,
                TORCH_WORDS[weights.entries[link.theirs].dtype],
                stem,
                layer,
                numbers[0] if numbers else -1,
                0 if rows else 1 if stem.endswith(_BY_COLUMNS) else -1,
                2 if ".linear_fc1." in stem and len(link.ours) == 2 else 1,
            )
        )
    return placed


def laid_out(
    order: Order,
    weights: Sequence[Weight],
    held: Mapping[int, Mapping[int, Chunks]],
    sizes: Degrees,
) -> dict[str, list[BucketPiece]] | None:
    """Return the pieces of each weight in the buckets; None if buckets are not filled exactly.

    Args:
        order: order in which modules create weights.
        weights: all weights that the optimizer updates.
        held: buckets of each optimizer (0: dense, 1: experts') and each of its ranks.
        sizes: sizes of the parallel groups.
    """
    has_expert_buckets = 1 in held
    dense = sorted(
        (w for w in weights if not has_expert_buckets or w.expert < 0), key=order.key
    )
    experts = sorted(
        (w for w in weights if has_expert_buckets and w.expert >= 0), key=order.key
    )
    stages = _stages(dense, held[0], sizes)
    if stages is None:
        return None
    pieces: dict[str, list[BucketPiece]] = {}
    for (chunk, stage), mine in stages.items():
        for rank in range(sizes.tp):
            chunks = held[0][stage * sizes.tp + rank]
            fits = chunk < len(chunks) and _fill(chunks[chunk], mine, rank, sizes.tp, pieces)
            if not fits:
                return None
    layers = {where: {w.layer for w in mine} for where, mine in stages.items()}
    spread = product(range(sizes.pp), range(sizes.ep), range(sizes.etp))
    experts_per_rank = 1 + max((w.expert for w in experts), default=0) // sizes.ep
    for rank, (stage, group, cut) in enumerate(spread):
        mine = [w for w in experts if w.expert // experts_per_rank == group]
        parts = [
            [w for w in mine if w.layer in layers[chunk, stage]]
            for chunk in range(len(layers) // sizes.pp)
        ]
        # A chunk without experts has no buffer for them.
        parts = [part for part in parts if part]
        chunks = held.get(1, {}).get(rank, [])
        if len(parts) != len(chunks):
            return None
        for buffers, part in zip(chunks, parts, strict=True):
            if not _fill(buffers, part, cut, sizes.etp, pieces):
                return None
    return pieces


def _stages(
    weights: Sequence[Weight], ranks: Mapping[int, Chunks], sizes: Degrees
) -> dict[tuple[int, int], list[Weight]] | None:
    """Return the weights of each chunk and stage that fill its buckets; None: impossible."""
    num_chunks = len(ranks[0])
    num_layers = 1 + max((w.layer for w in weights if w.layer < 1 << 30), default=-1)
    # The last of several stages holds a copy of a tied embedding.
    has_copy = sizes.pp > 1 and all(w.stem != "output_layer.weight" for w in weights)
    copies = [w for w in weights if w.stem == _FIRST[0]] if has_copy else []
    stages: dict[tuple[int, int], list[Weight]] = {}
    layer = 0
    for chunk, stage in product(range(num_chunks), range(sizes.pp)):
        is_last = (chunk, stage) == (num_chunks - 1, sizes.pp - 1)
        ends = range(num_layers if is_last else layer, num_layers + 1)
        chunks = ranks[stage * sizes.tp]
        for end in ends:
            first = -1 if not stages else layer
            chunk_weights = [
                w for w in weights if first <= w.layer < (1 << 31 if is_last else end)
            ]
            chunk_weights += copies if is_last else []
            if chunk < len(chunks) and _fill(chunks[chunk], chunk_weights, 0, sizes.tp, {}):
                stages[chunk, stage], layer = chunk_weights, end
                break
        else:
            return None
    return stages


def _fill(
    buffers: Mapping[str, list[StateBucket]],
    weights: Sequence[Weight],
    rank: int,
    count: int,
    pieces_of: dict[str, list[BucketPiece]],
) -> bool:
    """Assign weights to a chunk's buffers, last weight first; False if they do not fit."""
    if {w.dtype for w in weights} != buffers.keys():
        return False
    for dtype, buckets in buffers.items():
        buffer_weights = [w for w in reversed(weights) if w.dtype == dtype]
        boxes = [w.boxes(rank, count) for w in buffer_weights]
        sizes = [sum(prod(lengths) for _, lengths in boxes_of_one) for boxes_of_one in boxes]
        starts = bucket_starts(sizes, [bucket.size for bucket in buckets])
        if starts is None or not all(boxes):
            return False
        for weight, boxes_of_weight, (number, start) in zip(
            buffer_weights, boxes, starts, strict=True
        ):
            pieces = pieces_of.setdefault(weight.name, [])
            # Replicated boxes are taken from the first rank.
            if boxes_of_weight not in [piece.boxes for piece in pieces]:
                pieces.append(BucketPiece(buckets[number], start, boxes_of_weight))
    return True


def bucket_starts(sizes: Sequence[int], buckets: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return bucket and start of each weight; None if the weights do not fill the buckets."""
    starts = []
    number = end = 0
    for size in sizes:
        start = _aligned(end)
        # A bucket ends with a weight, or at the aligned start of the next weight.
        if end and number < len(buckets) and buckets[number] in (end, start):
            number, start = number + 1, 0
        end = start + size
        if number == len(buckets) or end > buckets[number]:
            return None
        starts.append((number, start))
    is_full = number == len(buckets) - 1 and buckets[number] in (end, _aligned(end))
    return starts if is_full else None


def _aligned(start: int) -> int:
    return -(-start // _ALIGNMENT) * _ALIGNMENT
