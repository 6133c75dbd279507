"""Digests of tensors: ranks compare one integer instead of exchanging a tensor."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Int, Shaped
from torch import Tensor

from mcore_parallel.collectives import all_gather
from mcore_parallel.mesh import Axis

PART_BYTES = 1 << 26
"""Bytes of temporary memory for a digest, unless a single row of the tensor is larger."""

_WIDTH = 1024
_MIX = 0x1B873593_CC9E2D51  # an odd number with irregular bits


def digest(x: Shaped[Tensor, "..."]) -> Int[Tensor, ""]:
    """Return a digest of a tensor: its bytes as 64-bit integers, weighted by position, summed.

    Computed on the tensor's device, modulo 2**64, in one pass. Equal tensors have equal digests
    on any device and with any strides; a permutation of the elements changes the digest.
    """
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in in_parts(x.detach()):
        total = total * _MIX + _digest_of_words(_words(part))
    return total


def unlike_tensors(
    tensors: Sequence[tuple[str, Tensor]], axis: Axis
) -> list[tuple[str, list[int]]]:
    """Compare tensors over an axis by their digests: one all-gather; the host waits for it.

    Args:
        tensors: names and tensors, in the same order on all ranks.
        axis: the ranks to compare.

    Returns:
        For each tensor that differs, its name and every rank's digest; equal on all ranks.
    """
    if axis.size == 1 or not tensors:
        return []
    digests = torch.stack([digest(x) for _, x in tensors])
    columns = all_gather(digests[None], axis).t().tolist()  # [n] -> [ranks, n] -> [n, ranks]
    return [
        (name, column)
        for (name, _), column in zip(tensors, columns, strict=True)
        if len(set(column)) > 1
    ]


def in_parts(x: Shaped[Tensor, "..."]) -> Iterator[Shaped[Tensor, " n"]]:
    """Yield a tensor as flat, contiguous parts of some rows; equal shapes give equal cuts."""
    rows = x if x.dim() else x.view(1)
    if not rows.numel():
        return
    num_rows = max(1, PART_BYTES // (rows[0].numel() * x.element_size()))
    for part in rows.split(num_rows):
        yield part.contiguous().view(-1)


def _words(part: Shaped[Tensor, " n"]) -> Int[Tensor, " words"]:
    """Return a tensor's bytes as 64-bit integers: a view if aligned, else a padded copy."""
    content = part.view(torch.uint8)
    if len(content) % 8:
        content = F.pad(content, (0, 8 - len(content) % 8))
    elif content.storage_offset() % 8:
        content = content.clone()
    return content.view(torch.int64)


def _digest_of_words(words: Int[Tensor, " words"]) -> Int[Tensor, ""]:
    """Combine the weighted sums of rows and columns of the words, and of the remainder."""
    full = len(words) // _WIDTH * _WIDTH
    square, remainder = words[:full].view(-1, _WIDTH), words[full:]
    total = _weighted(square.sum(1))
    for sums in (square.sum(0), remainder):
        total = total * _MIX + _weighted(sums)
    return total


def _weighted(x: Int[Tensor, " n"]) -> Int[Tensor, ""]:
    return (x * (2 * torch.arange(len(x), device=x.device) + 1)).sum()
