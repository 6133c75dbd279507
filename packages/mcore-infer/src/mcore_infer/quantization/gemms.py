"""GEMMs of linears with quantized weights.

``QuantizedGemm`` stores a weight as packed codes and multiplies on a GPU: few rows by a kernel
that reads the codes, many rows by fp8 or int8 tensor cores if the method rounds inputs, and
otherwise with a temporarily decoded weight. ``RoundedInputs`` is the reference on any device:
it multiplies inputs that are rounded by the method with a decoded weight of the same values.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_ckpt.formats.quantized_layouts import LAYOUTS, QuantLayout
from mcore_ckpt.mapping.low_bits import LARGEST, Code, decode, encode, unpack
from mcore_infer.engine.kernels.skinny_gemm_tiles import NUM_COUNTERS, tiles_for
from mcore_moe.kernels.gate import KINDS, gated
from mcore_parallel.autograd.grad_slot import GradSlot
from mcore_parallel.optional_kernels import OptionalKernel, wave, works
from mcore_parallel.precision.fp8_recipes import Factor, Rowwise, Tensorwise
from mcore_parallel.precision.gemm import PLAIN_GEMM, Gemm, Operands

_MOST_FEW = 64
"""Most rows for the kernel that reads codes, if the method does not round inputs."""
_MOST_UNROUNDED = {("e4m3", True): 16, ("e4m3", False): 32, ("int8", True): 64}
"""Most rows for that kernel if the method rounds inputs, by input format and whether inputs
have one calibrated scale: about where tensor cores win on an H100. Only these counts decide
whether inputs are rounded, never a measured time, so a model's results do not vary. Powers of
two, like the sizes of recorded steps."""
_MULTIPLE = 16
"""Sizes of tensor core GEMMs must be multiples of this number."""


_RUNS = 5
_BEYOND_CACHE = 512 * 2**20
"""Bytes that are set to zero before each timed run, to evict the weight from the cache."""
_CLEARED = 4
"""Number of clears: 0.6 ms on an H200, in which the host launches all kernels of a run."""

Candidate = Callable[[Tensor], Tensor]
"""Multiplies rows with one weight in one way."""


@dataclass(frozen=True)
class InputRounding:
    """Rounding of a linear's inputs before its GEMM."""

    code: Code | Literal[""]
    """``e4m3``, ``int8``, or empty: inputs are not rounded."""
    input_scale: Float[Tensor, ""] | None = None
    """Calibrated scale; None: each token's largest magnitude becomes the largest code."""
    pre_quant_scale: Float[Tensor, " D"] | None = None
    """Factor on each input channel before rounding; None: no factor."""

    def smoothed(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """Return inputs times ``pre_quant_scale``."""
        return x if self.pre_quant_scale is None else x * self.pre_quant_scale.to(x.dtype)

    def rounded(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """Return smoothed inputs rounded to codes and decoded; the reference of all casts."""
        if not self.code:
            return x
        limit = LARGEST[self.code]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.input_scale is None:
            largest = wide.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
            # Divide by a tensor: on a GPU, dividing by a Python number multiplies by its
            # inverse, and the error of one bit would round differently the many 16-bit inputs
            # that lie half-way between two codes.
            scale = largest / wide.new_full((), limit)
        else:
            scale = self.input_scale.to(wide)
        return (decode(encode(wide / scale, self.code), self.code) * scale).to(x.dtype)


def spread_scales(
    scales: Float[Tensor, "f d"], group: tuple[int, int], shape: Sequence[int]
) -> Float[Tensor, "F D"]:
    """Repeat each group's scale for all its weights.

    Args:
        scales: one for each group of outputs and inputs.
        group: outputs and inputs that share a scale; 0: all.
        shape: shape of the weight, ``(F, D)``; the last groups may be incomplete.
    """
    tall, wide = (count or size for count, size in zip(group, shape, strict=True))
    rows = scales.repeat_interleave(tall, 0)[: shape[0]]
    return rows.repeat_interleave(wide, 1)[:, : shape[1]]


class _Forward(ABC):
    """Base of GEMMs without gradients."""

    def fitting(self, num_rows: int, num_columns: int) -> Gemm:  # noqa: ARG002
        """Return this GEMM: it belongs to one linear."""
        return self

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Shaped[Tensor, "..."], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return the product, and nothing for backward."""

    def keep(self, x: Tensor) -> Operands:
        """Raise RuntimeError: quantized weights do not train."""
        del x
        return _refuse()

    def prepare(self, grad: Tensor) -> Operands:
        """Raise RuntimeError."""
        del grad
        return _refuse()

    def input_grad(self, grad: Operands, weight: Tensor) -> Tensor:
        """Raise RuntimeError."""
        del grad, weight
        return _refuse()

    def weight_grad(
        self, grad: Operands, kept: Operands, slot: GradSlot | None
    ) -> Tensor | None:
        """Raise RuntimeError."""
        del grad, kept, slot
        return _refuse()


def _refuse() -> NoReturn:
    raise RuntimeError(
        "a quantized model has no gradients: train the model from which it was made."
    )


@dataclass(frozen=True)
class RoundedInputs(_Forward):
    """Multiplies rounded inputs with a decoded weight ``codes * scales * pre_quant_scale``."""

    rounding: InputRounding

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Shaped[Tensor, "..."], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return the product, and nothing for backward."""
        rounded = self.rounding.rounded(self.rounding.smoothed(x.flatten(0, -2)))
        if self.rounding.pre_quant_scale is not None:  # the decoded weight includes the factor
            rounded = rounded / self.rounding.pre_quant_scale.to(x.dtype)
        return PLAIN_GEMM.forward(rounded.view(x.shape), weight, bias)[0], ()


@dataclass(eq=False)
class TileChoices:
    """Measures and remembers the fastest candidates, for the linears that share this object."""

    found: dict[Any, int] = field(default_factory=dict)
    """Index of the fastest candidate, by key."""
    _counters: dict[torch.device, Tensor] = field(default_factory=dict)

    def counters(self, device: torch.device) -> Tensor:
        """Return the zeroed counters of tiles with splits, used by one GEMM at a time."""
        if device not in self._counters:
            zeros = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
            self._counters[device] = zeros
        return self._counters[device]

    def fastest(
        self, key: tuple[Any, ...], candidates: list[Candidate], x: Tensor
    ) -> Candidate:
        """Return the fastest candidate for inputs like ``x``; waits for the device once.

        Args:
            key: everything on which the time depends, except the number of rows.
            candidates: ways to multiply; the first must work on every GPU.
            x: input rows.
        """
        key = (*key, 1 << (x.shape[0] - 1).bit_length())
        if key not in self.found:
            if torch.cuda.is_current_stream_capturing():  # timing would break the capture
                return candidates[0]
            times = [_milliseconds(candidate, x) for candidate in candidates]
            self.found[key] = times.index(min(times))
        return candidates[self.found[key]]


def _milliseconds(candidate: Candidate, x: Tensor) -> float:
    """Return the median time of a GEMM whose weight is not in the cache."""
    from triton.runtime.errors import OutOfResources

    try:
        candidate(x)
    except OutOfResources:  # the tile is too large for this GPU
        return float("inf")
    scratch = torch.empty(_BEYOND_CACHE, dtype=torch.uint8, device=x.device)
    times = []
    for _ in range(_RUNS):
        for _ in range(_CLEARED):
            scratch.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        candidate(x)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[_RUNS // 2]


@dataclass(frozen=True)
class QuantizedGemm(_Forward):
    """Multiplies inputs with a packed weight on a GPU."""

    layout: QuantLayout
    """Layout of codes and scales."""
    packed: Shaped[Tensor, "_ _"]
    """Codes of the weight."""
    scales: Float[Tensor, "f d"]
    """Float32, one for each group."""
    group: tuple[int, int]
    """Outputs and inputs that share a scale; 0: all."""
    rounding: InputRounding
    """Rounding of inputs."""
    choices: TileChoices = field(default_factory=TileChoices, compare=False)
    """Measured choices for few rows, shared by the linears of a model."""

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Shaped[Tensor, "..."], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return the product, and nothing for backward; ``weight`` is not read."""
        del weight
        flat = self.rounding.smoothed(x.flatten(0, -2)).contiguous()
        is_few = self.keeps_digits(flat.shape[0]) and self._has_kernels(flat.dtype)
        y = self._few(flat) if is_few else self._many(flat)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias, ()

    def keeps_digits(self, num_rows: int) -> bool:
        """Whether this number of rows is multiplied without rounding inputs, by ``_few``."""
        kind = (self.rounding.code, self.rounding.input_scale is not None)
        return num_rows <= _MOST_UNROUNDED.get(kind, _MOST_FEW)

    def wide(self, dtype: torch.dtype) -> Float[Tensor, "F D"]:
        """Return the decoded weight without ``pre_quant_scale``."""
        if self._has_kernels(dtype):
            from mcore_infer.quantization.kernels import widened

            return widened(self.packed, self.scales, self.layout.code, self.group, dtype)
        codes = decode(unpack(self.packed, self.layout.code), self.layout.code)
        return (codes * spread_scales(self.scales, self.group, codes.shape)).to(dtype)

    def _few(self, x: Tensor) -> Tensor:
        """Multiply rows without rounding them, by the fastest candidate."""
        from mcore_infer.engine.kernels.skinny_gemm import few_rows_linear

        code, group = self.layout.code, self.group
        shape = (self.packed.shape[0], self.packed.shape[1])
        candidates = [
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
        if not self.rounding.code:  # otherwise _many would round the inputs
            candidates.append(self._many)
        key = (x.dtype, code, group, shape, self.rounding.code)
        return self.choices.fastest(key, candidates, x)(x)

    def takes_gated(self, hidden: Float[Tensor, "S *B F2"], activation: str) -> bool:
        """Whether ``gated_forward`` computes these gates and up-projections."""
        num_rows = hidden.shape[:-1].numel()
        return (
            activation in KINDS
            and self.rounding.pre_quant_scale is None
            and not self.keeps_digits(num_rows)
            and hidden.dtype == torch.bfloat16
            and self._multiplies_codes(hidden)
        )

    def gated_forward(
        self, hidden: Float[Tensor, "S *B F2"], activation: str
    ) -> Float[Tensor, "S *B F"]:
        """Return the product of activation(gate) * up, which is computed as it is rounded."""
        y = self.by_codes(hidden.flatten(0, -2), self._code, activation)
        return y.view(*hidden.shape[:-1], y.shape[-1])

    def _many(self, x: Tensor) -> Tensor:
        if self._multiplies_codes(x):
            return self.by_codes(x, self._code)
        return F.linear(self.rounding.rounded(x), self.wide(x.dtype))

    @property
    def rounds(self) -> bool:
        """Whether inputs of many rows are rounded."""
        return bool(self.rounding.code)

    @property
    def _code(self) -> Code:
        assert self.rounding.code
        return self.rounding.code

    def _multiplies_codes(self, x: Tensor) -> bool:
        """Whether rows of x's dtype and device are rounded and multiplied on tensor cores."""
        code, (tall, wide) = self.rounding.code, self.group
        fits = not (self.packed.shape[0] % _MULTIPLE or self.packed.shape[1] % _MULTIPLE)
        has_scales = not wide and tall <= 1  # scales that can be applied after the sum
        if not (code and fits and has_scales and x.is_cuda) or x.dtype == torch.float64:
            return False
        kind = (x.dtype, code, tall, self.rounding.input_scale is not None)
        return works(CODES_GEMM, x.device, *kind)

    def by_codes(
        self, x: Float[Tensor, "T _"], code: Code, activation: str = ""
    ) -> Float[Tensor, "T F"]:
        """Multiply codes with codes on tensor cores; scales of both are applied to the sums.

        Args:
            x: inputs; with an activation gates, then up-projections.
            code: of the inputs.
            activation: see ``rounded_rows``.
        """
        from mcore_infer.quantization.kernels import rounded_rows

        calibrated = self.rounding.input_scale
        # torch's int8 GEMM needs more than 16 rows.
        multiple = 32 if code == "int8" and x.shape[0] < 32 else _MULTIPLE
        codes, scale = rounded_rows(
            x, code, calibrated, activation=activation, multiple=multiple
        )
        columns = self._column_scales
        if code == "int8":
            total = torch._int_mm(codes, self.packed.t())[: x.shape[0]]
            return (total * (scale[: x.shape[0], None] * columns)).to(x.dtype)
        recipe, rows, outputs = Rowwise(), scale[:, None], columns.t()
        if not self.group[0] and self.rounding.input_scale is not None:
            recipe, rows, outputs = Tensorwise(), scale[:1], self.scales.view(1)
        inputs, weight = Factor(codes, rows), Factor(self.packed, outputs)
        return recipe.multiply(inputs, weight, x.dtype, fast_accum=True)[: x.shape[0]]

    @cached_property
    def _column_scales(self) -> Float[Tensor, "1 F"]:
        """One scale for each output; cached, because expanding scales costs a kernel launch."""
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
            codes, row_scales = rounded_rows(x, code, known)
            yield codes.float() * row_scales[:, None], InputRounding(code, known).rounded(x)
        codes, row_scales = rounded_rows(x, code, None, activation="silu", multiple=16)
        decoded = (codes.float() * row_scales[:, None])[:33]
        yield decoded, InputRounding(code).rounded(gated(x, "silu"))


def _try_codes(
    device: torch.device, dtype: torch.dtype, code: Code, tall: int, is_known: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Multiply codes with codes, and their decoded values in torch."""
    from mcore_infer.engine.kernels.skinny_gemm import in_codes

    weight = wave(160, 768, device=device, dtype=torch.float32)
    packed, scales, wide = in_codes(weight, code, (tall, 0))
    layout = next(layout for layout in LAYOUTS.values() if layout.code == code)
    rounding = InputRounding(code, torch.tensor(0.01, device=device) if is_known else None)
    gemm = QuantizedGemm(layout, packed, scales, (tall, 0), rounding)
    for num_rows in (33, 64):
        x = wave(num_rows, 768, device=device, dtype=dtype)
        yield gemm.by_codes(x, code), rounding.rounded(x).double() @ wide.double().t()


CODES_GEMM = OptionalKernel("the GEMM of codes", ("triton",), _try_codes)
"""Kind: dtype of inputs, format, outputs per scale, whether inputs have a calibrated scale."""

QUANTIZED_KERNELS = OptionalKernel(
    "the kernels of quantized weights", ("triton",), _try_kernels
)
"""Kind: dtype of inputs, format of the weight, sizes of a group."""
