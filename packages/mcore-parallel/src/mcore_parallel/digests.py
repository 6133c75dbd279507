"""Digests of tensors: ranks compare one integer instead of exchanging a tensor."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Int, Shaped
from torch import Tensor

PART_BYTES = 1 << 26
"""Temporary memory of a digest, unless a single row of the tensor is larger."""

_WIDTH = 1024
_MIX = 0x1B873593_CC9E2D51  # any odd number with bits all over


def digest(x: Shaped[Tensor, "..."]) -> Int[Tensor, ""]:
    """Return a digest of a tensor: its bytes as 64-bit integers, weighted by position, summed.

    Computed on the tensor's device, modulo 2**64, in one pass. Equal tensors have equal digests
    on any device, whatever their strides; a permutation of the elements changes the digest.
    """
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in in_parts(x.detach()):
        total = total * _MIX + _digest_of_words(_words(part))
    return total


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
    square, rest = words[:full].view(-1, _WIDTH), words[full:]
    total = _weighted(square.sum(1))
    for sums in (square.sum(0), rest):
        total = total * _MIX + _weighted(sums)
    return total


def _weighted(x: Int[Tensor, " n"]) -> Int[Tensor, ""]:
    return (x * (2 * torch.arange(len(x), device=x.device) + 1)).sum()
