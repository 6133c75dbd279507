"""GEMMs in fp8 with one scale a tensor, computed from the tensor at hand ("tensorwise").

Inputs and weights are e4m3, gradients of outputs e5m2 (``hybrid``) or e4m3. All three GEMMs
of a linear run in fp8 and give the model's own dtype; the weight's gradient goes to the main
gradient in its own. On a GPU they are torch's scaled GEMMs; elsewhere, and for float64, the
same fp8 numbers are multiplied in float32 or float64, so that a layout can be held to one
rank without a GPU.

Nothing is remembered from one GEMM to the next but casts of weights, inside
``WeightCasts.keeping``. What is saved for backward is the input's transpose, a byte an
element; recomputation, accumulation and put-off weight gradients see no difference.

A scale is that of the logical tensor: ranks that hold parts of one reduce its largest
magnitude over tensor and context axes, one number, so that a layout casts as one rank does.
Key and value heads that several tensor ranks share are the exception: each casts its own
share of their gradient.

Reference:
    Micikevicius et al. 2022, FP8 Formats for Deep Learning. arXiv:2209.05433.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autocasting import without_autocast
from mcore_parallel.config import Fp8Config
from mcore_parallel.grad_slot import GradSlot
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.precision.fp8_cast import Fp8, cast, dequantized
from mcore_parallel.precision.gemm import PLAIN_GEMM, Gemm, Operands

log = logging.getLogger(__name__)

MULTIPLE = 16
"""Tensor cores take fp8 factors whose sizes are multiples of this."""
FORWARD_DTYPE = torch.float8_e4m3fn
_GRAD_DTYPES = {"e4m3": torch.float8_e4m3fn, "hybrid": torch.float8_e5m2}


class WeightCasts:
    """Casts of weights, kept while weights do not change: inside ``keeping``.

    Outside every GEMM casts its weight itself, so that none is ever stale.
    """

    def __init__(self) -> None:
        """Begin without casts."""
        self._kept: dict[tuple[int, torch.Size], Fp8] | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep casts inside, of one step's forwards and backwards; forget them after it."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def of(self, weight: Float[Tensor, "F D"], axis: Axis) -> Fp8:
        """Return a weight's cast, made now or earlier; the first time reduces over ``axis``."""
        if self._kept is None:
            return cast(weight, FORWARD_DTYPE, axis)
        # Backward sees other tensor objects of the same memory (recomputation).
        key = weight.data_ptr(), weight.shape
        if key not in self._kept:
            self._kept[key] = cast(weight, FORWARD_DTYPE, axis)
        return self._kept[key]


@dataclass(frozen=True, kw_only=True)
class TensorwiseGemm:
    """The GEMMs of one linear in fp8, a scale a tensor. See ``Gemm``.

    Communicates only largest magnitudes, over the axes below. A micro-batch whose tokens are
    no multiple of 16 is multiplied as ``PlainGemm`` does.
    """

    grad_dtype: torch.dtype
    """Of the output's gradient: ``float8_e5m2`` or ``float8_e4m3fn``."""
    casts: WeightCasts = field(default_factory=WeightCasts)
    """Where casts of weights are kept."""
    x_axis: Axis = SINGLE
    """Ranks that hold other parts of the input."""
    weight_axis: Axis = SINGLE
    """Ranks that hold other parts of the weight."""
    grad_axis: Axis = SINGLE
    """Ranks that hold other parts of the output's gradient."""
    unfit: set[tuple[int, int]] = field(default_factory=set, compare=False)
    """Sizes that were refused, each of which is logged once."""

    def fitting(self, num_rows: int, num_columns: int) -> Gemm:
        """Return itself, or ``PLAIN_GEMM`` for a weight whose sizes do not suit fp8."""
        if num_rows % MULTIPLE == 0 and num_columns % MULTIPLE == 0:
            return self
        if (num_rows, num_columns) not in self.unfit:
            self.unfit.add((num_rows, num_columns))
            log.warning(
                "linears of %d x %d on a rank are not multiplied in fp8: both must be "
                "multiples of %d.",
                num_rows,
                num_columns,
                MULTIPLE,
            )
        return PLAIN_GEMM

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Float[Tensor, "F D"], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return the product, and the input's transpose with its scale."""
        if not _fits(x):
            return PLAIN_GEMM.forward(x, weight, bias)
        own = cast(x.flatten(0, -2), FORWARD_DTYPE, self.x_axis)
        wide = self.casts.of(weight, self.weight_axis)
        y = multiply(
            own.rows, wide.rows, own.scale_inv, wide.scale_inv, x.dtype, fast_accum=True
        ).view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias, (own.columns, own.scale_inv)

    def keep(self, x: Float[Tensor, "S *B D"]) -> Operands:
        """Return the input's transpose in fp8, and its scale."""
        if not _fits(x):
            return (x,)
        own = cast(x.flatten(0, -2), FORWARD_DTYPE, self.x_axis, has_rows=False)
        return own.columns, own.scale_inv

    def prepare(self, grad: Float[Tensor, "S *B F"]) -> Operands:
        """Return the gradient in fp8, its transpose, and their scale."""
        if not _fits(grad):
            return (grad,)
        own = cast(grad.flatten(0, -2), self.grad_dtype, self.grad_axis)
        return own.rows.view(grad.shape), own.columns, own.scale_inv

    def input_grad(
        self, grad: Operands, weight: Float[Tensor, "F D"]
    ) -> Float[Tensor, "S *B D"]:
        """Return the gradient of the input."""
        if len(grad) == 1:
            return PLAIN_GEMM.input_grad(grad, weight)
        rows, _, scale_inv = grad
        wide = self.casts.of(weight, self.weight_axis)
        flat = multiply(
            rows.flatten(0, -2), wide.columns, scale_inv, wide.scale_inv, weight.dtype
        )
        return flat.view(*rows.shape[:-1], weight.shape[1])

    def weight_grad(
        self, grad: Operands, kept: Operands, slot: GradSlot | None
    ) -> Float[Tensor, "F D"] | None:
        """Return the weight's gradient; None where it was added to the main gradient."""
        if len(grad) == 1:
            return PLAIN_GEMM.weight_grad(grad, kept, slot)
        (_, rows, grad_scale), (columns, x_scale) = grad, kept
        if slot is None:
            return multiply(rows, columns, grad_scale, x_scale, grad_scale.dtype)
        assert slot.main is not None
        out = slot.main if slot.take_stale() else torch.empty_like(slot.main)
        multiply(rows, columns, grad_scale, x_scale, out.dtype, out=out)
        if out is not slot.main:
            slot.add(out)
        slot.ready()
        return None


def multiply(
    a: Tensor,
    b: Tensor,
    a_scale: Float[Tensor, " 1"],
    b_scale: Float[Tensor, " 1"],
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """Return the scaled matrix product of a and the transpose of b.

    Args:
        a: fp8, ``[M, K]``.
        b: fp8, ``[N, K]``.
        a_scale: multiplies a; float32, or float64 for products in float64.
        b_scale: multiplies b.
        dtype: of the result.
        out: written over with the result, of that dtype.
        fast_accum: let tensor cores keep sums in fewer bits, for twice the speed on Hopper.
    """
    if a.is_cuda and a_scale.dtype == torch.float32:
        return torch._scaled_mm(
            a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast_accum, out=out
        )
    with without_autocast(a.device):
        product = dequantized(a, a_scale) @ dequantized(b, b_scale).t()
    return product.to(dtype) if out is None else out.copy_(product)


@dataclass(frozen=True)
class LinearGemms:
    """What the linears of one layer multiply with."""

    column: Gemm = PLAIN_GEMM
    """For ``ColumnParallelLinear``."""
    row: Gemm = PLAIN_GEMM
    """For ``RowParallelLinear``."""


PLAIN_GEMMS = LinearGemms()
"""In the dtype of the model."""


def fp8_gemms(config: Fp8Config, ctx: ParallelContext, casts: WeightCasts) -> LinearGemms:
    """Build the GEMMs of layers in fp8; no communication.

    Args:
        config: format and recipe.
        ctx: whose tensor and context ranks share scales.
        casts: where casts of weights are kept.

    Raises:
        ValueError: if this GPU has no fp8 tensor cores.
    """
    if ctx.device.type == "cuda" and torch.cuda.get_device_capability(ctx.device) < (8, 9):
        raise ValueError(
            f"--fp8-format {config.fp8_format} needs a GPU with fp8 tensor cores (Ada, Hopper "
            f"or later), and {torch.cuda.get_device_name(ctx.device)} has none: leave it out."
        )
    common = {"grad_dtype": _GRAD_DTYPES[config.fp8_format], "casts": casts}
    tokens, whole = ctx.cp, ctx.axis("tp", "cp")
    return LinearGemms(
        TensorwiseGemm(x_axis=tokens, weight_axis=ctx.tp, grad_axis=whole, **common),
        TensorwiseGemm(x_axis=whole, weight_axis=ctx.tp, grad_axis=tokens, **common),
    )


def layer_gemms(
    config: Fp8Config, ctx: ParallelContext, num_layers: int, casts: WeightCasts
) -> list[LinearGemms]:
    """Return the GEMMs of every layer of the model, by global number.

    Raises:
        ValueError: see ``fp8_gemms``.
    """
    if not config.fp8_format:
        return [PLAIN_GEMMS] * num_layers
    narrow = fp8_gemms(config, ctx, casts)
    first = config.num_layers_at_start_in_bf16 if config.first_last_layers_bf16 else 0
    last = config.num_layers_at_end_in_bf16 if config.first_last_layers_bf16 else 0
    return [
        narrow if first <= layer < num_layers - last else PLAIN_GEMMS
        for layer in range(num_layers)
    ]


def _fits(x: Tensor) -> bool:
    return x.shape[:-1].numel() % MULTIPLE == 0
