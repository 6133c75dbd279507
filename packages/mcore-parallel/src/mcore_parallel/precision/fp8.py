"""Linears in fp8: what they cast, keep, reduce and multiply, by any recipe.

Inputs and weights are e4m3, gradients of outputs e5m2 (``hybrid``) or e4m3. All three GEMMs
of a linear run in fp8 and give the model's own dtype; the weight's gradient goes to the main
gradient in its own. On a GPU they are torch's scaled GEMMs; elsewhere, and for float64, the
same fp8 numbers are multiplied in float32 or float64, so that a layout can be held to one
rank without a GPU.

Casts of weights are kept while a step lasts (``WeightCasts.keeping``). What is saved for
backward is the input's transpose, a byte an element; recomputation, accumulation and put-off
weight gradients see no difference.

A scale is that of the logical tensor: ranks that hold parts of what shares it reduce its
largest magnitude, so that a layout casts as one rank does. Key and value heads that several
tensor ranks share are the exception: each casts its own share of their gradient.
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
"""By the name of ``--fp8-recipe``; ``delayed``, which remembers, is built for each layer."""


class WeightCasts:
    """Casts of weights, kept while weights do not change: inside ``keeping``.

    Outside every GEMM casts its weight itself, so that none is ever stale.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.Size], Any] | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep casts inside, of one step's forwards and backwards; forget them after it."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Forget after it what is made inside: its memory may be written over."""
        before = None if self._kept is None else dict(self._kept)
        try:
            yield
        finally:
            self._kept = before

    def held(self) -> list[Any]:
        """Return what is kept now, for those who must keep its memory."""
        return list((self._kept or {}).values())

    def of(self, weight: Float[Tensor, "F D"], recipe: Recipe, cut: Cut) -> Scaled:
        """Return a weight's cast, made now or earlier; the first time reduces over ``cut``."""
        return self.kept(weight, lambda: recipe.cast("weight", weight, FORWARD_DTYPE, cut))

    def kept(self, weight: Shaped[Tensor, "..."], make: Callable[[], Any]) -> Any:
        """Return what ``make`` gives, made now or earlier for the same weight."""
        if self._kept is None:
            return make()
        # Backward sees other tensor objects of the same memory (recomputation).
        key = weight.data_ptr(), weight.shape
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


@dataclass(frozen=True, kw_only=True)
class Fp8Gemm:
    """The GEMMs of one linear in fp8. See ``Gemm``.

    Communicates only largest magnitudes, over the axes below. A micro-batch whose tokens are
    no multiple of what the recipe needs is multiplied as ``PlainGemm`` does.
    """

    grad_dtype: torch.dtype
    """Of the output's gradient: ``float8_e5m2`` or ``float8_e4m3fn``."""
    recipe: Recipe = field(default_factory=Tensorwise)
    """How operands are scaled."""
    casts: WeightCasts = field(default_factory=WeightCasts)
    """Where casts of weights are kept."""
    x_cut: Cut = _WHOLE
    """How ranks share the input."""
    weight_cut: Cut = _WHOLE
    """How ranks share the weight."""
    grad_cut: Cut = _WHOLE
    """How ranks share the output's gradient."""
    unfit: set[tuple[int, int]] = field(default_factory=set, compare=False)
    """Sizes that were refused, each of which is logged once."""

    def fitting(self, num_rows: int, num_columns: int) -> Gemm:
        """Return itself for one linear, or ``PLAIN_GEMM`` for sizes that do not suit fp8."""
        # Claimed in any case: names of what is remembered must not depend on the layout.
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
        own = self.recipe.cast("x", _flat(x), FORWARD_DTYPE, self.x_cut)
        wide = self._cast_of(weight)
        y = self.recipe.multiply(own.rows, wide.rows, weight.dtype, fast_accum=True)
        y = y.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias, own.columns

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
        own = self.recipe.cast("grad", _flat(grad), self.grad_dtype, self.grad_cut)
        return own.rows.numbers.view(grad.shape), own.rows.scales, *own.columns

    def input_grad(
        self, grad: Operands, weight: Float[Tensor, "F D"]
    ) -> Float[Tensor, "S *B D"]:
        """Return the gradient of the input."""
        if len(grad) == 1:
            return PLAIN_GEMM.input_grad(grad, weight)
        rows, scales, *_ = grad
        flat, wide = Factor(rows.flatten(0, -2), scales), self._cast_of(weight)
        dx = self.recipe.multiply(flat, wide.columns, weight.dtype)
        return dx.view(*rows.shape[:-1], weight.shape[1])

    def weight_grad(
        self, grad: Operands, kept: Operands, slot: GradSlot | None
    ) -> Float[Tensor, "F D"] | None:
        """Return the weight's gradient; None where it was added to the main gradient."""
        if len(grad) == 1:
            return PLAIN_GEMM.weight_grad(grad, kept, slot)
        rows, columns = Factor(*grad[2:]), Factor(*kept)
        if slot is None:
            return self.recipe.multiply(rows, columns, rows.scales.dtype)
        self.recipe.add(slot, rows, columns)
        slot.ready()
        return None

    def fits(self, x: Float[Tensor, "S *B D"]) -> bool:
        """Return whether tensor cores take a matrix of so many rows; else torch multiplies."""
        return x.shape[:-1].numel() % self.recipe.multiple == 0

    def takes_deferred(self, x: Float[Tensor, "S *B D"]) -> bool:
        """Whether ``forward`` takes a ``DeferredMatrix`` with as many rows as x.

        Not in compiled code nor under autocast.
        """
        is_plain = autocast_dtype(x.device) is None and not torch.compiler.is_compiling()
        return self.recipe.takes_deferred and self.fits(x) and is_plain

    def _cast_of(self, weight: Tensor) -> Scaled:
        return self.casts.of(weight, self.recipe, self.weight_cut)


def _flat(x: Tensor | DeferredMatrix) -> Tensor | DeferredMatrix:
    return x.flatten(0, -2) if isinstance(x, Tensor) else x


@dataclass(frozen=True)
class LinearGemms:
    """What the linears of one layer multiply with."""

    column: Gemm = PLAIN_GEMM
    """For ``ColumnParallelLinear``."""
    row: Gemm = PLAIN_GEMM
    """For ``RowParallelLinear``."""
    casts: WeightCasts | None = None
    """Where casts of experts' weights are kept; None outside fp8."""


PLAIN_GEMMS = LinearGemms()
"""In the dtype of the model."""


def fp8_gemms(
    config: Fp8Config, ctx: ParallelContext, casts: WeightCasts, recipe: Recipe | None = None
) -> LinearGemms:
    """Build the GEMMs of layers in fp8; no communication.

    Args:
        config: format and recipe.
        ctx: whose tensor and context ranks share scales.
        casts: where casts of weights are kept.
        recipe: left out, the config's, which must not remember anything.

    Raises:
        ValueError: if this GPU has no tensor cores for the recipe.
    """
    _check_device(config, ctx.device)
    recipe = recipe or RECIPES[config.fp8_recipe]()
    dtype = _GRAD_DTYPES[config.fp8_format]
    tp, cp, both = ctx.tp, ctx.cp, ctx.axis("tp", "cp")
    tokens, split = Cut(column=cp, whole=cp), Cut(row=tp, column=cp, whole=both)
    common = {"grad_dtype": dtype, "recipe": recipe, "casts": casts}
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
    """Return the GEMMs of every layer of the model, by global number.

    Those of multi-token prediction follow, each as the last layer's with scales of its own.

    Args:
        config: format, recipe, and layers that stay out of it.
        ctx: whose tensor and context ranks share scales.
        num_layers: of the model.
        casts: where casts of weights are kept.
        scales: of ``delayed_scales``; None for recipes that remember nothing.
        num_mtp_layers: layers of multi-token prediction.
        recipes: by the name of ``--fp8-recipe``.

    Raises:
        ValueError: see ``fp8_gemms``.
    """
    if not config.fp8_format:
        return [PLAIN_GEMMS] * (num_layers + num_mtp_layers)
    first = config.num_layers_at_start_in_bf16 if config.first_last_layers_bf16 else 0
    last = config.num_layers_at_end_in_bf16 if config.first_last_layers_bf16 else 0
    found = []
    names = [(layer, f"blocks.{layer}") for layer in range(num_layers)]
    names += [(num_layers - 1, f"mtp.{depth}.block") for depth in range(num_mtp_layers)]
    for layer, name in names:
        recipe = recipes[config.fp8_recipe]() if scales is None else Delayed(scales, name)
        is_narrow = first <= layer < num_layers - last
        found.append(fp8_gemms(config, ctx, casts, recipe) if is_narrow else PLAIN_GEMMS)
    return found


def delayed_scales(config: Fp8Config, ctx: ParallelContext) -> DelayedScales | None:
    """Build what ``--fp8-recipe delayed`` remembers; None for other recipes."""
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
    found = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    if problem := fp8_problem(config, *found):
        raise ValueError(problem)
