"""Table of layouts of quantized weights in a Hugging Face folder.

In the unified layout, which TensorRT-LLM, vLLM and SGLang read, weights keep their names, and a
module ``M`` has scales in addition to ``M.weight``. Dequantized, ``weight = codes *
weight_scale * weight_scale_2``; the input is multiplied by ``pre_quant_scale`` first.
``hf_quant_config.json`` has the algorithm and the modules that are not quantized, as has
``quantization_config`` in ``config.json``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_ckpt.mapping.low_bits import LARGEST, Code, decode, encode, pack, stored, unpack

WEIGHT_SCALE, WEIGHT_SCALE_2 = "weight_scale", "weight_scale_2"
INPUT_SCALE, PRE_QUANT_SCALE = "input_scale", "pre_quant_scale"
SCALES = (WEIGHT_SCALE, WEIGHT_SCALE_2, INPUT_SCALE, PRE_QUANT_SCALE)
"""Scales of a module ``M``, named ``M.<name>``."""
KV_SCALES = ("k_proj.k_scale", "v_proj.v_scale")
"""Scales of an fp8 key/value cache: float32 without dimensions, largest magnitude / 448."""

_SMALLEST = 2.0**-120
_E4M3_SMALLEST = 2.0**-9


class Scales(NamedTuple):
    """Factors of codes, as stored in files."""

    weight_scale: Shaped[Tensor, "..."]
    """See ``QuantLayout.tensors``."""
    weight_scale_2: Float[Tensor, ""] | None = None
    """Factor of the whole tensor, float32; None: the layout has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantLayout:
    """Storage of a quantized matrix ``[F, D]`` (outputs, inputs): codes and scales."""

    algo: str
    """``quant_algo`` of hf_quant_config.json."""
    code: Code
    """Number format of the codes."""
    group: tuple[int, int]
    """Rows and columns that share a ``weight_scale``; 0: all of them."""
    scale_dtype: Literal["F32", "F8_E4M3", "U8"] = "F32"
    """Safetensors' dtype of ``weight_scale``; U8: a power of two, its exponent plus 127."""
    inputs: Literal["", "e4m3", "int8", "e2m1"] = ""
    """Number format of inputs in the GEMM; empty: inputs are not quantized."""
    input_scale: bool = False
    """Whether the file has an ``input_scale``; else inputs are scaled dynamically."""
    pre_quant_scale: Literal["", "some", "all"] = ""
    """Modules with ``pre_quant_scale``: none, those without a norm to fold it into, or all."""

    def problem(self, shape: Sequence[int]) -> str:
        """Return the reason why a matrix cannot be stored in this layout, else ''."""
        (rows, columns), (tall, width) = shape, self.group
        if self.code == "int4" and rows % 2:
            return f"{rows} rows are odd, and two share a byte"
        if tall == 1 and width and columns % width:
            return f"{columns} columns are not a multiple of the group of {width}"
        return ""

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of ``weight_scale``: ``()``, ``[F]`` or ``[F, D/columns]``.

        Blocks of several rows have ``[F/rows, 1, D/columns, 1]``.
        """
        (rows, columns), (tall, wide) = shape, self.group
        if not tall:
            return ()
        if not wide:
            return (-(-rows // tall),)
        groups = (-(-rows // tall), -(-columns // wide))
        return groups if tall == 1 else (groups[0], 1, groups[1], 1)

    def tensors(self, shape: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """List the tensors of a module ``M``: dtype and shape by name, ``weight`` first.

        ``pre_quant_scale`` ``[D]`` is listed if any module of the layout may have it.
        """
        dtype, (tall, wide) = stored(self.code)
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            "weight": (dtype, (shape[0] // tall, shape[1] // wide)),
            WEIGHT_SCALE: (self.scale_dtype, self.scale_shape(shape)),
        }
        if self.has_second_scale:
            tensors[WEIGHT_SCALE_2] = ("F32", ())
        if self.input_scale:
            tensors[INPUT_SCALE] = ("F32", ())
        if self.pre_quant_scale:
            tensors[PRE_QUANT_SCALE] = ("F32", (shape[1],))
        return tensors

    @property
    def has_second_scale(self) -> bool:
        """Whether the scales are scaled by one number for the tensor."""
        return self.scale_dtype == "F8_E4M3"

    def shape_of(self, packed: Sequence[int]) -> tuple[int, int]:
        """Return ``[F, D]`` for the shape of a packed weight."""
        tall, wide = stored(self.code)[1]
        return packed[0] * tall, packed[1] * wide

    def scales(self, weight: Float[Tensor, "F D"], amax: Tensor | None = None) -> Scales:
        """Return scales that map the largest magnitude of each group to the largest code.

        Args:
            weight: finite numbers.
            amax: largest magnitude, shared by the members of a fused group; None: that of
                ``weight``. Without effect on scales of rows and groups.
        """
        weight, limit = weight.float(), LARGEST[self.code]
        whole = weight.abs().amax() if amax is None else amax.float()
        if not self.group[0]:
            return Scales(_not_zero(whole / limit))
        tops = self._tops(weight)
        if self.scale_dtype == "F32":
            return Scales(_not_zero(tops / limit).view(self.scale_shape(weight.shape)))
        if self.scale_dtype == "F8_E4M3":
            second = _not_zero(whole / (limit * LARGEST["e4m3"]))
            first = tops / (limit * second)
            first = torch.where(tops == 0, 1.0, first)
            first = first.clamp(_E4M3_SMALLEST, LARGEST["e4m3"])
            return Scales(first.to(torch.float8_e4m3fn), second)
        return Scales(self._exponents(weight, tops))

    def wide_scales(self, scales: Scales) -> Float[Tensor, "f d"]:
        """Return the factor of each group's codes, float32."""
        first = scales.weight_scale
        if self.scale_dtype == "U8":
            first = torch.exp2(first.float() - 127)
        first = first.float()
        if scales.weight_scale_2 is not None:
            first = first * scales.weight_scale_2.float()
        return first.view(1, 1) if first.dim() == 0 else first.view(first.shape[0], -1)

    def full_scales(self, scales: Scales, shape: Sequence[int]) -> Float[Tensor, "F D"]:
        """Return the factor of each code, float32."""
        wide = self.wide_scales(scales)
        tall, across = (n or size for n, size in zip(self.group, shape, strict=True))
        wide = wide.repeat_interleave(tall, 0)[: shape[0]]
        return wide.repeat_interleave(across, 1)[:, : shape[1]]

    def quantized(self, weight: Float[Tensor, "F D"], scales: Scales) -> Shaped[Tensor, "F D"]:
        """Round a matrix to codes, one for each element."""
        return encode(weight.float() / self.full_scales(scales, weight.shape), self.code)

    def packed(self, codes: Shaped[Tensor, "F D"]) -> Shaped[Tensor, "_ _"]:
        """Pack codes into bytes as the file stores them."""
        return pack(codes, self.code)

    def dequantized(
        self, packed: Shaped[Tensor, "_ _"], scales: Scales
    ) -> Float[Tensor, "F D"]:
        """Dequantize a packed matrix to float32, without the scales of inputs."""
        codes = unpack(packed, self.code)
        return decode(codes, self.code) * self.full_scales(scales, codes.shape)

    def _tops(self, weight: Tensor) -> Tensor:
        """Return the largest magnitude of each group, ``[F/rows, D/columns]``."""
        tall, wide = (n or size for n, size in zip(self.group, weight.shape, strict=True))
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % tall))
        blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, tall))
        return blocks.abs().amax((1, 3))

    def _exponents(self, weight: Tensor, tops: Tensor) -> Tensor:
        """Return an exponent plus 127 for each group: of the two nearest, the more accurate."""
        lower = torch.log2(tops.clamp(min=_SMALLEST) / LARGEST[self.code]).floor()
        codes, errors = [], []
        for exponent in (lower, lower + 1):
            code = (exponent + 127).clamp(0, 254).to(torch.uint8)
            scales = Scales(code)
            error = self.dequantized(self.packed(self.quantized(weight, scales)), scales)
            codes.append(code)
            errors.append((error - weight).square().view(*tops.shape, -1).sum(-1))
        return torch.where(errors[1] < errors[0], codes[1], codes[0])


def _not_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale.clamp(min=_SMALLEST))


LAYOUTS: Mapping[str, QuantLayout] = {
    one.algo: one
    for one in (
        QuantLayout(algo="FP8", code="e4m3", group=(0, 0), inputs="e4m3", input_scale=True),
        QuantLayout(algo="FP8_PER_CHANNEL_PER_TOKEN", code="e4m3", group=(1, 0), inputs="e4m3"),
        QuantLayout(algo="fp8_pb_wo", code="e4m3", group=(128, 128)),
        QuantLayout(algo="MXFP8", code="e4m3", group=(1, 32), scale_dtype="U8"),
        QuantLayout(algo="W8A16", code="int8", group=(1, 0)),
        QuantLayout(
            algo="W8A8_SQ_PER_CHANNEL",
            code="int8",
            group=(1, 0),
            inputs="int8",
            input_scale=True,
            pre_quant_scale="all",
        ),
        QuantLayout(algo="W4A16_AWQ", code="int4", group=(1, 128), pre_quant_scale="some"),
        QuantLayout(algo="W4A16_GPTQ", code="int4", group=(1, 128)),
        QuantLayout(
            algo="NVFP4",
            code="e2m1",
            group=(1, 16),
            scale_dtype="F8_E4M3",
            inputs="e2m1",
            input_scale=True,
        ),
        QuantLayout(algo="W4A16_MXFP4", code="e2m1", group=(1, 32), scale_dtype="U8"),
    )
}
"""Layouts by ``quant_algo`` in modelopt's spelling."""
_OTHER_SPELLINGS = {"FP8_BLOCK_SCALES": "fp8_pb_wo", "FP8_PB_WO": "fp8_pb_wo"}
"""Spellings of TensorRT-LLM and vLLM."""

METHODS: Mapping[str, str] = {
    "fp8": "FP8",
    "fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8-block": "fp8_pb_wo",
    "int8": "W8A16",
    "w8a8": "W8A8_SQ_PER_CHANNEL",
    "awq": "W4A16_AWQ",
    "gptq": "W4A16_GPTQ",
    "nvfp4": "NVFP4",
    "mxfp4": "W4A16_MXFP4",
}
"""Choices of ``mcore-infer quantize --method``, and the layouts that they write."""


def find_layout(algo: str, group_size: int = 0) -> QuantLayout:
    """Return the layout of an algorithm name in a config.

    Args:
        algo: ``quant_algo``.
        group_size: columns that share a scale, if the layout allows a choice; 0: its default.

    Raises:
        ValueError: if the algorithm or the group size is not supported.
    """
    algo = _OTHER_SPELLINGS.get(algo, algo)
    if algo not in LAYOUTS:
        raise ValueError(f"quant_algo {algo!r} is not supported: use {', '.join(LAYOUTS)}.")
    layout = LAYOUTS[algo]
    if not group_size or group_size == layout.group[1]:
        return layout
    if layout.code != "int4":
        raise ValueError(f"{algo} has groups of {layout.group[1]}, not {group_size}.")
    return replace(layout, group=(1, group_size))
