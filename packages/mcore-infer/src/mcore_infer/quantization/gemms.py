"""GEMMs of linears whose weights are quantized.

``QuantizedGemm`` holds a weight as the bytes of its file and multiplies on a GPU: few rows by a
kernel that reads codes only, many by tensor cores in fp8 or int8 where inputs are rounded too,
else with the weight widened for the moment. ``RoundedInputs`` is the reference that runs
anywhere: wide weights of the same values, inputs rounded as the method says.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal, NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_ckpt.formats.quantized_layouts import LAYOUTS, QuantLayout
from mcore_ckpt.mapping.low_bits import LARGEST, Code, decode, encode, unpack
from mcore_infer.engine.kernels.skinny_gemm_tiles import tiles_for
from mcore_infer.quantization.tile_choices import TileChoices
from mcore_parallel.autograd.grad_slot import GradSlot
from mcore_parallel.optional_kernels import OptionalKernel, wave, works
from mcore_parallel.precision.fp8_recipes import Factor, Rowwise, Tensorwise
from mcore_parallel.precision.gemm import PLAIN_GEMM, Gemm, Operands

_MOST_FEW = 64
"""Rows of an input that the kernel of codes multiplies."""
_MOST_UNROUNDED = {("e4m3", True): 16, ("e4m3", False): 32, ("int8", True): 64}
"""The same where the method rounds inputs, by their format and whether one calibrated scale is
of all: about where tensor cores win on an H100. These counts alone decide whether inputs are
rounded, never a measured time: one model then gives one answer. Powers of two, as recorded
steps are padded to."""
_MULTIPLE = 16


@dataclass(frozen=True)
class InputRounding:
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
            largest = wide.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
            # A GPU multiplies by the inverse of a plain number: one bit off, which moves the
            # many inputs of 16 bits that lie half-way between two codes.
            scale = largest / wide.new_full((), limit)
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

    rounding: InputRounding

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
    rounding: InputRounding
    """Of inputs."""
    choices: TileChoices = field(default_factory=TileChoices, compare=False)
    """How few rows are multiplied; linears of one model share it."""

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Shaped[Tensor, "..."], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return y, and nothing for backward; the weight is not read."""
        del weight
        flat = self.rounding.smoothed(x.flatten(0, -2)).contiguous()
        is_few = self.keeps_digits(flat.shape[0]) and self._has_kernels(flat.dtype)
        y = self._few(flat) if is_few else self._many(flat)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias, ()

    def keeps_digits(self, num_rows: int) -> bool:
        """Whether so many rows go through the kernel of codes, which rounds none of them."""
        kind = (self.rounding.code, self.rounding.input_scale is not None)
        return num_rows <= _MOST_UNROUNDED.get(kind, _MOST_FEW)

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
        """Multiply rows that are not rounded, by the fastest of the ways to do that."""
        from mcore_infer.engine.kernels.skinny_gemm import few_rows_linear

        code, group = self.layout.code, self.group
        shape = (self.packed.shape[0], self.packed.shape[1])
        ways = [
            partial(
                few_rows_linear,
                weight=self.packed,
                scales=self.scales,
                code=code,
                group=group,
                tile=tile,
                counters=self.choices.counters(x.device),
            )
            for tile in tiles_for(x.shape[0], code, shape, x.element_size())
        ]
        if not self.rounding.code:  # else it would round them
            ways.append(self._many)
        key = (x.dtype, code, group, shape, self.rounding.code)
        return self.choices.fastest(key, ways, x)(x)

    def _many(self, x: Tensor) -> Tensor:
        code, (tall, wide) = self.rounding.code, self.group
        fits = not (self.packed.shape[0] % _MULTIPLE or self.packed.shape[1] % _MULTIPLE)
        has_scales = not wide and tall <= 1  # that come after the sum
        if code and fits and has_scales and x.is_cuda and x.dtype != torch.float64:
            kind = (x.dtype, code, tall, self.rounding.input_scale is not None)
            if works(CODES_GEMM, x.device, *kind):
                return self.by_codes(x, code)
        return F.linear(self.rounding.rounded(x), self.wide(x.dtype))

    def by_codes(self, x: Float[Tensor, "T D"], code: Code) -> Float[Tensor, "T F"]:
        """Multiply codes with codes on tensor cores; scales of both come after."""
        from mcore_infer.quantization.kernels import rounded_rows

        # torch's int8 GEMM takes more than 16 rows.
        least = 0 if code == "e4m3" else 32
        missing = max(least - x.shape[0], -x.shape[0] % _MULTIPLE)
        padded = F.pad(x, (0, 0, 0, missing)) if missing else x  # else it would be copied
        own, scale = rounded_rows(padded, code, self.rounding.input_scale)
        columns = self._column_scales
        if code == "int8":
            total = torch._int_mm(own, self.packed.t())[: x.shape[0]]
            return (total * (scale[: x.shape[0], None] * columns)).to(x.dtype)
        recipe, rows, outputs = Rowwise(), scale[:, None], columns.t()
        if not self.group[0] and self.rounding.input_scale is not None:
            recipe, rows, outputs = Tensorwise(), scale[:1], self.scales.view(1)
        given, weight = Factor(own, rows), Factor(self.packed, outputs)
        return recipe.multiply(given, weight, x.dtype, fast_accum=True)[: x.shape[0]]

    @cached_property
    def _column_scales(self) -> Float[Tensor, "1 F"]:
        """One for each output; kept, as expanding it would be a kernel of every GEMM."""
        return self.scales.view(1, -1).expand(1, self.packed.shape[0]).contiguous()

    def _has_kernels(self, dtype: torch.dtype) -> bool:
        kind = (dtype, self.layout.code, self.group)
        return (
            self.packed.is_cuda
            and dtype != torch.float64
            and works(QUANTIZED_KERNELS, self.packed.device, *kind)
        )


def _try_kernels(
    device: torch.device, dtype: torch.dtype, code: Code, group: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Multiply few rows, round inputs and widen a weight by the kernels and in torch."""
    from mcore_infer.engine.kernels.skinny_gemm import FEW_ROWS_KERNEL, in_codes
    from mcore_infer.quantization.kernels import rounded_rows, widened

    yield from FEW_ROWS_KERNEL.trial(device, dtype, code, group)
    weight = wave(160, 768, device=device, dtype=torch.float32)
    packed, scales, wide = in_codes(weight, code, group)
    yield widened(packed, scales, code, group, dtype), wide
    if code in ("e4m3", "int8"):
        x = wave(33, 768, device=device, dtype=dtype)
        for known in (None, torch.tensor(0.01, device=device)):
            codes, own = rounded_rows(x, code, known)
            yield codes.float() * own[:, None], InputRounding(code, known).rounded(x)


def _try_codes(
    device: torch.device, dtype: torch.dtype, code: Code, tall: int, is_known: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Multiply codes with codes, and what they stand for in torch."""
    from mcore_infer.engine.kernels.skinny_gemm import in_codes

    weight = wave(160, 768, device=device, dtype=torch.float32)
    packed, scales, wide = in_codes(weight, code, (tall, 0))
    layout = next(one for one in LAYOUTS.values() if one.code == code)
    rounding = InputRounding(code, torch.tensor(0.01, device=device) if is_known else None)
    gemm = QuantizedGemm(layout, packed, scales, (tall, 0), rounding)
    for num_rows in (33, 64):
        x = wave(num_rows, 768, device=device, dtype=dtype)
        yield gemm.by_codes(x, code), rounding.rounded(x).double() @ wide.double().t()


CODES_GEMM = OptionalKernel("the GEMM of codes", ("triton",), _try_codes)
"""Kind: dtype of inputs, format, outputs that share a scale, whether inputs' is known."""

QUANTIZED_KERNELS = OptionalKernel(
    "the kernels of quantized weights", ("triton",), _try_kernels
)
"""Kind: dtype of inputs, format of the weight, sizes of a group."""
