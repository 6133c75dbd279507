"""``Fp8Gemm``: the three GEMMs of a linear in fp8, by any scaling recipe.

Inputs and weights are cast to e4m3, gradients of outputs to e5m2 (``hybrid``) or e4m3. All
three GEMMs of a linear run in fp8. Results have the model's dtype, or the main gradient's dtype
for the weight's gradient. On a GPU these are torch's scaled GEMMs; on a CPU, and for float64,
the fp8 numbers are multiplied in float32 or float64, so that tests can compare a layout with
one rank without a GPU.

Casts of weights are cached during a step (``WeightCasts.keeping``). Autograd saves the input's
transpose in fp8, one byte per element; recomputation, gradient accumulation and deferred weight
gradients work as in other precisions.

A scale belongs to a logical tensor: ranks that hold parts of it all-reduce its largest
magnitude, so that every layout casts as one rank does. The exception are key and value heads
that several tensor ranks replicate: each rank scales its own part of their gradient.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_parallel.autograd.functions import autocast_dtype
from mcore_parallel.autograd.grad_slot import GradSlot
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.precision.capability import fp8_problem
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.precision.delayed_scaling import DelayedScales
from mcore_parallel.precision.fp8_cast import DeferredMatrix
from mcore_parallel.precision.fp8_recipes import (
    Blockwise,
    Cut,
    Delayed,
    Factor,
    Recipe,
    Rowwise,
    Scaled,
    Tensorwise,
)
from mcore_parallel.precision.gemm import PLAIN_GEMM, Gemm, Operands

log = logging.getLogger(__name__)

FORWARD_DTYPE = torch.float8_e4m3fn
_GRAD_DTYPES = {"e4m3": torch.float8_e4m3fn, "hybrid": torch.float8_e5m2}
_WHOLE = Cut()

RECIPES: Mapping[str, type[Recipe]] = MappingProxyType(
    {
        "tensorwise": Tensorwise,
        "rowwise": Rowwise,
        "blockwise": Blockwise,
    }
)
"""Recipes by the name of ``--fp8-recipe``, except ``delayed``, whose linears have state."""


class WeightCasts:
    """Cache of weights' casts, active inside ``keeping``, where weights must not change.

    Outside ``keeping`` every GEMM casts its weight anew, so no cast is ever stale.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.Size], Any] | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Cache casts inside the block, the forwards and backwards of one step."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Drop casts made inside the block at its end, when their memory may be reused."""
        casts_before = None if self._kept is None else dict(self._kept)
        try:
            yield
        finally:
            self._kept = casts_before

    def held(self) -> list[Any]:
        """Return all cached casts, for a caller that must keep references to them."""
        return list((self._kept or {}).values())

    def of(self, weight: Float[Tensor, "F D"], recipe: Recipe, cut: Cut) -> Scaled:
        """Return a weight's cast from the cache, or cast it and all-reduce over ``cut``."""
        return self.kept(weight, lambda: recipe.cast("weight", weight, FORWARD_DTYPE, cut))

    def kept(self, weight: Shaped[Tensor, "..."], make: Callable[[], Any]) -> Any:
        """Return the cached result of ``make`` for a weight, or call ``make``."""
        if self._kept is None:
            return make()
        # By memory: recomputation passes other tensor objects for the same weight.
        key = weight.data_ptr(), weight.shape
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


@dataclass(frozen=True, kw_only=True)
class Fp8Gemm:
    """The GEMMs of one linear in fp8. See ``Gemm``.

    All-reduces only largest magnitudes, over the axes of the cuts. ``PlainGemm`` multiplies a
    micro-batch whose number of tokens is not a multiple of ``recipe.multiple``.
    """

    grad_dtype: torch.dtype
    """fp8 format of the output's gradient: ``float8_e5m2`` or ``float8_e4m3fn``."""
    recipe: Recipe = field(default_factory=Tensorwise)
    """How operands are scaled."""
    casts: WeightCasts = field(default_factory=WeightCasts)
    """Cache of the casts of weights."""
    x_cut: Cut = _WHOLE
    """How ranks split the input."""
    weight_cut: Cut = _WHOLE
    """How ranks split the weight."""
    grad_cut: Cut = _WHOLE
    """How ranks split the output's gradient."""
    unfit: set[tuple[int, int]] = field(default_factory=set, compare=False)
    """Unsupported sizes of weights that were logged; each is logged once."""

    def fitting(self, num_rows: int, num_columns: int) -> Gemm:
        """Return the ``Gemm`` of one linear; ``PLAIN_GEMM`` if its sizes do not fit fp8."""
        # Claimed even if unsupported: names of histories must not depend on the layout.
        recipe, multiple = self.recipe.claim(self.grad_dtype), self.recipe.multiple
        if num_rows % multiple == 0 and num_columns % multiple == 0:
            return replace(self, recipe=recipe)
        if (num_rows, num_columns) not in self.unfit:
            self.unfit.add((num_rows, num_columns))
            log.warning(
                "linears of %d x %d on a rank are not multiplied in fp8: both must be "
                "multiples of %d.",
                num_rows,
                num_columns,
                multiple,
            )
        return PLAIN_GEMM

    def forward(
        self,
        x: Float[Tensor, "S *B D"] | DeferredMatrix,
        weight: Float[Tensor, "F D"],
        bias: Tensor | None,
    ) -> tuple[Float[Tensor, "S *B F"], Operands]:
        """Return the output, and the input's transpose with its scales."""
        if isinstance(x, Tensor) and not self.fits(x):
            return PLAIN_GEMM.forward(x, weight, bias)
        x_cast = self.recipe.cast("x", _flat(x), FORWARD_DTYPE, self.x_cut)
        weight_cast = self._cast_of(weight)
        y = self.recipe.multiply(x_cast.rows, weight_cast.rows, weight.dtype, fast_accum=True)
        y = y.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias, x_cast.columns

    def keep(self, x: Float[Tensor, "S *B D"] | DeferredMatrix) -> Operands:
        """Return the input's transpose in fp8, and its scales."""
        if isinstance(x, Tensor) and not self.fits(x):
            return (x,)
        return self.recipe.cast(
            "x", _flat(x), FORWARD_DTYPE, self.x_cut, has_rows=False
        ).columns

    def prepare(self, grad: Float[Tensor, "S *B F"] | DeferredMatrix) -> Operands:
        """Return the gradient in fp8 and its transpose, each with its scales."""
        if isinstance(grad, Tensor) and not self.fits(grad):
            return (grad,)
        grad_cast = self.recipe.cast("grad", _flat(grad), self.grad_dtype, self.grad_cut)
        rows = grad_cast.rows
        return rows.numbers.view(grad.shape), rows.scales, *grad_cast.columns

    def input_grad(
        self, grad: Operands, weight: Float[Tensor, "F D"]
    ) -> Float[Tensor, "S *B D"]:
        """Return the gradient of the input."""
        if len(grad) == 1:
            return PLAIN_GEMM.input_grad(grad, weight)
        rows, scales, *_ = grad
        grad_rows, weight_cast = Factor(rows.flatten(0, -2), scales), self._cast_of(weight)
        dx = self.recipe.multiply(grad_rows, weight_cast.columns, weight.dtype)
        return dx.view(*rows.shape[:-1], weight.shape[1])

    def weight_grad(
        self, grad: Operands, kept: Operands, slot: GradSlot | None
    ) -> Float[Tensor, "F D"] | None:
        """Return the weight's gradient, or add it to the main gradient and return None."""
        if len(grad) == 1:
            return PLAIN_GEMM.weight_grad(grad, kept, slot)
        rows, columns = Factor(*grad[2:]), Factor(*kept)
        if slot is None:
            return self.recipe.multiply(rows, columns, rows.scales.dtype)
        self.recipe.add(slot, rows, columns)
        slot.ready()
        return None

    def fits(self, x: Float[Tensor, "S *B D"]) -> bool:
        """Whether fp8 supports the number of rows of x; ``PlainGemm`` multiplies otherwise."""
        return x.shape[:-1].numel() % self.recipe.multiple == 0

    def takes_deferred(self, x: Float[Tensor, "S *B D"]) -> bool:
        """Whether ``forward`` accepts a ``DeferredMatrix`` with as many rows as x.

        Never in compiled code or under autocast.
        """
        is_plain = autocast_dtype(x.device) is None and not torch.compiler.is_compiling()
        return self.recipe.takes_deferred and self.fits(x) and is_plain

    def _cast_of(self, weight: Tensor) -> Scaled:
        return self.casts.of(weight, self.recipe, self.weight_cut)


def _flat(x: Tensor | DeferredMatrix) -> Tensor | DeferredMatrix:
    return x.flatten(0, -2) if isinstance(x, Tensor) else x


@dataclass(frozen=True)
class LinearGemms:
    """The ``Gemm`` objects of the linears of one layer."""

    column: Gemm = PLAIN_GEMM
    """``Gemm`` of column-parallel linears."""
    row: Gemm = PLAIN_GEMM
    """``Gemm`` of row-parallel linears."""
    casts: WeightCasts | None = None
    """Cache of the casts of experts' weights; None without fp8."""


PLAIN_GEMMS = LinearGemms()
"""GEMMs in the dtype of the model."""


def fp8_gemms(
    config: Fp8Config, ctx: ParallelContext, casts: WeightCasts, recipe: Recipe | None = None
) -> LinearGemms:
    """Build the fp8 GEMMs of one layer; no communication.

    Args:
        config: format and recipe.
        ctx: context whose tensor and context ranks share scales.
        casts: cache of the casts of weights.
        recipe: None: the config's recipe, which must not be ``delayed``.

    Raises:
        ValueError: if this GPU has no tensor cores for the recipe.
    """
    _check_device(config, ctx.device)
    recipe = recipe or RECIPES[config.fp8_recipe]()
    dtype = _GRAD_DTYPES[config.fp8_format]
    tp, cp, tp_cp = ctx.tp, ctx.cp, ctx.axis("tp", "cp")
    # ``tokens``: a matrix [tokens over cp, all features]; ``split``: features over tp as well.
    tokens, split = Cut(column=cp, whole=cp), Cut(row=tp, column=cp, whole=tp_cp)
    common = {"grad_dtype": dtype, "recipe": recipe, "casts": casts}
    # Weights of a column-parallel linear are split by rows, of a row-parallel one by columns.
    rows, columns = Cut(column=tp, whole=tp), Cut(row=tp, whole=tp)
    return LinearGemms(
        Fp8Gemm(x_cut=tokens, weight_cut=rows, grad_cut=split, **common),
        Fp8Gemm(x_cut=split, weight_cut=columns, grad_cut=tokens, **common),
        casts,
    )


def layer_gemms(
    config: Fp8Config,
    ctx: ParallelContext,
    num_layers: int,
    casts: WeightCasts,
    scales: DelayedScales | None = None,
    num_mtp_layers: int = 0,
    *,
    recipes: Mapping[str, type[Recipe]] = RECIPES,
) -> list[LinearGemms]:
    """Return the GEMMs of every layer by global layer number, then of multi-token prediction.

    Layers of multi-token prediction use fp8 if the last layer does, with scales of their own.

    Args:
        config: format, recipe, and layers without fp8.
        ctx: context whose tensor and context ranks share scales.
        num_layers: layers of the model.
        casts: cache of the casts of weights.
        scales: result of ``delayed_scales``; None for other recipes.
        num_mtp_layers: layers of multi-token prediction.
        recipes: recipe classes by the name of ``--fp8-recipe``.

    Raises:
        ValueError: if this GPU has no tensor cores for the recipe.
    """
    if not config.fp8_format:
        return [PLAIN_GEMMS] * (num_layers + num_mtp_layers)
    first = config.num_layers_at_start_in_bf16 if config.first_last_layers_bf16 else 0
    last = config.num_layers_at_end_in_bf16 if config.first_last_layers_bf16 else 0
    gemms = []
    names = [(layer, f"blocks.{layer}") for layer in range(num_layers)]
    names += [(num_layers - 1, f"mtp.{depth}.block") for depth in range(num_mtp_layers)]
    for layer, name in names:
        recipe = recipes[config.fp8_recipe]() if scales is None else Delayed(scales, name)
        is_fp8 = first <= layer < num_layers - last
        gemms.append(fp8_gemms(config, ctx, casts, recipe) if is_fp8 else PLAIN_GEMMS)
    return gemms


def delayed_scales(config: Fp8Config, ctx: ParallelContext) -> DelayedScales | None:
    """Build the scale histories of ``--fp8-recipe delayed``; None for other recipes."""
    if not config.fp8_format or config.fp8_recipe != "delayed":
        return None
    return DelayedScales(
        config.fp8_amax_history_len,
        takes_max=config.fp8_amax_compute_algo == "max",
        axis=ctx.axis("tp", "cp", "dp"),
        replicas=(ctx.tp, ctx.dp_cp),
        device=ctx.device,
    )


def _check_device(config: Fp8Config, device: torch.device) -> None:
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if problem := fp8_problem(config, capability, torch.cuda.get_device_name(device)):
        raise ValueError(problem)
