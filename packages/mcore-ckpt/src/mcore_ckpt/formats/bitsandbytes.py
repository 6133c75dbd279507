"""Dequantizes matrices of bitsandbytes: codes of four or eight bits with factors.

Four bits (nf4, fp4): the elements of a matrix, row by row, are divided into blocks; two codes
share a byte, the first in the high half. ``M.weight.quant_map`` has the values of the sixteen
codes, ``M.weight.absmax`` the factor of each block, or with double quantization a code of the
factor, with a second table, factors and an offset. A JSON text in a tensor of bytes has the
sizes. Eight bits: ``M.SCB`` has the largest magnitude of each row.

Reference:
    Dettmers et al. 2023, QLoRA, arXiv:2305.14314, section 3; Dettmers et al. 2022, LLM.int8(),
    arXiv:2208.07339, section 2.
"""

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.mapping.row_streams import Rows
from mcore_ckpt.storage.files import DTYPE_NAMES, DTYPES
from mcore_ckpt.storage.index import TensorEntry

_STATE = ".quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


@dataclass(frozen=True, slots=True)
class _Packed:
    """Sizes, code values and block factors of a matrix of four-bit codes."""

    shape: tuple[int, ...]
    block: int
    values: Tensor
    factors: Tensor


class BitsAndBytesRows:
    """Tensors of a bitsandbytes folder, with its matrices dequantized."""

    def __init__(self, under: Rows) -> None:
        """Read the sizes of all matrices; codes are read later.

        Raises:
            CheckpointError: if a matrix lacks a part or its JSON of sizes is damaged.
        """
        self._under = under
        self._states: dict[str, tuple[str, dict[str, Any]]] = {}
        self._held: tuple[str, _Packed] | None = None
        self.entries: dict[str, TensorEntry] = {}
        states = [name for name in under.entries if _STATE in name]
        for name in states:
            weight = name.partition(_STATE)[0]
            self._states[weight] = (name, self._described(weight, name))
        hidden = {*states, *(f"{w}.{part}" for w in self._states for part in _PARTS)}
        rows = {name for name in under.entries if name.endswith(".SCB")}
        hidden |= rows | {name.replace(".SCB", ".weight_format") for name in rows}
        for name, entry in under.entries.items():
            if name in self._states:
                state = self._states[name][1]
                dtype = DTYPE_NAMES[getattr(torch, state["dtype"])]
                self.entries[name] = TensorEntry(tuple(state["shape"]), dtype, ())
            elif _factors_of_rows(name) in rows:
                self.entries[name] = TensorEntry(entry.shape, "F16", ())
            elif name not in hidden:
                self.entries[name] = entry

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows, times their factors."""
        if (scales := _factors_of_rows(name)) in self._under.entries:
            codes = self._under.rows(name, begin, stop).float()
            return (codes * self._under.rows(scales, begin, stop)[:, None] / 127).half()
        if name not in self._states:
            return self._under.rows(name, begin, stop)
        packed = self._packed(name)
        width = prod(packed.shape[1:])
        first, last = begin * width, stop * width
        # Read the bytes that hold elements first to last: an odd first element is the low half
        # of its byte, so the high half before it is cut off.
        packed_codes = self._under.rows(name, first // 2, -(-last // 2)).flatten()
        codes = torch.stack((packed_codes >> 4, packed_codes & 15), -1).flatten()
        codes = codes[first % 2 :][: last - first]
        blocks = torch.arange(first, last) // packed.block
        wide = packed.values[codes.int()] * packed.factors[blocks]
        dtype = DTYPES[self.entries[name].dtype]
        return wide.view(stop - begin, *packed.shape[1:]).to(dtype)

    def _described(self, weight: str, name: str) -> dict[str, Any]:
        entries = self._under.entries
        text = bytes(self._under.rows(name, 0, entries[name].shape[0]).tolist())
        try:
            state = json.loads(text)
            sizes = (*state["shape"], state["blocksize"])
            is_valid = all(type(n) is int and n > 0 for n in sizes) and state["dtype"] in (
                *("float32", "float16"),
                "bfloat16",
            )
        except (ValueError, KeyError, TypeError):
            is_valid, state = False, {}
        if not is_valid or f"{weight}.absmax" not in entries or weight not in entries:
            raise CheckpointError(
                f"{name} is damaged: it must have shape, blocksize and dtype, and {weight} and "
                "its absmax must exist."
            )
        if prod(entries[weight].shape) != -(-prod(state["shape"]) // 2):
            raise CheckpointError(
                f"{weight} has {prod(entries[weight].shape)} bytes, but the shape "
                f"{state['shape']} needs {-(-prod(state['shape']) // 2)}: the folder is "
                "damaged."
            )
        return state

    def _packed(self, name: str) -> _Packed:
        if self._held is None or self._held[0] != name:
            state = self._states[name][1]
            values, factors = self._whole(f"{name}.quant_map"), self._whole(f"{name}.absmax")
            if f"{name}.nested_absmax" in self._under.entries:
                table = self._whole(f"{name}.nested_quant_map")
                outer = self._whole(f"{name}.nested_absmax")
                blocks = torch.arange(len(factors)) // state["nested_blocksize"]
                factors = table[factors.int()] * outer[blocks] + state["nested_offset"]
            shape = tuple(state["shape"])
            self._held = (
                name,
                _Packed(shape, state["blocksize"], values.float(), factors.float()),
            )
        return self._held[1]

    def _whole(self, name: str) -> Tensor:
        return self._under.rows(name, 0, self._under.entries[name].shape[0])


def _factors_of_rows(name: str) -> str:
    return f"{name.removesuffix('.weight')}.SCB" if name.endswith(".weight") else ""
