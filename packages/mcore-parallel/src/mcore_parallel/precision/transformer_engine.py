"""GEMMs of linears by NVIDIA's Transformer Engine: an extra, never imported unless chosen.

``TransformerEngineGemm`` is a ``Gemm``: the linears keep their weights, their communication and
their gradient slots, and Transformer Engine casts and multiplies, in 16 bits or by its own fp8
quantizers. As in ``fp8`` the same ranks share scales, weights are cast once a step, and delayed
scales come from the same histories: checkpoints and layouts do not see who multiplies.
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
    """Return why Transformer Engine cannot be used here; empty: it can. Imports nothing."""
    try:
        found = version("transformer-engine")
        version("transformer-engine-torch")
    except PackageNotFoundError:
        return EXTRA
    if not found.startswith(_TESTED):
        return f"Transformer Engine {found} is installed, and {_TESTED}* is what was tested"
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
    """Formats, recipe, casts of weights and ranks that share scales; None: as the operands."""

    def fitting(self, num_rows: int, num_columns: int) -> Gemm:  # noqa: ARG002
        """Return itself: what it is made of has been fitted."""
        return self

    def forward(
        self, x: Float[Tensor, "S *B D"], weight: Float[Tensor, "F D"], bias: Tensor | None
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return the output, and the input as ``keep`` does."""
        own, wide = self._cast("x", x), self._weight(x, weight)
        y = _gemm(wide, own, layout="TN", out_dtype=weight.dtype).view(*x.shape[:-1], -1)
        if isinstance(own, _quantized()):
            own.update_usage(rowwise_usage=False)
        return y if bias is None else y + bias, (own,)

    def keep(self, x: Float[Tensor, "S *B D"]) -> Operands:
        """Return what the weight's gradient needs of the input: its transpose, if in fp8."""
        own = self._cast("x", x)
        if isinstance(own, _quantized()):
            own.update_usage(rowwise_usage=False)
        return (own,)

    def prepare(self, grad: Float[Tensor, "S *B F"]) -> Operands:
        """Return the gradient, cast once for both GEMMs, and an empty tensor of its tokens."""
        return self._cast("grad", grad), grad.new_empty(*grad.shape[:-1], 0)

    def input_grad(
        self, grad: Operands, weight: Float[Tensor, "F D"]
    ) -> Float[Tensor, "S *B D"]:
        """Return the gradient of the input."""
        own, tokens = grad
        wide, dtype = self._weight(tokens, weight), weight.dtype
        dx = _gemm(wide, own, layout="NN", out_dtype=dtype, is_backward=True)
        return dx.view(*tokens.shape[:-1], -1)

    def weight_grad(
        self, grad: Operands, kept: Operands, slot: GradSlot | None
    ) -> Float[Tensor, "F D"] | None:
        """Return the weight's gradient; None where the GEMM added it to the main gradient."""
        (own, _), (x,) = grad, kept
        if slot is None:
            return _gemm(x, own, layout="NT", out_dtype=own.dtype, is_backward=True)
        main = slot.main
        assert main is not None
        options: dict[str, Any] = {"layout": "NT", "out_dtype": main.dtype, "is_backward": True}
        if main.data_ptr() % 16 == 0:
            _gemm(x, own, out=main, accumulate=not slot.take_stale(), **options)
        else:
            slot.add(_gemm(x, own, **options))
        slot.ready()
        return None

    def _weight(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return the weight as it is multiplied for these tokens, cast once a step."""
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
    """Build what casts one matrix, in both orders."""
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
            return te.Float8Quantizer(scale, seen, kind)  # raises what was seen itself
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
    """Multiply as Transformer Engine's own linear does, in its column-major order.

    Forward may keep partial sums in fewer bits; the gradients' are promoted to float32.
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
