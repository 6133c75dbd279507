"""Quantized matrices in the format of TensorRT-LLM's engine flow.

A fused matrix with one scale gets the largest scale of its parts, and the codes of the other
parts are rescaled. Scales of outputs are split with the outputs, scales of inputs and of groups
with the inputs; scalars are on every rank.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt.formats.quantization import WidenedRows
from mcore_ckpt.formats.quantized_layouts import (
    INPUT_SCALE,
    KV_SCALES,
    PRE_QUANT_SCALE,
    WEIGHT_SCALE,
    QuantLayout,
)
from mcore_ckpt.mapping.rules import Link
from mcore_ckpt.storage.files import Item
from mcore_infer.export.parts import RecordedRows, TensorRange, build_item
from mcore_infer.export.trtllm_model import INSTEAD, RankGrid, RankSizes
from mcore_infer.export.trtllm_tensors import MatrixSlice, PlainLinears, num_inputs, num_outputs

PLAIN: Mapping[str, Any] = {
    "quant_algo": None,
    "kv_cache_quant_algo": None,
    "group_size": 128,
    "smoothquant_val": 0.5,
    "clamp_val": None,
    "has_zero_point": False,
    "pre_quant_scale": False,
    "exclude_modules": None,
}
"""The entry ``quantization`` of a checkpoint that is not quantized."""

_NEVER_QUANTIZED = ("lm_head", "*router", "*vocab_embedding", "*position_embedding")
_WEIGHT = ".weight"
_IN_LAYER = re.compile(r"blocks\.(\d+)\.(.+)")
_NAMES = {
    **dict.fromkeys((f"attention.qkv.{part}" for part in "qkv"), "attention.qkv"),
    "attention.proj": "attention.dense",
    "mlp.fc1": "mlp.fc",
    "mlp.fc1.gate": "mlp.fc",
    "mlp.fc1.up": "mlp.gate",
    "mlp.fc2": "mlp.proj",
}


@dataclass(frozen=True, slots=True)
class QuantizedLinears:
    """Lists the codes and scales of quantized matrices, and other matrices as plain weights."""

    plain: PlainLinears
    """Writes the matrices that are not quantized, or that the engine quantizes."""
    widened: WidenedRows
    """The source's tensors, by their names in the source."""
    modules: Mapping[str, str]
    """The source's module of each logical matrix, without ``.weight``."""
    noted: RecordedRows
    """Records the logical tensors that were written as codes."""

    def items(self, name: str, shares: Sequence[MatrixSlice]) -> list[Item]:
        """List the items of a linear: codes and scales, or plain weights.

        Raises:
            ValueError: if parts of a fused matrix are quantized in different ways, or the ranks
                cut a group of inputs.
        """
        is_rounded = [self.is_rounded(share.stem) for share in shares]
        if not any(is_rounded) or self.widened.plan.layout.algo == "W8A16":
            return self.plain.items(name, shares)
        algos = {self.layout(share.stem).algo for share in shares}
        if not all(is_rounded) or len(algos) > 1:
            pairs = zip(shares, is_rounded, strict=True)
            names = [share.stem for share, rounded in pairs if rounded]
            raise ValueError(
                f"{name} is one matrix in --format trtllm, but the source quantized only its "
                f"parts {', '.join(names)}, by {', '.join(sorted(algos))}. {INSTEAD}"
            )
        self.noted.read.update(share.stem + _WEIGHT for share in shares)
        return _WRITERS[algos.pop()](self, name, shares)

    def cache_items(self, name: str, stem: str) -> list[Item]:
        """List the cache's only scale: the larger of the scales of keys and of values."""
        if not self.widened.plan.kv_cache:
            return []
        names = [
            f"{self.modules[f'{stem}.{part}']}.{kind.partition('.')[2]}"
            for part, kind in zip("kv", KV_SCALES, strict=True)
        ]
        top = max(self._number(one) for one in names)
        return [_number_item(f"{name}.kv_cache_scaling_factor", top)]

    def is_rounded(self, stem: str) -> bool:
        """Whether a logical matrix is quantized."""
        return self.widened.is_quantized(self.modules[stem] + _WEIGHT)

    def layout(self, stem: str) -> QuantLayout:
        """Return the layout of a quantized logical matrix."""
        return self.widened.plan.of(self.modules[stem])

    def number(self, stem: str, kind: str) -> float:
        """Read a scalar scale."""
        return self._number(f"{self.modules[stem]}.{kind}")

    def _number(self, name: str) -> float:
        return self.widened.stored.rows(name, 0, 1).float().item()

    def codes(
        self,
        name: str,
        dtype: str,
        shares: Sequence[MatrixSlice],
        factors: Sequence[float] = (),
    ) -> Item:
        """Return the item of the codes of all shares; int4 has two outputs in a byte."""
        outputs_per_row = 2 if self.layout(shares[0].stem).code == "int4" else 1
        for share in shares:
            if share.rows[0] % outputs_per_row or share.rows[1] % outputs_per_row:
                raise ValueError(
                    f"{name}: two outputs share a byte, and the ranks cut between them (rows "
                    f"{share.rows}): use a smaller --tensor-parallel-size."
                )
        parts = [
            TensorRange(
                self.modules[share.stem] + _WEIGHT,
                (share.rows[0] // outputs_per_row, share.rows[1] // outputs_per_row),
                share.columns,
                factor=factor,
            )
            for share, factor in zip(shares, factors or [1.0] * len(shares), strict=True)
        ]
        shape = (num_outputs(shares) // outputs_per_row, num_inputs(shares[0], self.plain.rows))
        return build_item(name + _WEIGHT, dtype, shape, parts, self.widened.stored)

    def output_scales(self, name: str, shares: Sequence[MatrixSlice]) -> Item:
        """Return the item of the scales of outputs, one for each output."""
        parts = [TensorRange(f"{self.modules[s.stem]}.{WEIGHT_SCALE}", s.rows) for s in shares]
        return build_item(name, "F32", (num_outputs(shares),), parts, self.widened.stored)

    def group_scales(self, name: str, shares: Sequence[MatrixSlice]) -> Item:
        """Return the item of the scales for each output and each group of inputs."""
        size = self.layout(shares[0].stem).group[1]
        inputs = self.plain.rows.entries[shares[0].stem + _WEIGHT].shape[1]
        first, last = shares[0].columns or (0, inputs)
        if first % size or last % size:
            raise ValueError(
                f"{name}: {size} inputs share a scale, and the ranks cut between them (columns "
                f"{first} to {last}): use a smaller --tensor-parallel-size, or quantize with a "
                "smaller group."
            )
        groups = (first // size, last // size)
        parts = [
            TensorRange(f"{self.modules[share.stem]}.{WEIGHT_SCALE}", share.rows, groups)
            for share in shares
        ]
        shape = (num_outputs(shares), groups[1] - groups[0])
        return build_item(name, "F32", shape, parts, self.widened.stored)

    def input_scales(self, name: str, shares: Sequence[MatrixSlice]) -> Item:
        """Return the item of the factors on inputs; ones if a norm absorbed the factors."""
        stored = self.widened.stored
        names = [f"{self.modules[share.stem]}.{PRE_QUANT_SCALE}" for share in shares]
        width = num_inputs(shares[0], self.plain.rows)
        if not any(scale in stored.entries for scale in names):
            return Item(name, "F32", (width,), partial(_ones, width))
        inputs = stored.entries[names[0]].shape[0] if names[0] in stored.entries else 0
        scales = [stored.rows(n, 0, inputs) for n in names if n in stored.entries]
        are_equal = all(torch.equal(scales[0], scale) for scale in scales)
        if len(scales) < len(names) or not are_equal:
            raise ValueError(
                f"{name}: {', '.join(names)} must be equal, because --format trtllm fuses "
                f"their matrices. {INSTEAD}"
            )
        rows = shares[0].columns or (0, inputs)
        return build_item(name, "F32", (width,), [TensorRange(names[0], rows)], stored)


def find_linears(
    plain: PlainLinears, widened: WidenedRows, links: Sequence[Link]
) -> QuantizedLinears:
    """Return the writer of a quantized source's linears.

    Raises:
        ValueError: if the format has no layout for an algorithm of the source.
    """
    plan = widened.plan
    known = _WRITERS if plan.layers else (*_WRITERS, "W8A16")
    algos = {layout.algo for layout in plan.layers.values() or (plan.layout,)}
    if unknown := sorted(algos.difference(known)):
        raise ValueError(
            f"--format trtllm has no layout for {', '.join(unknown)}: it supports W8A16 and "
            f"{', '.join(_WRITERS)}. {INSTEAD}"
        )
    modules = {
        link.ours[0].removesuffix(_WEIGHT): link.theirs.removesuffix(_WEIGHT)
        for link in links
        if link.theirs.endswith(_WEIGHT) and link.is_plain and len(link.ours) == 1
    }
    assert isinstance(plain.rows, RecordedRows)
    return QuantizedLinears(plain, widened, modules, plain.rows)


def describe_quantization(
    linears: QuantizedLinears, grid: RankGrid, sizes: RankSizes
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the entry ``quantization`` of config.json, and the layers of quant_cfg.json.

    The layers are empty if all matrices have the same layout.

    Raises:
        ValueError: if experts are quantized, or stages differ in how their layers are
            quantized, because names count layers from 0 on each stage.
    """
    plan, stage = linears.widened.plan, sizes.num_layers // grid.pp
    stages: list[dict[str, Any]] = [{} for _ in range(grid.pp)]
    for stem in linears.modules:
        match = _IN_LAYER.match(stem)
        if match is None:
            continue
        layer, inside = int(match[1]), match[2]
        if inside in _NAMES:
            name = f"transformer.layers.{layer % stage}.{_NAMES[inside]}"
            is_rounded = linears.is_rounded(stem)
            stages[layer // stage][name] = (
                _layout_fields(linears.layout(stem)) if is_rounded else None
            )
        elif ".experts." in inside and linears.is_rounded(stem) and plan.layout.algo != "W8A16":
            raise ValueError(f"--format trtllm has no layout for quantized experts. {INSTEAD}")
    if any(stage_layouts != stages[0] for stage_layouts in stages):
        raise ValueError(
            "--format trtllm names layers from 0 on each stage, and the source quantizes them "
            f"differently on some of --pipeline-parallel-size {grid.pp} stages: use "
            "--pipeline-parallel-size 1."
        )
    excluded = sorted(name for name, layout in stages[0].items() if layout is None)
    entry = {**PLAIN, "exclude_modules": [*_NEVER_QUANTIZED, *excluded]}
    entry["kv_cache_quant_algo"] = "FP8" if plan.kv_cache else None
    if not plan.layers:
        return entry | _layout_fields(plan.layout), {}
    entry["quant_algo"] = plan.algo
    return entry, {name: layout for name, layout in stages[0].items() if layout}


def _layout_fields(layout: QuantLayout) -> dict[str, Any]:
    """Return a layout's fields of config.json; GPTQ becomes AWQ with input factors of one."""
    is_int4 = layout.code == "int4"
    return {
        "quant_algo": "W4A16_AWQ" if is_int4 else layout.algo,
        "group_size": layout.group[1] if is_int4 else 128,
        "has_zero_point": False,
        "pre_quant_scale": is_int4 or bool(layout.pre_quant_scale),
    }


def _fp8(linears: QuantizedLinears, name: str, shares: Sequence[MatrixSlice]) -> list[Item]:
    scales = [linears.number(share.stem, WEIGHT_SCALE) for share in shares]
    # The fused matrix has one scale: codes of parts with smaller scales shrink by the ratio.
    top = max(scales)
    input_scale = max(linears.number(share.stem, INPUT_SCALE) for share in shares)
    return [
        linears.codes(name, "F8_E4M3", shares, [scale / top for scale in scales]),
        _number_item(f"{name}.weights_scaling_factor", top),
        _number_item(f"{name}.activation_scaling_factor", input_scale),
    ]


def _fp8_rows(
    linears: QuantizedLinears, name: str, shares: Sequence[MatrixSlice]
) -> list[Item]:
    return [
        linears.codes(name, "F8_E4M3", shares),
        linears.output_scales(f"{name}.per_channel_scale", shares),
    ]


def _int4_groups(
    linears: QuantizedLinears, name: str, shares: Sequence[MatrixSlice]
) -> list[Item]:
    return [
        linears.codes(name, "I8", shares),
        linears.group_scales(f"{name}.weights_scaling_factor", shares),
        linears.input_scales(f"{name}.prequant_scaling_factor", shares),
    ]


def _smooth_int8(
    linears: QuantizedLinears, name: str, shares: Sequence[MatrixSlice]
) -> list[Item]:
    input_scale = max(linears.number(share.stem, INPUT_SCALE) for share in shares)
    return [
        linears.codes(name, "I8", shares),
        linears.output_scales(f"{name}.weights_scaling_factor", shares),
        _number_item(f"{name}.activation_scaling_factor", input_scale),
        linears.input_scales(f"{name}.prequant_scaling_factor", shares),
    ]


_WRITERS: Mapping[str, Callable[[QuantizedLinears, str, Sequence[MatrixSlice]], list[Item]]] = {
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8_rows,
    "W4A16_AWQ": _int4_groups,
    "W4A16_GPTQ": _int4_groups,
    "W8A8_SQ_PER_CHANNEL": _smooth_int8,
}


def _number_item(name: str, value: float) -> Item:
    return Item(name, "F32", (1,), partial(_number, value))


def _number(value: float) -> Iterator[Tensor]:
    yield torch.tensor([value], dtype=torch.float32)


def _ones(size: int) -> Iterator[Tensor]:
    yield torch.ones(size, dtype=torch.float32)
