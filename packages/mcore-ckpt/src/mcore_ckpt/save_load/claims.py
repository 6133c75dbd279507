"""Claims: the boxes of each logical tensor that a rank holds, checked against its memory."""

from collections.abc import Mapping

import torch

from mcore_ckpt.storage.boxes import Box
from mcore_ckpt.storage.files import DTYPE_NAMES
from mcore_ckpt.storage.shard_plans import Claim
from mcore_parallel.sharding import Piece, Shard


def build_claims(shards: Mapping[str, Shard]) -> dict[str, Claim]:
    """Return the claims of this rank's shards; omits pieces without elements.

    Raises:
        ValueError: if a piece's memory has another shape or dtype than its shard, is on the
            meta device or is a conjugate view, or if files cannot hold its name, dtype or
            layout.
    """
    return {name: build_claim(name, shard) for name, shard in shards.items()}


def build_claim(name: str, shard: Shard) -> Claim:
    """Return the claim of one shard, as ``build_claims`` does."""
    if name == "__metadata__":
        raise ValueError(f"{name} is reserved by safetensors files: use another name.")
    for piece in shard.pieces:
        if tuple(piece.data.shape) != tuple(piece.lengths):
            raise ValueError(
                f"{name}: a piece of lengths {tuple(piece.lengths)} has memory of shape "
                f"{tuple(piece.data.shape)}"
            )
        if piece.data.dtype != shard.dtype:
            raise ValueError(f"{name}: a {shard.dtype} shard has a piece of {piece.data.dtype}")
        if piece.data.is_meta:
            raise ValueError(
                f"{name} is on the meta device, which holds no numbers: give the model "
                "memory first, such as by model.to_empty(device=...)."
            )
        if piece.data.layout is not torch.strided:
            raise ValueError(
                f"{name}: {piece.data.layout} tensors cannot be saved: give a dense (strided) "
                "tensor."
            )
        if piece.data.is_conj() or piece.data.is_neg():
            raise ValueError(
                f"{name} is a conjugate or negative view, whose memory has other values: give "
                "its resolve_conj().resolve_neg()."
            )
    if shard.dtype not in DTYPE_NAMES:
        raise ValueError(f"{name}: safetensors files have no {shard.dtype}")
    boxes = tuple(piece_box(piece) for piece in shard.pieces if 0 not in piece.lengths)
    return Claim(tuple(shard.shape), DTYPE_NAMES[shard.dtype], shard.is_owner, boxes)


def piece_box(piece: Piece) -> Box:
    """Return offsets and lengths of a piece."""
    return tuple(piece.offsets), tuple(piece.lengths)
