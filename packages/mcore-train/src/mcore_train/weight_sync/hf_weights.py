"""Assembles Hugging Face tensors of a run on one rank, in buckets, from any training layout.

Names, shapes and bytes are equal to those of ``mcore-ckpt convert``, which uses the same tables
of families. The transfers between ranks are planned once; a bucket is one or a few all-to-alls.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt.config import RetentionConfig
from mcore_ckpt.families import family_for, find_family
from mcore_ckpt.mapping.row_streams import HeldRows
from mcore_ckpt.mapping.rules import Link, expand, match_ours, split_index
from mcore_ckpt.mapping.views import stacked_items, their_items
from mcore_ckpt.save_load.hf_saving import hf_view
from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.save_load.tensor_exchange import Move
from mcore_ckpt.save_load.weight_transfer import WeightTransfer
from mcore_ckpt.storage.files import DTYPE_NAMES, DTYPES, Item
from mcore_ckpt.storage.index import TensorEntry
from mcore_ckpt.storage.shard_plans import Write
from mcore_models.peft.config import is_adapter
from mcore_parallel.digests import digest
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Piece, Shard
from mcore_train.weight_sync.engine_sync import ReadWeights

BUCKET_BYTES = 1 << 30
"""Largest number of bytes of a bucket; a single tensor may be larger."""

_PREFIX = "model."
_MIX = 0x9E3779B97F4A7C15  # odd multiplier, 2**64 over the golden ratio
_ROOT = 0  # rank that assembles tensors

NamedTensors = list[tuple[str, Tensor]]
"""Tensors with their Hugging Face names."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    links: Sequence[Link]
    ours: Sequence[str]
    """Logical tensors of the links, with the prefix ``model.``."""
    moves: Sequence[Move[Write]]


class HFWeights:
    """Tensors of a run with Hugging Face names and layouts.

    Attributes:
        world: ranks of training.
        model_type: family of the tensors' names.
        device: device of the assembled tensors.
        is_root: whether this rank assembles the tensors.
    """

    def __init__(
        self,
        weights: ReadWeights,
        description: Mapping[str, Any],
        world: Axis,
        *,
        model_type: str = "",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Plan the transfers; collective over ``world``.

        Args:
            weights: weights of this rank.
            description: ``model_description`` of a plan.
            world: ranks of training; the first rank assembles tensors.
            model_type: Hugging Face family; empty: the first family that can express the model.
            bucket_bytes: largest memory of a bucket.

        Raises:
            ValueError: if no family can express the model, or the model has adapters that are
                not merged.
        """
        shards = weights()
        if adapters := [name for name in shards if is_adapter(name)]:
            raise ValueError(
                f"--peft: the model has adapters ({adapters[0]}), which a server cannot load "
                "as weights. Merge them with mcore-ckpt convert, or push to an engine of "
                "mcore-infer."
            )
        self.world, self._weights = world, weights
        self.model_type = model_type or family_for(dict(description))
        self.is_root = world.rank == _ROOT
        links = expand(find_family(self.model_type).table(dict(description)))
        tensors = _all_tensors(shards, world)
        match_ours(links, {name.removeprefix(_PREFIX): t for name, t in tensors.items()})
        # Expanded tensors describe shapes without memory; ``buckets`` allocates one bucket at a
        # time.
        described = {
            name: _whole(torch.empty(1, dtype=DTYPES[entry.dtype]).expand(entry.shape))
            for name, entry in tensors.items()
        }
        self._transfer = WeightTransfer.plan(
            shards, described if self.is_root else {}, world=world
        )
        self.device = self._transfer.device
        self._tensors = tensors
        self._buckets = _split(links, tensors, self._transfer.moves, bucket_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self._tensors.values())

    def buckets(self) -> Iterator[NamedTensors]:
        """Yield the tensors in buckets; collective.

        The memory of a bucket may be reused after the next bucket is requested. On ranks other
        than the first, buckets are empty.
        """
        shards = self._weights()
        for bucket in self._buckets:
            ours: dict[str, Tensor] = {}
            if self.is_root:
                for name in bucket.ours:
                    entry = self._tensors[name]
                    dtype = DTYPES[entry.dtype]
                    ours[name] = torch.empty(entry.shape, dtype=dtype, device=self.device)
            target = {name: _whole(tensor) for name, tensor in ours.items()}
            self._transfer.run(shards, target, moves=bucket.moves)
            yield _convert(bucket.links, ours) if self.is_root else []


def save_weights_folder(
    run_folder: str | Path,
    version: int,
    weights: ReadWeights,
    description: Mapping[str, Any],
    world: Axis,
    *,
    keep: int = 2,
) -> Path:
    """Write a version of the weights as a Hugging Face folder; return the folder.

    Collective over ``world``. The complete folder is renamed into ``run_folder``.

    Args:
        run_folder: folder of all versions.
        version: number of these weights.
        weights: weights of this rank.
        description: ``model_description`` of a plan.
        world: ranks of training.
        keep: number of newest versions to keep; older ones are deleted.

    Raises:
        ValueError: if the family does not store rows unchanged: use ``mcore-ckpt convert``.
        CheckpointError: if the version exists.
    """
    return save(
        run_folder,
        version,
        weights(),
        world=world,
        extra={"model": dict(description)},
        hf=hf_view(dict(description)),
        retention=RetentionConfig(save_retain_last=keep),
    )


def combined_digest(total: int, tensors: NamedTensors) -> int:
    """Add named tensors, in order, to a digest that starts at 0; waits for the device."""
    for name, tensor in tensors:
        words = f"{name} {tensor.dtype} {list(tensor.shape)}"
        total = (total * _MIX + zlib.crc32(words.encode())) % 2**64
        total = (total * _MIX + int(digest(tensor).item())) % 2**64
    return total


class _OnDevice(HeldRows):
    """Rows of tensors in memory; they remain on their device."""

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        tensor = self.tensors[name]
        return tensor[begin:stop] if tensor.dim() else tensor


def _convert(links: Sequence[Link], ours: Mapping[str, Tensor]) -> NamedTensors:
    """Stack, transpose and rename logical tensors to Hugging Face tensors."""
    rows = _OnDevice({name.removeprefix(_PREFIX): tensor for name, tensor in ours.items()})
    items = stacked_items(their_items(links, rows))
    return [(item.name, _join(item)) for item in items]


def _join(item: Item) -> Tensor:
    """Return an item as one contiguous tensor; an item of one slab is not copied."""
    slabs = [slab.reshape(-1) for slab in item.slabs()]
    flat = slabs[0] if len(slabs) == 1 else torch.cat(slabs)
    return flat.view(item.shape)


def _all_tensors(shards: Mapping[str, Shard], world: Axis) -> dict[str, TensorEntry]:
    """Gather shape and dtype of the tensors of all ranks."""
    local = {name: [list(s.shape), DTYPE_NAMES[s.dtype]] for name, s in shards.items()}
    return {
        name: TensorEntry(tuple(shape), dtype, ())
        for rank_tensors in gather_json(local, world)
        for name, (shape, dtype) in rank_tensors.items()
    }


def _whole(tensor: Tensor) -> Shard:
    """Return a shard that holds a complete tensor."""
    shape = tuple(tensor.shape)
    return Shard(shape, tensor.dtype, (Piece((0,) * len(shape), shape, tensor),))


def _split(
    links: Sequence[Link],
    tensors: Mapping[str, TensorEntry],
    moves: Sequence[Move[Write]],
    bucket_bytes: int,
) -> list[_Bucket]:
    """Divide links, in order, into buckets; links of a stacked tensor share a bucket."""
    parts: list[list[Link]] = []
    size = 0
    for _, group in groupby(links, key=lambda link: split_index(link.theirs)[0]):
        together = list(group)
        more = sum(tensors[_PREFIX + n].num_bytes for link in together for n in link.ours)
        if not parts or size + more > bucket_bytes:
            parts.append([])
            size = 0
        parts[-1] += together
        size += more
    number_of = {
        _PREFIX + name: number
        for number, part in enumerate(parts)
        for link in part
        for name in link.ours
    }
    moves_of: list[list[Move[Write]]] = [[] for _ in parts]
    for move in moves:
        moves_of[number_of[move.key.name]].append(move)
    names = [[_PREFIX + name for link in part for name in link.ours] for part in parts]
    return [_Bucket(*fields) for fields in zip(parts, names, moves_of, strict=True)]
