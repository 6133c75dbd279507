"""Loads quantized folders into a model's linears.

On a GPU a linear keeps the packed codes of the file. Embeddings, experts, latent attention's
up-projection and weights that the kernels do not support are decoded. On a CPU every weight is
decoded, and inputs are rounded by the method, so that a model computes the same on all devices.
Under tensor parallelism a rank has its shard of the codes and scales.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from mcore_ckpt.formats.quantization import MatrixPart
from mcore_ckpt.formats.quantized_layouts import QuantLayout
from mcore_ckpt.mapping.low_bits import Code, encode
from mcore_ckpt.save_load.quantized_folder import QuantizedFolder
from mcore_infer.quantization.gated_mlp import round_gates_
from mcore_infer.quantization.gemms import (
    InputRounding,
    QuantizedGemm,
    RoundedInputs,
    TileChoices,
    spread_scales,
)
from mcore_parallel.sharding import Part, Shard, named_shards
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

log = logging.getLogger(__name__)

Linear = ColumnParallelLinear | RowParallelLinear
_READ_DIRECTLY = "kv_up"
"""Name of the linear whose weight latent attention reads without the linear's GEMM."""


@dataclass(frozen=True)
class RankScales:
    """Scales of this rank's shard of a linear's weight."""

    layout: QuantLayout
    """Layout of the folder."""
    scales: Tensor
    """Float32 ``[f, d]``, one for each group of outputs and inputs."""
    group: tuple[int, int]
    """Outputs and inputs that share a scale; 0: all."""
    rounding: InputRounding
    """Rounding of the linear's inputs."""


def linears(model: nn.Module) -> dict[str, Linear]:
    """Return the linears of a model that may be quantized, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    }


def logical_parts(path: str, linear: Linear) -> list[Part]:
    """Return the parts of a linear's weight with full logical names."""
    parts = linear.layouts()["weight"].parts
    return [replace(p, name=f"{path}.{p.name or 'weight'}") for p in parts]


def quantized_linears(model: nn.Module, folder: QuantizedFolder) -> dict[str, RankScales]:
    """Read the scales of all linears that a folder quantizes; no communication.

    Returns:
        Scales by path, without the weights whose shard borders cut groups.
    """
    scales_of = {}
    for path, linear in linears(model).items():
        parts = logical_parts(path, linear)
        if all(folder.is_quantized(part.name) for part in parts):
            has_one_layout = len({folder.layout(part.name) for part in parts}) == 1
            scales = _rank_scales(parts, folder) if has_one_layout else None
            if scales is None:
                log.warning(
                    "%s is decoded instead of multiplied by its codes: shard borders cut its "
                    "groups, or its parts have different layouts.",
                    path,
                )
            else:
                scales_of[path] = scales
    return scales_of


def _rank_scales(parts: list[Part], folder: QuantizedFolder) -> RankScales | None:
    layout, slices = folder.layout(parts[0].name), []
    tall, wide = layout.group
    for part in parts:
        (row, column), (rows, columns) = part.offsets, part.logical_lengths
        is_last = column + columns == part.shape[1]
        if wide and (column % wide or (columns % wide and not is_last)):
            return None
        matrix = folder.part(part.name, row, row + rows)
        scales, pre = matrix.scales, matrix.pre_quant_scale
        if wide:
            scales = scales[:, column // wide : -(-(column + columns) // wide)]
        pre = None if pre is None else pre[column : column + columns]
        if pre is not None and bool((pre == 1).all()):
            pre = None  # the scale was folded into the previous layer
        slices.append(replace(matrix, scales=scales, pre_quant_scale=pre))
    if layout.problem((sum(p.logical_lengths[0] for p in parts), parts[0].logical_lengths[1])):
        return None
    part_scales = [matrix.scales for matrix in slices]
    if not tall and all(torch.equal(scales, part_scales[0]) for scales in part_scales):
        scales = part_scales[0]
    elif (
        tall > 1
        and not any(p.offsets[0] % tall for p in parts)
        and not any(p.logical_lengths[0] % tall for p in parts[:-1])
    ):
        scales = torch.cat(part_scales)
    else:
        # Parts with different scales, or groups across part borders: one scale for each row.
        spread = []
        for scales, part in zip(part_scales, parts, strict=True):
            (row, _), (rows, _) = part.offsets, part.logical_lengths
            if tall:  # the part may begin inside a group: drop the rows before it
                spread.append(scales.repeat_interleave(tall, 0)[row % tall :][:rows])
            else:
                spread.append(scales.expand(rows, -1))
        scales, tall = torch.cat(spread), 1
    return RankScales(layout, scales.contiguous(), (tall, wide), _rounding(slices))


def _rounding(parts: list[MatrixPart]) -> InputRounding:
    """Return the rounding of inputs, which all parts of a linear share.

    The largest ``input_scale`` of the parts is used, as in vLLM, so that no input exceeds the
    largest code.
    """
    first = parts[0]
    for part in parts[1:]:
        scale, other = first.pre_quant_scale, part.pre_quant_scale
        if (scale is None) != (other is None) or (
            scale is not None and other is not None and not torch.equal(scale, other)
        ):
            raise ValueError(
                "matrices of one input have different pre_quant_scales, but q, k, v (gate, up) "
                "are one GEMM: quantize them with a common pre_quant_scale."
            )
    scales = [part.input_scale for part in parts if part.input_scale is not None]
    scale = torch.stack(scales).amax() if scales else None
    return InputRounding(_rounded_to(first.layout), scale, first.pre_quant_scale)


def _rounded_to(layout: QuantLayout) -> Code | Literal[""]:
    # There is no GEMM of 4-bit inputs: inputs of this layout are not rounded.
    return "" if layout.inputs == "e2m1" else layout.inputs


def round_inputs_(model: nn.Module, scales: Mapping[str, RankScales]) -> None:
    """Make linears with decoded weights round their inputs by the method, in place."""
    for path, linear in linears(model).items():
        if path in scales and scales[path].rounding.code:
            rounding = scales[path].rounding
            linear.gemm = RoundedInputs(_to(rounding, linear.weight.device))


def pack_weights_(
    model: nn.Module,
    scales: Mapping[str, RankScales],
    load: Callable[[Mapping[str, Shard]], None],
    device: torch.device,
) -> None:
    """Load the codes of linears from the folder, one linear at a time.

    Args:
        model: model in which the weights of these linears are on the meta device.
        scales: scales by path of the linears.
        load: fills shards from the folder; all ranks that share the model make this call.
        device: device of the codes.
    """
    choices = TileChoices()
    for path, linear in linears(model).items():
        if path not in scales:
            continue
        shape = tuple(linear.weight.shape)
        linear.weight = nn.Parameter(torch.zeros(shape, device=device), requires_grad=False)
        shards = named_shards(linear)
        names = {p.name.removeprefix(f"{path}.") for p in logical_parts(path, linear)}
        load({f"{path}.{name}": shards[name] for name in names})
        pack_(linear, scales[path], choices)
    round_gates_(model)


def pack_(linear: Linear, scales: RankScales, choices: TileChoices) -> None:
    """Replace a linear's decoded weight by a GEMM with codes, in place.

    The codes are computed from the decoded weight and the scales.
    """
    weight, device = linear.weight.detach(), linear.weight.device
    layout, group = scales.layout, scales.group
    rounding, factors = _to(scales.rounding, device), scales.scales.to(device)
    if rounding.pre_quant_scale is not None:
        weight = weight / rounding.pre_quant_scale
    full = spread_scales(factors, group, weight.shape)
    packed = layout.packed(encode(weight.float() / full, layout.code)).contiguous()
    linear.gemm = QuantizedGemm(layout, packed, factors, group, rounding, choices)
    # Keep a tensor with the weight's shape, but without its memory, for callers that read the
    # shape.
    placeholder = torch.zeros(1, 1, device=device, dtype=weight.dtype).expand(weight.shape)
    linear.weight = nn.Parameter(placeholder, requires_grad=False)


def round_to_nearest_(model: nn.Module, layout: QuantLayout) -> None:
    """Quantize all linears of a model in place, by rounding to nearest without calibration.

    For benchmarks with random weights: a layout with a calibrated input scale gets 0.05.
    """
    choices = TileChoices()
    for path, linear in linears(model).items():
        if path.endswith(_READ_DIRECTLY) or layout.problem(tuple(linear.weight.shape)):
            continue
        weight_scales = layout.scales(linear.weight.detach())
        code = _rounded_to(layout)
        scale = torch.tensor(0.05) if layout.input_scale and code else None
        rounding = InputRounding(code, scale)
        scales = RankScales(layout, layout.wide_scales(weight_scales), layout.group, rounding)
        pack_(linear, scales, choices)
    round_gates_(model)


def _to(rounding: InputRounding, device: torch.device) -> InputRounding:
    scale, pre = rounding.input_scale, rounding.pre_quant_scale
    return InputRounding(
        rounding.code,
        None if scale is None else scale.to(device),
        None if pre is None else pre.to(device),
    )


def packed_paths(scales: Mapping[str, RankScales]) -> frozenset[str]:
    """Return the paths of linears that keep their codes on a GPU."""
    return frozenset(path for path in scales if not path.endswith(_READ_DIRECTLY))


def is_quantized(folder: Path) -> bool:
    """Whether a Hugging Face folder may hold quantized weights, from its small files.

    A folder of adapters has no config.json and no quantized weights.
    """
    from mcore_ckpt.formats.recognition import QUANT_CONFIG

    config = folder / "config.json"
    is_in_config = config.is_file() and "quantization_config" in config.read_text("utf-8")
    return is_in_config or (folder / QUANT_CONFIG).is_file()
