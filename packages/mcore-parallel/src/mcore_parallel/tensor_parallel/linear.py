"""Linears split over the tensor ranks, with or without sequence parallelism.

A column-parallel linear holds rows of the weight (output features), a row-parallel linear
columns (input features); a column-parallel followed by a row-parallel linear needs one
reduction. Under sequence parallelism the activations outside the pair are split along
dimension 0, so the all-reduces become all-gather and reduce-scatter. Over an axis of one rank
both are plain linears.

``linear_autograd`` communicates; the layer's ``Gemm`` object multiplies.

Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_parallel.autograd.grad_slot import overwrites
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.precision.gemm import PLAIN_GEMM, Gemm
from mcore_parallel.rng import reset_weight_
from mcore_parallel.sharding import ParamLayout, Part, sliced_layout, whole_layout
from mcore_parallel.tensor_parallel.linear_autograd import column_parallel, row_parallel


@dataclass(frozen=True, slots=True)
class LinearOutput:
    """One of the logical tensors whose rows are stacked in a column-parallel weight."""

    name: str
    """Logical name below the layer, ``q`` for ``q.weight``; empty: the layer's own name."""
    size: int
    """Rows of the logical tensor."""
    replicas: Axis = SINGLE
    """Consecutive ranks of the layer's axis that hold the same rows
    (``ParallelContext.tp_block``), for key/value heads fewer than tensor ranks."""

    def local_size(self, axis: Axis) -> int:
        """Return the number of rows that each rank of ``axis`` holds.

        Raises:
            ValueError: if the rows do not divide evenly over the blocks of replicas.
        """
        layer_or_output = f"output {self.name!r}" if self.name else "column-parallel linear"
        if axis.size % self.replicas.size:
            raise ValueError(
                f"{layer_or_output}: blocks of {self.replicas.size} replicas do not divide "
                f"axis {axis.name} of {axis.size} ranks"
            )
        num_blocks = axis.size // self.replicas.size
        if self.size % num_blocks:
            raise ValueError(
                f"{layer_or_output}: {self.size} rows cannot be split over {num_blocks} "
                f"parts of axis {axis.name}: use a multiple of {num_blocks} rows, or a number "
                f"of parts that divides {self.size}"
            )
        return self.size // num_blocks


class _SplitLinear(nn.Module):
    """Allocation and initialisation that both linears share."""

    def _allocate(
        self,
        rows: int,
        columns: int,
        bias: bool,
        gemm: Gemm,
        init_std: float,
        **factory_kwargs: Any,
    ) -> None:
        self.init_std = init_std
        self.gemm = gemm.fitting(rows, columns)
        self.weight = overwrites(nn.Parameter(torch.empty(rows, columns, **factory_kwargs)))
        self.bias = nn.Parameter(torch.empty(rows, **factory_kwargs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialise the weight by seed and logical name, the bias with zeros.

        A seed gives the same logical weights for every size of the axis.

        Args:
            seed: None draws a seed from torch's default CPU generator, which must then have
                equal state on all ranks of the axis.
        """
        reset_weight_(self, std=self.init_std, seed=seed)

    def deferrable_weights(self) -> list[nn.Parameter]:
        """Return the weights whose gradients a ``WeightQueue`` may defer."""
        return [self.weight]


class ColumnParallelLinear(_SplitLinear):
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
        outputs: int | Sequence[LinearOutput],
        *,
        bias: bool = False,
        axis: Axis = SINGLE,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        gemm: Gemm = PLAIN_GEMM,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's rows and initialise them.

        Args:
            in_features: features of the input, whole on every rank.
            outputs: logical tensors whose rows are stacked, or the number of rows of one.
            bias: whether the layer has a bias.
            axis: ranks that split the rows.
            sequence_parallel: whether the input is split along dimension 0 over ``axis``.
            init_std: standard deviation of the initial weight; 0.0 fills with zeros and draws
                nothing.
            gemm: multiplies, in its precision.
            device: device of the parameters.
            dtype: dtype of the parameters.

        Raises:
            ValueError: if an output's rows do not divide over the axis.
        """
        super().__init__()
        self.in_features = in_features
        self.outputs = (
            (LinearOutput("", outputs),) if isinstance(outputs, int) else tuple(outputs)
        )
        self.output_sizes = tuple(output.local_size(axis) for output in self.outputs)
        self.axis = axis
        self.sequence_parallel = sequence_parallel and axis.size > 1
        factory_kwargs = {"device": device, "dtype": dtype}
        rows = sum(self.output_sizes)
        self._allocate(rows, in_features, bias, gemm, init_std, **factory_kwargs)

    def forward(self, x: Float[Tensor, "s *B D"]) -> Float[Tensor, "S *B F"]:
        """Return this rank's output features, for all tokens of the axis' ranks.

        Forward all-gathers x under sequence parallelism. Backward reduce-scatters (sequence
        parallelism) or all-reduces the gradient of x.
        """
        return column_parallel(
            x, self.weight, self.bias, self.axis, self.sequence_parallel, self.gemm
        )

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the layouts of weight and bias by parameter name, see ``sharding``."""
        layouts = {"weight": ParamLayout(tuple(self._parts("weight", (self.in_features,))))}
        if self.bias is not None:
            layouts["bias"] = ParamLayout(tuple(self._parts("bias", ())))
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
                    # Each replica serves other query heads, so its gradient is a part of the
                    # sum.
                    partial=output.replicas,
                )
            )
            begin += size
        return parts

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        return f"{self.in_features}, {self.output_sizes}, {_describe(self)}"


class RowParallelLinear(_SplitLinear):
    """``y = x W^T + b`` with the columns of W, hence the features of x, split over an axis.

    Attributes:
        weight: ``[out_features, in_features / axis.size]``.
        bias: ``[out_features]``, replicated and added after the reduction, or None.
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
        gemm: Gemm = PLAIN_GEMM,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's columns and initialise them.

        Args:
            in_features: features of the input, summed over all ranks.
            out_features: features of the output, all of them on every rank.
            bias: whether the layer has a bias.
            axis: ranks that split the columns.
            sequence_parallel: whether to split the output along dimension 0 over ``axis``.
            init_std: standard deviation of the initial weight; 0.0 fills with zeros and draws
                nothing.
            gemm: multiplies, in its precision.
            device: device of the parameters.
            dtype: dtype of the parameters.

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
        factory_kwargs = {"device": device, "dtype": dtype}
        columns = in_features // axis.size
        self._allocate(out_features, columns, bias, gemm, init_std, **factory_kwargs)

    def forward(self, x: Float[Tensor, "S *B _"]) -> Float[Tensor, "s *B D"]:
        """Return all output features; under sequence parallelism of this rank's tokens only.

        Forward reduce-scatters (sequence parallelism) or all-reduces the partial sums.
        Backward all-gathers the gradient of the output under sequence parallelism; the
        gradient of the bias then covers this rank's tokens only and is a partial sum.
        """
        y = row_parallel(x, self.weight, self.axis, self.sequence_parallel, self.gemm)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the layouts of weight and bias by parameter name, see ``sharding``."""
        shape = (self.out_features, self.in_features)
        layouts = {"weight": sliced_layout("", shape, 1, self.axis)}
        if self.bias is not None:
            partial = self.axis if self.sequence_parallel else SINGLE
            layouts["bias"] = whole_layout("", (self.out_features,), self.axis, partial)
        return layouts

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        return f"{self.weight.shape[1]}, {self.out_features}, {_describe(self)}"


def _describe(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    return (
        f"bias={layer.bias is not None}, axis={layer.axis.name}:{layer.axis.size}, "
        f"sequence_parallel={layer.sequence_parallel}"
    )
