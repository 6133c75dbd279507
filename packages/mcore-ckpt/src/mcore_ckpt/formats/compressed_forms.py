"""Maps compressed-tensors' formats to quantized layouts, and reads its folders by them.

One table serves both directions. A ``format`` of the config stores a matrix as codes of eight
bits, or as codes packed into bytes or 32-bit words along the inputs, with a scale for the
tensor, each output, or each group. NVFP4's scales are divisors, the inverse of the unified
layout's. Folders whose layout is in the table are read with codes, scales and rounding of
inputs; other folders of compressed-tensors are dequantized (``mapping.packed_words``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt.formats.quantized_layouts import (
    INPUT_SCALE,
    LAYOUTS,
    PRE_QUANT_SCALE,
    WEIGHT_SCALE,
    WEIGHT_SCALE_2,
    QuantLayout,
)
from mcore_ckpt.formats.quantized_plans import QuantPlan
from mcore_ckpt.mapping.low_bits import pack, stored
from mcore_ckpt.mapping.packed_words import ByOutputs, word_codes
from mcore_ckpt.mapping.row_streams import Rows
from mcore_ckpt.storage.index import TensorEntry

_NAMING = {"num_bits": 8, "type": "int", "strategy": None, "block_structure": None}
"""Fields of weights and inputs that determine how numbers are stored, with their defaults."""
_UNSUPPORTED = {"weight_zero_point", "weight_g_idx"}
"""Tensors of a module that the unified layout cannot hold."""


@dataclass(frozen=True, slots=True)
class CompressedForm:
    """Format and number formats by which a compressed-tensors config describes a layout."""

    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None


def numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """Return the config's description of a number format, for weights, inputs or a cache."""
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
        **more,
    }


def form_of(layout: QuantLayout) -> CompressedForm | None:
    """Return the compressed-tensors form of a layout; None if there is no such format."""
    by_token = {"dynamic": True, "observer": None}
    groups = {"group_size": layout.group[1]}
    forms = {
        "FP8": CompressedForm(
            "float-quantized", numbers(8, "float", "tensor"), numbers(8, "float", "tensor")
        ),
        "FP8_PER_CHANNEL_PER_TOKEN": CompressedForm(
            "float-quantized",
            numbers(8, "float", "channel"),
            numbers(8, "float", "token", **by_token),
        ),
        "fp8_pb_wo": CompressedForm(
            "float-quantized",
            numbers(8, "float", "block", block_structure=[128, 128]),
            numbers(8, "float", "group", group_size=128, **by_token),
        ),
        # -1 is a whole row; vLLM's kernel for experts requires the field.
        "W8A16": CompressedForm("pack-quantized", numbers(8, "int", "channel", group_size=-1)),
        "W8A8_SQ_PER_CHANNEL": CompressedForm(
            "int-quantized", numbers(8, "int", "channel"), numbers(8, "int", "tensor")
        ),
        "W4A16_AWQ": CompressedForm("pack-quantized", numbers(4, "int", "group", **groups)),
        "W4A16_GPTQ": CompressedForm("pack-quantized", numbers(4, "int", "group", **groups)),
        "NVFP4": CompressedForm(
            "nvfp4-pack-quantized",
            numbers(4, "float", "tensor_group", **groups),
            numbers(4, "float", "tensor_group", **groups, dynamic="local"),
        ),
        "W4A16_MXFP4": CompressedForm(
            "mxfp4-pack-quantized",
            numbers(4, "float", "group", **groups, scale_dtype="torch.uint8"),
        ),
    }
    return forms.get(layout.algo)


def layout_named_by(how: Mapping[str, Any]) -> QuantLayout | None:
    """Return the layout that a ``quantization_config`` describes; None if not exactly one."""
    groups = list((how.get("config_groups") or {}).values())
    if len(groups) != 1:
        return None
    (group,) = groups
    form = group.get("format") or how.get("format")
    size = int((group.get("weights") or {}).get("group_size") or 0)
    matches = []
    for candidate in LAYOUTS.values():
        has_size = candidate.code == "int4" and size > 0
        layout = replace(candidate, group=(1, size)) if has_size else candidate
        ours = form_of(layout)
        if ours is None or ours.format != form:
            continue
        theirs = group.get("weights"), group.get("input_activations")
        if all(map(_same, (ours.weights, ours.inputs), theirs)):
            matches.append(layout)
    # AWQ and GPTQ share a form, which has no scales of inputs: prefer the layout without them.
    return min(matches, key=lambda layout: bool(layout.pre_quant_scale), default=None)


def _same(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> bool:
    if ours is None or theirs is None:
        return (ours is None) == (theirs is None)
    sizes = [max(0, one.get("group_size") or 0) for one in (ours, theirs)]
    is_alike = bool(theirs.get("symmetric", True)) and sizes[0] == sizes[1]
    is_alike &= ours["dynamic"] == (theirs.get("dynamic") or False)
    return is_alike and all(
        ours[name] == theirs.get(name, default) for name, default in _NAMING.items()
    )


class UnifiedRows:
    """Presents a compressed-tensors folder with names and codes of the unified layout.

    Attributes:
        plan: quantization of the equivalent unified folder.
    """

    def __init__(self, under: Rows, layout: QuantLayout) -> None:
        """Map names and shapes; values are read later.

        Args:
            under: tensors of the folder.
            layout: layout of all quantized matrices, for which ``form_of`` has a form.

        Raises:
            ValueError: if a tensor of a quantized matrix is missing or has another shape.
        """
        self._under, self._layout = under, layout
        form = form_of(layout)
        assert form is not None
        weights = form.weights
        block = layout.group if weights["strategy"] != "tensor" else (0, 0)
        self._scheme = ByOutputs(form=form.format, bits=weights["num_bits"], block=block)
        self._made: dict[str, Callable[[int, int], Tensor]] = {}
        self.entries: dict[str, TensorEntry] = {}
        mark = self._scheme.mark
        modules = {n.rpartition(".")[0] for n in under.entries if n.endswith(f".{mark}")}
        for name, entry in under.entries.items():
            module, _, kind = name.rpartition(".")
            if kind in ("k_scale", "v_scale"):
                one = TensorEntry((), entry.dtype, ())
                self._add(f"{module}.{kind[0]}_proj.{kind}", one, name)
            elif module not in modules or kind not in self._scheme.names:
                self.entries[name] = entry
        for module in sorted(modules):
            self._add_matrix(module)
        unquantized = [
            module
            for name, entry in self.entries.items()
            if (module := name.removesuffix(".weight")) != name
            and module not in modules
            and len(entry.shape) == 2
            and "embed" not in name
        ]
        keys = [n.removesuffix(".weight") for n in self.entries if n.endswith("k_proj.weight")]
        has_cache = bool(keys) and all(f"{key}.k_scale" in self.entries for key in keys)
        self.plan = QuantPlan(
            layout=layout, exclude_modules=tuple(unquantized), kv_cache=has_cache
        )

    @staticmethod
    def reads(under: Rows, layout: QuantLayout) -> bool:
        """Whether a folder has packed matrices and all its tensors fit the unified layout."""
        kinds = {name.rpartition(".")[2] for name in under.entries}
        heights = (e.shape[0] for n, e in under.entries.items() if n.endswith("weight_packed"))
        is_odd = layout.code == "int4" and any(height % 2 for height in heights)
        return WEIGHT_SCALE in kinds and not kinds & _UNSUPPORTED and not is_odd

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows of codes or scales in the unified layout."""
        read_rows = self._made.get(name)
        return (
            self._under.rows(name, begin, stop) if read_rows is None else read_rows(begin, stop)
        )

    def _add(
        self, name: str, entry: TensorEntry, theirs: str, *, inverse: bool = False
    ) -> None:
        """Add a tensor with the rows of a foreign tensor, possibly in another shape."""
        self.entries[name] = TensorEntry(entry.shape, entry.dtype, ())
        self._made[name] = partial(self._same_rows, theirs, entry.shape, inverse)

    def _same_rows(
        self, theirs: str, shape: tuple[int, ...], inverse: bool, begin: int, stop: int
    ) -> Tensor:
        rows = self._under.rows(theirs, begin, stop)
        rows = rows.reshape(-1, *shape[1:]) if shape else rows.reshape(())
        return rows.float().reciprocal() if inverse else rows

    def _add_matrix(self, module: str) -> None:
        layout, theirs = self._layout, self._under.entries
        rows, columns = self._scheme.shape(self._under, module)
        dtype, (tall, wide) = stored(layout.code)
        name, packed = f"{module}.weight", f"{module}.weight_packed"
        entry = TensorEntry((rows // tall, columns // wide), dtype, ())
        self._add(name, entry, packed if packed in theirs else name)
        if self._scheme.form == "pack-quantized":
            self._made[name] = partial(self._codes, module, tall, columns)
        scale = theirs[f"{module}.weight_scale"]
        # compressed-tensors stores scales of outputs as [F, 1], a scale of the tensor as [1].
        shape = {(0, 0): (), (1, 0): (rows,)}.get(layout.group, scale.shape)
        scale_entry = TensorEntry(shape, scale.dtype, ())
        self._add(f"{module}.{WEIGHT_SCALE}", scale_entry, f"{module}.weight_scale")
        for ours, kind, inverse in (
            (WEIGHT_SCALE_2, "weight_global_scale", True),
            (INPUT_SCALE, "input_global_scale", True),
            (INPUT_SCALE, "input_scale", False),
        ):
            if (source := theirs.get(f"{module}.{kind}")) is not None:
                one = TensorEntry((), "F32" if inverse else source.dtype, ())
                self._add(f"{module}.{ours}", one, f"{module}.{kind}", inverse=inverse)
        if layout.pre_quant_scale == "all":  # already folded into the layer before: ones
            pre_scale_name = f"{module}.{PRE_QUANT_SCALE}"
            self.entries[pre_scale_name] = TensorEntry((columns,), "F32", ())
            self._made[pre_scale_name] = lambda begin, stop: torch.ones(stop - begin)

    def _codes(self, module: str, tall: int, columns: int, begin: int, stop: int) -> Tensor:
        """Unpack unsigned codes from words; pack them as signed codes, ``tall`` rows a byte."""
        words = self._under.rows(f"{module}.weight_packed", begin * tall, stop * tall)
        bits = self._scheme.bits
        codes = word_codes(words, bits).flatten(1)[:, :columns] - (1 << (bits - 1))
        return pack(codes.to(torch.int8), self._layout.code)
