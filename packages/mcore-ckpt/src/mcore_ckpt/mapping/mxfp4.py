"""Experts in MXFP4, as gpt-oss is published: four bits a number, a power of two for each 32.

``X_blocks`` ``[E, out, in/32, 16]`` holds two numbers a byte, the even one in its low half, and
``X_scales`` ``[E, out, in/32]`` the exponent of each block plus 127.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mcore_ckpt.mapping.low_bits import decode, unpack
from mcore_ckpt.mapping.row_streams import Rows
from mcore_ckpt.mapping.rules import split_index
from mcore_ckpt.storage.files import DTYPES
from mcore_ckpt.storage.index import TensorEntry

_BLOCKS, _SCALES = "_blocks", "_scales"


class UnpackedMxfp4:
    """Each expert as a floating-point matrix ``X[e]`` ``[in, out]`` instead of codes.

    Reference:
        Open Compute Project 2023, Microscaling Formats (MX) Specification 1.0, section 5.3.3.
    """

    def __init__(self, under: Rows, dtype: str = "BF16") -> None:
        self._under, self._dtype = under, dtype
        self.entries: dict[str, TensorEntry] = {}
        for name, entry in under.entries.items():
            stem = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
            if stem == name:
                self.entries[name] = entry
            elif name.endswith(_BLOCKS):
                self._add(stem, entry, under.entries)
            elif stem + _BLOCKS not in under.entries:
                raise ValueError(f"{name} is the scale of a tensor that is missing.")

    def _add(self, stem: str, blocks: TensorEntry, entries: Mapping[str, TensorEntry]) -> None:
        scales = entries.get(stem + _SCALES)
        fits = len(blocks.shape) == 4 and blocks.shape[3] == 16 and blocks.dtype == "U8"
        if not fits or scales is None or scales.shape != blocks.shape[:3]:
            held = "absent" if scales is None else f"{list(scales.shape)}"
            raise ValueError(
                f"{stem}{_BLOCKS} of shape {list(blocks.shape)} must be [experts, out, in/32, "
                f"16] bytes, and its scales the same without the last; they are {held}."
            )
        experts, rows, groups, _ = blocks.shape
        for expert in range(experts):
            shape = (32 * groups, rows)
            self.entries[f"{stem}[{expert}]"] = TensorEntry(shape, self._dtype, ())

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows; unpacks the complete matrix of the expert."""
        if name in self._under.entries:
            return self._under.rows(name, begin, stop)
        stem, (expert,) = split_index(name)
        packed = self._under.rows(stem + _BLOCKS, expert, expert + 1)[0]
        exponents = self._under.rows(stem + _SCALES, expert, expert + 1)[0]
        codes = unpack(packed.flatten(1), "e2m1").unflatten(1, (-1, 32))  # [out, in/32, 32]
        wide = torch.ldexp(decode(codes, "e2m1"), exponents.int().unsqueeze(-1) - 127)
        return wide.flatten(1).t()[begin:stop].to(DTYPES[self._dtype]).contiguous()
