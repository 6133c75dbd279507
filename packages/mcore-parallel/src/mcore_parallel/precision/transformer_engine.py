"""GEMMs of linears by NVIDIA's Transformer Engine: an extra, never imported unless chosen.

``TransformerEngineGemm`` is a ``Gemm``: weights, communication and gradient slots stay in the
linears, and Transformer Engine casts and multiplies, in 16 bits or by its own fp8 quantizers.
As in ``fp8``, the same ranks share scales, weights are cast once per step, and delayed scales
come from the same histories, so checkpoints and layouts do not depend on the backend.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.autograd.grad_slot import GradSlot
from mcore_parallel.mesh import Axis
from mcore_parallel.precision.delayed_scaling import Operand
from mcore_parallel.precision.fp8 import FORWARD_DTYPE, Fp8Gemm
from mcore_parallel.precision.fp8_recipes import Blockwise, Delayed, Recipe, Rowwise
from mcore_parallel.precision.gemm import PLAIN_GEMM, Gemm, Operands

EXTRA = 'Transformer Engine is not installed: pip install "mcore-models[te]"'
_TESTED = "2.20."


def refusal() -> str:
    """Return why Transformer Engine cannot be used, without importing it; empty: it can."""
    try:
        installed = version("transformer-engine")
        version("transformer-engine-torch")
    except PackageNotFoundError:
        return EXTRA
    if not installed.startswith(_TESTED):
        return f"Transformer Engine {installed} is installed, but {_TESTED}* is required"
    return ""


def by_transformer_engine(gemm: Gemm) -> Gemm:
    """Return Transformer Engine's counterpart of a linear's GEMM."""
    if gemm is PLAIN_GEMM:
        return TransformerEngineGemm()
    if not isinstance(gemm, Fp8Gemm):
        raise ValueError(f"Transformer Engine has no counterpart of {type(gemm).__name__}.")
    if isinstance(gemm.recipe, Rowwise):
        raise ValueError(
            "--transformer-impl transformer_engine has no --fp8-recipe rowwise: use "
            "tensorwise, delayed or blockwise."
        )
    return TransformerEngineGemm(gemm)


@dataclass(frozen=True)
class TransformerEngineGemm:
    """The GEMMs of one linear by Transformer Engine. See ``Gemm``.

    Communicates only largest magnitudes, over the axes of ``fp8``.
    """

    fp8: Fp8Gemm | None = None
    """Formats, recipe, cache of casts and cuts; None: multiply in the operands' dtype."""

    def fitting(self, num_rows: int, num_columns: int) -> Gemm:  # noqa: ARG002
        """Return this object, which was built from a fitted ``Gemm``."""
        return self

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Float[Tensor, "F D"], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return the output, and the operands of ``keep``."""
        x_cast, factor = self._cast("x", x), self._weight(x, weight)
        y = _gemm(factor, x_cast, layout="TN", out_dtype=weight.dtype).view(*x.shape[:-1], -1)
        if isinstance(x_cast, _quantized()):
            x_cast.update_usage(rowwise_usage=False)  # free all but the transpose
        return y if bias is None else y + bias, (x_cast,)

    def keep(self, x: Float[Tensor, "S *B D"]) -> Operands:
        """Return the input for the weight's gradient; in fp8 its transpose only."""
        x_cast = self._cast("x", x)
        if isinstance(x_cast, _quantized()):
            x_cast.update_usage(rowwise_usage=False)
        return (x_cast,)

    def prepare(self, grad: Float[Tensor, "S *B F"]) -> Operands:
        """Return the gradient, cast for both GEMMs, and an empty tensor with its shape."""
        return self._cast("grad", grad), grad.new_empty(*grad.shape[:-1], 0)

    def input_grad(
        self, grad: Operands, weight: Float[Tensor, "F D"]
    ) -> Float[Tensor, "S *B D"]:
        """Return the gradient of the input."""
        grad_cast, tokens = grad
        factor, dtype = self._weight(tokens, weight), weight.dtype
        dx = _gemm(factor, grad_cast, layout="NN", out_dtype=dtype, is_backward=True)
        return dx.view(*tokens.shape[:-1], -1)

    def weight_grad(
        self, grad: Operands, kept: Operands, slot: GradSlot | None
    ) -> Float[Tensor, "F D"] | None:
        """Return the weight's gradient, or accumulate it in the main gradient; return None."""
        (grad_cast, _), (x,) = grad, kept
        if slot is None:
            return _gemm(x, grad_cast, layout="NT", out_dtype=grad_cast.dtype, is_backward=True)
        main = slot.main
        assert main is not None
        options: dict[str, Any] = {"layout": "NT", "out_dtype": main.dtype, "is_backward": True}
        if main.data_ptr() % 16 == 0:
            _gemm(x, grad_cast, out=main, accumulate=not slot.take_stale(), **options)
        else:
            slot.add(_gemm(x, grad_cast, **options))
        slot.ready()
        return None

    def _weight(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return the weight to multiply these tokens by: in fp8 a cast, cached for the step."""
        if self.fp8 is None or not self.fp8.fits(tokens):
            return weight
        return self.fp8.casts.kept(weight, lambda: self._quantize("weight", weight))

    def _cast(self, operand: Operand, x: Tensor) -> Any:
        flat = x.flatten(0, -2).contiguous()
        if self.fp8 is None or not self.fp8.fits(x):
            return flat
        return self._quantize(operand, flat)

    def _quantize(self, operand: Operand, x: Float[Tensor, "T D"]) -> Any:
        fp8 = self.fp8
        assert fp8 is not None
        cuts = {"x": fp8.x_cut, "weight": fp8.weight_cut, "grad": fp8.grad_cut}
        dtype = fp8.grad_dtype if operand == "grad" else FORWARD_DTYPE
        with torch.no_grad():
            return _quantizer(fp8.recipe, operand, x, dtype, cuts[operand].whole)(x)


def _quantizer(
    recipe: Recipe, operand: Operand, x: Tensor, dtype: torch.dtype, axis: Axis
) -> Any:
    """Build Transformer Engine's quantizer of one matrix, in both orders."""
    te = import_module("transformer_engine.pytorch")
    is_e4m3 = dtype == torch.float8_e4m3fn
    kind = te.DType.kFloat8E4M3 if is_e4m3 else te.DType.kFloat8E5M2
    if isinstance(recipe, Blockwise):
        dims = 2 if operand == "weight" else 1
        return te.Float8BlockQuantizer(
            kind, rowwise=True, columnwise=True, block_scaling_dim=dims
        )
    if isinstance(recipe, Delayed):
        amax, seen = recipe.scales.views(recipe.number, operand)
        if amax is not None:
            scale = torch.full_like(amax, torch.finfo(dtype).max) / amax
            seen = torch.zeros_like(amax) if seen is None else seen
            return te.Float8Quantizer(scale, seen, kind)  # raises ``seen`` in the cast
        if seen is not None:
            seen.copy_(torch.maximum(seen, x.abs().amax().float()))
    return te.Float8CurrentScalingQuantizer(
        kind,
        device=x.device,
        with_amax_reduction=axis.size > 1,
        amax_reduction_group=axis.group,
    )


def _gemm(
    a: Any,
    b: Any,
    *,
    layout: str,
    out_dtype: torch.dtype,
    is_backward: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Multiply as Transformer Engine's own linear does, in column-major order.

    Forward may accumulate in fewer bits; backward accumulates in float32.
    """
    product, *_ = import_module("transformer_engine.pytorch.cpp_extensions").general_gemm(
        a,
        b,
        out_dtype=out_dtype,
        layout=layout,
        out=out,
        accumulate=accumulate,
        use_split_accumulator=is_backward,
        grad=is_backward,
    )
    return product


def _quantized() -> type:
    return import_module("transformer_engine.pytorch").QuantizedTensor
