"""Linears split over the tensor ranks, with or without sequence parallelism.

A column-parallel linear holds rows of the weight (output features), a row-parallel one
columns (input features); a column followed by a row needs one reduction. Under sequence
parallelism the activations outside the pair are cut along dimension 0, so the all-reduces
become all-gather and reduce-scatter. Over an axis of one rank both are plain linears.

Every weight gradient of this room is made in ``_weight_gradient``: into ``main_grad`` by the
GEMM itself where the data-parallel wrapper set one, else handed to autograd. A weight with a
``weight_queue`` (``pipeline.WeightQueue``) has it made later: until then its input is kept,
cut as it came under sequence parallelism and gathered then, and its output's gradient.

Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mcore_parallel.collectives import (
    reduce_from,
    reduce_scatter_to,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from mcore_parallel.fused_head import accumulate_product
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.rng import reset_weight_
from mcore_parallel.sharding import Layout, Part, sliced, whole


@dataclass(frozen=True, slots=True)
class Output:
    """One logical tensor among those whose rows a column-parallel weight stacks."""

    name: str
    """Logical name below the layer, ``q`` for ``q.weight``; empty: the layer's own."""
    size: int
    """Rows of the logical tensor."""
    replicas: Axis = SINGLE
    """Neighbouring ranks of the layer's axis that hold the same rows
    (``ParallelContext.tp_block``): key/value heads fewer than tensor ranks."""

    def local_size(self, axis: Axis) -> int:
        """Return the rows that each rank of ``axis`` holds.

        Raises:
            ValueError: if the rows do not divide evenly over the blocks of replicas.
        """
        if axis.size % self.replicas.size:
            raise ValueError(
                f"output {self.name!r}: blocks of {self.replicas.size} replicas do not divide "
                f"axis {axis.name} of {axis.size} ranks"
            )
        num_blocks = axis.size // self.replicas.size
        if self.size % num_blocks:
            raise ValueError(
                f"output {self.name!r}: {self.size} rows cannot be split over {num_blocks} "
                f"parts of axis {axis.name}: the number of rows must be a multiple of the "
                "number of parts"
            )
        return self.size // num_blocks


class ColumnParallelLinear(nn.Module):
    """``y = x W^T + b`` with the rows of W and b, hence the features of y, split over an axis.

    The local weight stacks this rank's rows of every output in order; split the result with
    ``torch.split(y, layer.output_sizes, dim=-1)``.

    Attributes:
        weight: ``[sum(output_sizes), in_features]``.
        bias: ``[sum(output_sizes)]`` or None.
        output_sizes: local rows of each output.
    """

    def __init__(
        self,
        in_features: int,
        outputs: int | Sequence[Output],
        *,
        bias: bool = False,
        axis: Axis = SINGLE,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's rows and initialise them.

        Args:
            in_features: features of the input, whole on every rank.
            outputs: logical tensors whose rows are stacked, or the row count of a single one.
            bias: whether to add one.
            axis: ranks that share the rows.
            sequence_parallel: whether the input is cut along dimension 0 over ``axis``.
            init_std: of the normal distribution; 0.0 leaves zeros and draws nothing.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: if an output's rows do not divide over the axis.
        """
        super().__init__()
        self.in_features = in_features
        self.outputs = (Output("", outputs),) if isinstance(outputs, int) else tuple(outputs)
        self.output_sizes = tuple(output.local_size(axis) for output in self.outputs)
        self.axis = axis
        self.sequence_parallel = sequence_parallel and axis.size > 1
        self.init_std = init_std
        rows = sum(self.output_sizes)
        self.weight = nn.Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Fill the weight by logical name, the bias with zeros.

        The same seed gives the same logical weights whatever the axis.

        Args:
            seed: None draws one from torch's default CPU generator, which must then be seeded
                alike on all ranks of the axis.
        """
        reset_weight_(self, std=self.init_std, seed=seed)

    def forward(self, x: Float[Tensor, "s *B D"]) -> Float[Tensor, "S *B F"]:
        """Return this rank's features of the output for the whole sequence.

        Forward all-gathers x under sequence parallelism. Backward reduce-scatters (sequence
        parallelism) or all-reduces the gradient of x.
        """
        return column_parallel(x, self.weight, self.bias, self.axis, self.sequence_parallel)

    def deferrable_weights(self) -> list[nn.Parameter]:
        """Return what a ``WeightQueue`` may serve."""
        return [self.weight]

    def layouts(self) -> dict[str, Layout]:
        """Describe the local parameters, see ``sharding``."""
        layouts = {"weight": Layout(tuple(self._parts("weight", (self.in_features,))))}
        if self.bias is not None:
            layouts["bias"] = Layout(tuple(self._parts("bias", ())))
        return layouts

    def _parts(self, kind: str, rest: tuple[int, ...]) -> list[Part]:
        parts, begin = [], 0
        zeros = (0,) * len(rest)
        for output, size in zip(self.outputs, self.output_sizes, strict=True):
            block = self.axis.rank // output.replicas.size
            parts.append(
                Part(
                    name=f"{output.name}.{kind}" if output.name else kind,
                    shape=(output.size, *rest),
                    offsets=(block * size, *zeros),
                    local_offsets=(begin, *zeros),
                    lengths=(size, *rest),
                    replicas=output.replicas,
                    # Each holder sees its own heads' share of the gradient only.
                    partial=output.replicas,
                )
            )
            begin += size
        return parts

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        return f"{self.in_features}, {self.output_sizes}, {_describe(self)}"


class RowParallelLinear(nn.Module):
    """``y = x W^T + b`` with the columns of W, hence the features of x, split over an axis.

    Attributes:
        weight: ``[out_features, in_features / axis.size]``.
        bias: ``[out_features]``, whole on every rank and added after the reduction, or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        axis: Axis = SINGLE,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's columns and initialise them.

        Args:
            in_features: features of the whole input, over all ranks.
            out_features: features of the output, whole on every rank.
            bias: whether to add one.
            axis: ranks that share the columns.
            sequence_parallel: whether to cut the output along dimension 0 over ``axis``.
            init_std: of the normal distribution; 0.0 leaves zeros and draws nothing.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: if the axis does not divide ``in_features``.
        """
        super().__init__()
        if in_features % axis.size:
            raise ValueError(
                f"{in_features} input features cannot be split over axis {axis.name} of "
                f"{axis.size} ranks: the number of features must be a multiple of the ranks"
            )
        self.in_features, self.out_features = in_features, out_features
        self.axis = axis
        self.sequence_parallel = sequence_parallel and axis.size > 1
        self.init_std = init_std
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features // axis.size, device=device, dtype=dtype)
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
            if bias
            else None
        )
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Fill the weight by logical name, the bias with zeros.

        The same seed gives the same logical weights whatever the axis.

        Args:
            seed: None draws one from torch's default CPU generator, which must then be seeded
                alike on all ranks of the axis.
        """
        reset_weight_(self, std=self.init_std, seed=seed)

    def forward(self, x: Float[Tensor, "S *B f"]) -> Float[Tensor, "s *B D"]:
        """Return the whole output features, of this rank's tokens under sequence parallelism.

        Forward reduce-scatters (sequence parallelism) or all-reduces the partial products.
        Backward all-gathers the gradient of the output under sequence parallelism; the
        gradient of the bias is then that of this rank's tokens, a partial sum.
        """
        partial = column_parallel(x, self.weight, None, SINGLE, sequence_parallel=False)
        if self.sequence_parallel:
            y = reduce_scatter_to(partial, self.axis)
        else:
            y = reduce_from(partial, self.axis)
        return y if self.bias is None else y + self.bias

    def deferrable_weights(self) -> list[nn.Parameter]:
        """Return what a ``WeightQueue`` may serve."""
        return [self.weight]

    def layouts(self) -> dict[str, Layout]:
        """Describe the local parameters, see ``sharding``."""
        shape = (self.out_features, self.in_features)
        layouts = {"weight": sliced("", shape, 1, self.axis)}
        if self.bias is not None:
            partial = self.axis if self.sequence_parallel else SINGLE
            layouts["bias"] = whole("", (self.out_features,), self.axis, partial)
        return layouts

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        return f"{self.weight.shape[1]}, {self.out_features}, {_describe(self)}"


def column_parallel(
    x: Float[Tensor, "s *B D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None,
    axis: Axis,
    sequence_parallel: bool,
) -> Float[Tensor, "S *B F"]:
    """Multiply by this rank's rows of a weight; the functional core of this room.

    Under sequence parallelism x is all-gathered along dimension 0 in forward, and gathered
    again in backward instead of being kept: the gather runs under the product that gives the
    gradient of x, and the reduction of that gradient under the weight's.

    Args:
        x: whole input, or this rank's cut of dimension 0 under sequence parallelism.
        weight: this rank's rows.
        bias: this rank's entries, or None.
        axis: ranks that share the rows.
        sequence_parallel: whether x is cut along dimension 0 over ``axis``.
    """
    return _ColumnParallel.apply(x, weight, bias, axis, sequence_parallel and axis.size > 1)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        ctx.save_for_backward(x, weight)
        # Saved tensors may come back as copies (recomputation); main_grad sits on the original.
        ctx.parameter = None
        if not torch.compiler.is_compiling() and hasattr(weight, "main_grad"):
            ctx.parameter = weight
        gathered = wait(start_all_gather(x, axis)) if sequence_parallel else x
        return F.linear(gathered, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        axis, sequence_parallel = ctx.axis, ctx.sequence_parallel
        queue = getattr(ctx.parameter, "weight_queue", None)
        if needs_weight and queue is not None:
            later = _LaterGradient(
                ctx.parameter, grad, x, axis if sequence_parallel else SINGLE
            )
            queue.put(later.make, prepare=later.gather)
        makes_weight = needs_weight and queue is None
        if makes_weight and sequence_parallel:
            x = start_all_gather(x, axis)  # runs under the next product
        grad_x = grad @ weight if needs_x else None
        if makes_weight and sequence_parallel:
            x = wait(x)
        if grad_x is not None:  # runs under the weight's product
            reduce = start_reduce_scatter if sequence_parallel else start_all_reduce
            grad_x = reduce(grad_x, axis)
        grad_weight = _weight_gradient(ctx.parameter, grad, x) if makes_weight else None
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        if grad_x is not None:
            grad_x = wait(grad_x)
        return grad_x, grad_weight, grad_bias, None, None


class _LaterGradient:
    """A weight gradient put off; holds its factors until it is made."""

    def __init__(self, parameter: Tensor, grad: Tensor, x: Tensor, axis: Axis) -> None:
        self.parameter, self.grad, self.x, self.axis = parameter, grad, x, axis

    def gather(self) -> None:
        """Begin to gather the input over the axis that cuts it."""
        self.x = start_all_gather(self.x, self.axis)

    def make(self) -> None:
        """Add the gradient to ``main_grad``."""
        x = self.x if self.axis.size == 1 else wait(self.x)
        _weight_gradient(self.parameter, self.grad, x)


def _weight_gradient(
    parameter: Any, grad: Float[Tensor, "S *B F"], x: Float[Tensor, "S *B D"]
) -> Float[Tensor, "F D"] | None:
    """Make the gradient of a weight from those of its output and its input.

    Args:
        parameter: the weight where it carries ``main_grad``, else None. The gradient is added
            to that, ``main_grad_ready`` is called if it is there too, and None is returned.
        grad: gradient of the output.
        x: the input, gathered.
    """
    rows, x = grad.flatten(0, -2).t(), x.flatten(0, -2)
    if parameter is None:
        return rows @ x
    accumulate_product(parameter.main_grad, rows, x)
    if hasattr(parameter, "main_grad_ready"):
        parameter.main_grad_ready()
    return None


def _describe(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    return (
        f"bias={layer.bias is not None}, axis={layer.axis.name}:{layer.axis.size}, "
        f"sequence_parallel={layer.sequence_parallel}"
    )
