"""GEMMs of linears whose weights are quantized.

``QuantizedGemm`` holds a weight as the bytes of its file and multiplies on a GPU: few rows by a
kernel that reads codes only, many by tensor cores in fp8 or int8 where inputs are rounded too,
else with the weight widened for the moment. ``RoundedInputs`` is the reference that runs
anywhere: wide weights of the same values, inputs rounded as the method says.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_ckpt.formats.quantized_layouts import LAYOUTS, QuantLayout
from mcore_ckpt.mapping.low_bits import LARGEST, Code, decode, encode, unpack
from mcore_infer.quantization.tile_choices import TileChoices
from mcore_parallel.grad_slot import GradSlot
from mcore_parallel.optional_kernels import OptionalKernel, wave, works
from mcore_parallel.precision.fp8_cast import cast
from mcore_parallel.precision.fp8_recipes import Factor, Tensorwise
from mcore_parallel.precision.gemm import PLAIN_GEMM, Gemm, Operands

_FEW = 64
_MULTIPLE = 16


@dataclass(frozen=True)
class Rounding:
    """How a linear's inputs are rounded before its GEMM."""

    code: Code | Literal[""]
    """``e4m3``, ``int8``, or empty: they are not."""
    input_scale: Float[Tensor, ""] | None = None
    """What multiplies their codes; None: the largest of each token becomes the largest code."""
    pre_quant_scale: Float[Tensor, " D"] | None = None
    """What multiplies inputs first."""

    def smoothed(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """Return inputs times ``pre_quant_scale``."""
        return x if self.pre_quant_scale is None else x * self.pre_quant_scale.to(x.dtype)

    def rounded(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """Return smoothed inputs as their codes stand for them, the reference of all casts."""
        if not self.code:
            return x
        limit = LARGEST[self.code]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.input_scale is None:
            scale = wide.abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / limit
        else:
            scale = self.input_scale.to(wide)
        return (decode(encode(wide / scale, self.code), self.code) * scale).to(x.dtype)


class _Forward(ABC):
    """A GEMM without gradients."""

    def fitting(self, num_rows: int, num_columns: int) -> Gemm:  # noqa: ARG002
        """Return itself: it was made for one linear."""
        return self

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Shaped[Tensor, "..."], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return y, and nothing for backward."""

    def keep(self, x: Tensor) -> Operands:
        """Refuse: quantized weights do not train."""
        del x
        return _refuse()

    def prepare(self, grad: Tensor) -> Operands:
        """Refuse."""
        del grad
        return _refuse()

    def input_grad(self, grad: Operands, weight: Tensor) -> Tensor:
        """Refuse."""
        del grad, weight
        return _refuse()

    def weight_grad(
        self, grad: Operands, kept: Operands, slot: GradSlot | None
    ) -> Tensor | None:
        """Refuse."""
        del grad, kept, slot
        return _refuse()


def _refuse() -> NoReturn:
    raise RuntimeError("a quantized model has no gradients: train the one it was made of.")


@dataclass(frozen=True)
class RoundedInputs(_Forward):
    """Multiplies with a wide weight ``codes * scales * pre_quant_scale``, inputs rounded."""

    rounding: Rounding

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Shaped[Tensor, "..."], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return y, and nothing for backward."""
        rounded = self.rounding.rounded(self.rounding.smoothed(x.flatten(0, -2)))
        if self.rounding.pre_quant_scale is not None:  # the weight has it too
            rounded = rounded / self.rounding.pre_quant_scale.to(x.dtype)
        return PLAIN_GEMM.forward(rounded.view(x.shape), weight, bias)[0], ()


@dataclass(frozen=True)
class QuantizedGemm(_Forward):
    """Multiplies with a packed weight on a GPU."""

    layout: QuantLayout
    """How it is packed."""
    packed: Shaped[Tensor, "_ _"]
    """Its codes."""
    scales: Float[Tensor, "f d"]
    """Float32, one for each group."""
    group: tuple[int, int]
    """Outputs and inputs that share a scale; 0: all."""
    rounding: Rounding
    """Of inputs."""
    choices: TileChoices = field(default_factory=TileChoices, compare=False)
    """How few rows are multiplied; linears of one model share it."""

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Shaped[Tensor, "..."], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return y, and nothing for backward; the weight is not read."""
        del weight
        flat = self.rounding.smoothed(x.flatten(0, -2)).contiguous()
        # Where codes are read by the kernel, inputs keep their digits.
        is_few = flat.shape[0] <= _FEW and self._has_kernels(flat.dtype)
        y = self._few(flat) if is_few else self._many(flat)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias, ()

    def wide(self, dtype: torch.dtype) -> Float[Tensor, "F D"]:
        """Return the weight, ``pre_quant_scale`` left out."""
        if self._has_kernels(dtype):
            from mcore_infer.quantization.kernels import widened

            return widened(self.packed, self.scales, self.layout.code, self.group, dtype)
        codes = decode(unpack(self.packed, self.layout.code), self.layout.code)
        tall, across = (n or s for n, s in zip(self.group, codes.shape, strict=True))
        scales = self.scales.repeat_interleave(tall, 0)[: codes.shape[0]]
        return (codes * scales.repeat_interleave(across, 1)[:, : codes.shape[1]]).to(dtype)

    def _few(self, x: Tensor) -> Tensor:
        from mcore_infer.quantization.kernels import few_rows_matmul, tiles_for

        code, group = self.layout.code, self.group
        ways = [
            partial(
                few_rows_matmul,
                packed=self.packed,
                scales=self.scales,
                code=code,
                group=group,
                tiles=tiles,
            )
            for tiles in tiles_for(x.shape[0], code)
        ]
        key = (x.dtype, code, group, self.packed.shape, self.rounding.code)
        return self.choices.fastest(key, [*ways, self._many], x)(x)

    def _many(self, x: Tensor) -> Tensor:
        rounding = self.rounding
        fits = not (self.packed.shape[0] % _MULTIPLE or self.packed.shape[1] % _MULTIPLE)
        if x.is_cuda and fits and not self.group[1] and rounding.input_scale is not None:
            if rounding.code == "e4m3" and not self.group[0]:
                return self._fp8(x, rounding.input_scale)
            if rounding.code == "int8":
                return self._int8(x, rounding.input_scale)
        return F.linear(rounding.rounded(x), self.wide(x.dtype))

    def _fp8(self, x: Tensor, scale: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[0] % _MULTIPLE))
        amax = (scale * LARGEST["e4m3"]).view(1)
        own = cast(padded, self.packed.dtype, has_columns=False, amax=amax)
        given, weight = (
            Factor(own.rows, own.scale_inv),
            Factor(self.packed, self.scales.view(1)),
        )
        return Tensorwise().multiply(given, weight, x.dtype, fast_accum=True)[: x.shape[0]]

    def _int8(self, x: Tensor, scale: Tensor) -> Tensor:
        # torch's GEMM takes more than 16 rows.
        padded = F.pad(x, (0, 0, 0, max(32 - x.shape[0], -x.shape[0] % _MULTIPLE)))
        codes = encode(padded.float() / scale, "int8")
        total = torch._int_mm(codes, self.packed.t())[: x.shape[0]]
        scales = self.scales.expand(self.packed.shape[0], 1).view(1, -1) * scale
        return (total * scales).to(x.dtype)

    def _has_kernels(self, dtype: torch.dtype) -> bool:
        kind = (dtype, self.layout.code, self.group)
        return (
            self.packed.is_cuda
            and dtype != torch.float64
            and works(QUANTIZED_KERNELS, self.packed.device, *kind)
        )


def _try_kernels(
    device: torch.device, dtype: torch.dtype, code: str, group: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Multiply few rows and widen a weight by the kernels and in torch."""
    from mcore_infer.quantization.kernels import few_rows_matmul, widened

    layout = next(one for one in LAYOUTS.values() if one.code == code)
    weight = wave(160, 768, device=device, dtype=torch.float32)
    weight = weight * wave(160, 1, device=device, dtype=torch.float32).exp()
    layout = QuantLayout(algo="", code=layout.code, group=group)
    scales = layout.scales(weight)
    packed = layout.packed(layout.quantized(weight, scales))
    wide = layout.dequantized(packed, scales)
    multipliers = layout.wide_scales(scales)
    yield widened(packed, multipliers, code, group, dtype), wide
    for num_rows in (1, 33):
        x = wave(num_rows, 768, device=device, dtype=dtype)
        yield (
            few_rows_matmul(x, packed, multipliers, code, group),
            x.double() @ wide.double().t(),
        )


QUANTIZED_KERNELS = OptionalKernel(
    "the kernels of quantized weights", ("triton",), _try_kernels
)
"""Kind: dtype of inputs, format of the weight, sizes of a group."""
