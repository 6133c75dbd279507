"""Describes DTensors and plain torch tensors as shards.

A DTensor is one box on each rank. FSDP2 splits a parameter along dimension 0, like
``torch.chunk``; combined with tensor parallelism, the tensor ranks split first, which torch
expresses by a strided placement.

Zhao et al. 2023, arXiv:2304.11277; torch.distributed.tensor for the placements.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Piece, Shard


def tensor_shards(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Shard]:
    """Describe DTensors and plain tensors; pieces are this rank's local memory.

    Args:
        tensors: tensors by name, such as a ``state_dict()``. A plain tensor counts as a
            complete copy on each rank.
        prefix: prepended to each name.

    Raises:
        ValueError: for a DTensor that is neither sharded nor replicated along some mesh
            dimension, and for values that are no tensors.
    """
    shards = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{prefix}{name} is a {type(tensor).__name__}, and only tensors are saved: "
                "move it to extra."
            )
        if isinstance(tensor, DTensor):
            shards[prefix + name] = _shard(prefix + name, tensor)
        else:
            shape = tuple(tensor.shape)
            piece = Piece((0,) * tensor.dim(), shape, tensor.detach())
            shards[prefix + name] = Shard(shape, tensor.dtype, (piece,))
    return shards


def _shard(name: str, tensor: DTensor) -> Shard:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Shard(tuple(tensor.shape), tensor.dtype, ())
    offsets, lengths = [0] * tensor.dim(), list(tensor.shape)
    replicas = []
    cuts = []
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            replicas.append(_axis(mesh, dim))
        elif placement.is_shard() or hasattr(placement, "split_factor"):
            cuts.append((dim, placement))
        else:
            raise ValueError(
                f"{name} is {placement} over {mesh}, but only sharded and replicated tensors "
                "can be saved: redistribute it first."
            )
    # A strided shard is applied after those of the mesh dimensions that follow it.
    cuts.sort(key=lambda cut: hasattr(cut[1], "split_factor"))
    for dim, placement in cuts:
        tensor_dim: int = placement.dim  # pyrefly: ignore
        # Like torch.chunk: each rank gets ceil(length / ranks) rows, the last ones fewer.
        chunk = -(-lengths[tensor_dim] // mesh.size(dim))
        begin = min(coordinate[dim] * chunk, lengths[tensor_dim])
        offsets[tensor_dim] += begin
        lengths[tensor_dim] = min(chunk, lengths[tensor_dim] - begin)
    local = tensor.to_local().detach()
    if tuple(local.shape) != tuple(lengths):
        raise ValueError(
            f"{name}: this rank holds a tensor of shape {tuple(local.shape)}, but "
            f"{tensor.placements} requires {tuple(lengths)}"
        )
    piece = Piece(tuple(offsets), tuple(lengths), local)
    return Shard(tuple(tensor.shape), tensor.dtype, (piece,), tuple(replicas))


def _axis(mesh: DeviceMesh, dim: int) -> Axis:
    group = mesh.get_group(dim)
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    names = mesh.mesh_dim_names
    name = names[dim] if names else f"mesh_{dim}"
    size = len(ranks)
    return Axis(name, size, mesh.get_local_rank(dim), group if size > 1 else None, ranks)
