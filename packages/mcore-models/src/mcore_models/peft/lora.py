"""LoRA and DoRA of a linear: ``y + s B(A x)`` with few rows in A and few columns in B.

A and B are split like the linear. If the linear's rows are split, A is replicated and B has
this rank's rows; if its columns are split, A has this rank's columns and B is replicated. The
communication between A and B has r channels (the adapter's rank); the linear's own
communication is unchanged. A fused linear (q, k and v) has an adapter for each output, and one
GEMM for all their A.

Hu et al. 2021, LoRA, arXiv:2106.09685; Liu et al. 2024, DoRA, arXiv:2402.09353.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.peft.config import ADAPTER, PeftConfig
from mcore_parallel.collectives import (
    all_reduce,
    copy_to,
    gather_partial_from,
    reduce_from,
    reduce_scatter_to,
)
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.rng import RngStreams, StreamDropout
from mcore_parallel.sharding import ParamLayout, Part, whole_layout
from mcore_parallel.tensor_parallel.linear import (
    ColumnParallelLinear,
    LinearOutput,
    RowParallelLinear,
)

if TYPE_CHECKING:
    from mcore_models.peft.stacking import StackedAdapters

A_NAME, B_NAME, MAGNITUDE_NAME = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""Logical names of an adapter's tensors, as in Hugging Face PEFT."""


class LinearAdapter(nn.Module, ABC):
    """Adapters of one linear's outputs.

    Attributes:
        lora_A: A of each adapted output, stacked; this rank's columns.
        lora_B: B of each adapted output, stacked; this rank's rows.
        magnitude: trained length of each row of the adapted weight (DoRA), or None.
        is_on: whether the linear adds the adapters' outputs, see ``adapters_off``.
        stack: chooses the adapter of each token, if several adapters are stacked; else None.
    """

    def __init__(
        self,
        weight: Float[Tensor, "F D"],
        outputs: Sequence[LinearOutput],
        is_adapted: Sequence[bool],
        config: PeftConfig,
        *,
        axis: Axis,
        sequence_parallel: bool,
        streams: RngStreams,
    ) -> None:
        """Allocate matrices of zeros, and magnitudes of ones.

        Args:
            weight: of the linear; no reference is stored.
            outputs: of the linear, in order.
            is_adapted: whether each output has an adapter; at least one is true.
            config: rank, factor, dropout, kind.
            axis: ranks that share the linear.
            sequence_parallel: whether tokens are split over ``axis`` outside the linear.
            streams: random streams of dropout.
        """
        super().__init__()
        self.axis, self.scale, self.rank = axis, config.scale, config.lora_dim
        self.is_on = True
        self.stack: StackedAdapters | None = None
        self.partial = axis if sequence_parallel else SINGLE
        self.outputs, self.is_adapted = tuple(outputs), tuple(is_adapted)
        self.sizes = self._local_sizes()
        rows, columns = weight.shape
        self.in_features = columns * self._column_cuts
        adapted = sum(size for size, has in zip(self.sizes, is_adapted, strict=True) if has)
        assert sum(self.sizes) == rows

        def allocate(*shape: int, fill: float = 0.0) -> nn.Parameter:
            factory_kwargs = {"device": weight.device, "dtype": weight.dtype}
            return nn.Parameter(torch.full(shape, fill, **factory_kwargs))

        self.lora_A = allocate(sum(is_adapted) * self.rank, columns)
        self.lora_B = allocate(adapted, self.rank)
        self.magnitude = allocate(adapted, fill=1.0) if config.peft == "dora" else None
        self.dropout = StreamDropout(config.lora_dropout, streams, self._stream())

    @property
    def _column_cuts(self) -> int:
        """Number of ranks that share the linear's columns."""
        return 1

    def _local_sizes(self) -> tuple[int, ...]:
        """Return this rank's rows of each output."""
        return tuple(output.size for output in self.outputs)

    def _stream(self) -> str:
        """Return the name of the random stream of the adapter's input."""
        return "tensor_parallel" if self.partial.size > 1 else "replicated"

    @abstractmethod
    def _pass_on(self, hidden: Float[Tensor, "s *B r"]) -> Float[Tensor, "S *B r"]:
        """Return the input of B from the output of A, with the linear's communication."""

    @abstractmethod
    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the matrices and magnitudes."""

    def forward(
        self,
        x: Float[Tensor, "s *B D"],
        y: Float[Tensor, "S *B F"],
        weight: Float[Tensor, "F D"],
        bias: Float[Tensor, " F"] | None,
    ) -> Float[Tensor, "S *B F"]:
        """Return the linear's output plus the adapters' outputs.

        Communicates r channels (the adapter's rank) over the linear's axis.

        Args:
            x: input of the linear.
            y: output of the linear.
            weight: of the linear.
            bias: of the linear, or None.
        """
        if self.stack is not None and self.stack.mask is None:
            return y
        hidden = self._pass_on(F.linear(self.dropout(x), self.lora_A))
        if self.stack is not None:
            hidden = self.stack.select(hidden)
        down = self._wide_b().t()
        if self.magnitude is None:
            return torch.addmm(
                y.flatten(0, -2), hidden.flatten(0, -2), down, alpha=self.scale
            ).view_as(y)
        plain = y if bias is None else y - bias.to(y.dtype)
        adapted = (plain + self.scale * (hidden @ down)) * self._gain(weight)
        return adapted if bias is None else adapted + bias.to(y.dtype)

    @torch.no_grad()
    def merged(self, weight: Float[Tensor, "F D"]) -> Float[Tensor, "F D"]:
        """Return the weight with its adapters, in the weight's dtype; computed in float32.

        All-reduces one number for each row over the ranks that share the columns (DoRA).
        """
        if not weight.untyped_storage().nbytes():
            raise ValueError(
                "an adapter of a quantized base cannot be merged in memory: save the adapter, "
                "and merge the checkpoint by mcore-ckpt convert."
            )
        total = self._total(weight)
        if self.magnitude is not None:
            total *= self._gain(weight).to(total.dtype)[:, None]
        return total.to(weight.dtype)

    @torch.no_grad()
    def row_lengths(self, weight: Float[Tensor, "F D"]) -> Float[Tensor, " f"]:
        """Return the length of each adapted row of a weight; communicates as ``merged``."""
        return self._adapted_rows(self._lengths(weight))

    def _gain(self, weight: Tensor) -> Float[Tensor, " F"]:
        """Return the factor that scales each output's row to its magnitude.

        Lengths are constants in backward, as in section 4.3 of the paper.
        """
        assert self.magnitude is not None
        with torch.no_grad():
            lengths = self._adapted_rows(self._lengths(self._total(weight)))
        pieces = iter((self.magnitude / lengths).to(weight.dtype).split(self._adapted_sizes()))
        return torch.cat(
            [
                next(pieces) if has else weight.new_ones(size)
                for size, has in zip(self.sizes, self.is_adapted, strict=True)
            ]
        )

    def _total(self, weight: Tensor) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        delta = self._wide_b().to(wide) @ self.lora_A.to(wide)
        return weight.to(wide) + self.scale * delta

    def _lengths(self, weight: Tensor) -> Float[Tensor, " F"]:
        wide = torch.promote_types(weight.dtype, torch.float32)
        squares = weight.to(wide).square().sum(1)
        shared = self.axis if self._column_cuts > 1 else SINGLE
        return all_reduce(squares, shared).sqrt()

    def _adapted_sizes(self) -> list[int]:
        return [n for n, has in zip(self.sizes, self.is_adapted, strict=True) if has]

    def _adapted_rows(self, rows: Tensor) -> Tensor:
        """Return the entries of adapted outputs, from one entry for each row of the linear."""
        pieces = zip(rows.split(list(self.sizes)), self.is_adapted, strict=True)
        return torch.cat([piece for piece, has in pieces if has])

    def _wide_b(self) -> Float[Tensor, "F R"]:
        """Return a block-diagonal B, in which each output reads the output of its own A."""
        pieces = iter(self.lora_B.split(self._adapted_sizes()))
        width, before, rows = self.lora_A.shape[0], 0, []
        for size, has in zip(self.sizes, self.is_adapted, strict=True):
            if has:
                rows.append(F.pad(next(pieces), (before, width - before - self.rank)))
                before += self.rank
            else:
                rows.append(self.lora_B.new_zeros(size, width))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _adapted(self) -> list[tuple[LinearOutput, int]]:
        """Return the adapted outputs, each with its first row in the stack of B."""
        outputs, begin = [], 0
        for output, size, has in zip(self.outputs, self.sizes, self.is_adapted, strict=True):
            if has:
                outputs.append((output, begin))
                begin += size
        return outputs

    def extra_repr(self) -> str:
        """Return the text of the adapter in ``print(model)``."""
        names = [output.name for output, _ in self._adapted() if output.name]
        return ", ".join([*names, f"rank={self.rank}", f"scale={self.scale}"])


class ColumnAdapter(LinearAdapter):
    """Adapters of a linear whose rows are split: A is replicated, B split by rows."""

    def _local_sizes(self) -> tuple[int, ...]:
        return tuple(output.local_size(self.axis) for output in self.outputs)

    def _pass_on(self, hidden: Tensor) -> Tensor:
        if self.partial.size > 1:
            return gather_partial_from(hidden, self.axis)
        return copy_to(hidden, self.axis)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding: A replicated, B and magnitudes split by rows."""
        downs, ups, magnitudes = [], [], []
        for number, (output, begin) in enumerate(self._adapted()):
            shape, local = (self.rank, self.in_features), (number * self.rank, 0)
            name = f"{output.name}." if output.name else ""
            downs.append(
                Part(name + A_NAME, shape, (0, 0), local, shape, self.axis, self.partial)
            )
            size = output.local_size(self.axis)
            first = self.axis.rank // output.replicas.size * size
            holders = {"replicas": output.replicas, "partial": output.replicas}
            shape, lengths = (output.size, self.rank), (size, self.rank)
            ups.append(Part(name + B_NAME, shape, (first, 0), (begin, 0), lengths, **holders))
            magnitudes.append(
                Part(
                    name + MAGNITUDE_NAME,
                    (output.size,),
                    (first,),
                    (begin,),
                    (size,),
                    **holders,
                )
            )
        found = {"lora_A": ParamLayout(tuple(downs)), "lora_B": ParamLayout(tuple(ups))}
        return found | self._magnitudes(ParamLayout(tuple(magnitudes)))

    def _magnitudes(self, layout: ParamLayout) -> dict[str, ParamLayout]:
        return {} if self.magnitude is None else {"magnitude": layout}


class RowAdapter(LinearAdapter):
    """The adapter of a linear whose columns are split: A split by columns, B replicated."""

    @property
    def _column_cuts(self) -> int:
        return self.axis.size

    def _stream(self) -> str:
        return "tensor_parallel"  # ranks read different features

    def _pass_on(self, hidden: Tensor) -> Tensor:
        if self.partial.size > 1:
            return reduce_scatter_to(hidden, self.axis)
        return reduce_from(hidden, self.axis)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding: A split by columns, B and magnitudes replicated."""
        columns, rows = self.lora_A.shape[1], self.lora_B.shape[0]
        down = Part(
            A_NAME,
            (self.rank, self.in_features),
            (0, self.axis.rank * columns),
            (0, 0),
            (self.rank, columns),
        )
        found = {
            "lora_A": ParamLayout((down,)),
            "lora_B": whole_layout(B_NAME, (rows, self.rank), self.axis, self.partial),
        }
        if self.magnitude is not None:
            found["magnitude"] = whole_layout(MAGNITUDE_NAME, (rows,), self.axis, self.partial)
        return found


class ReplicatedAdapter(LinearAdapter):
    """The adapter of a replicated linear."""

    def _pass_on(self, hidden: Tensor) -> Tensor:
        return hidden

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding: all tensors replicated."""
        tensors = {
            "lora_A": (A_NAME, self.lora_A),
            "lora_B": (B_NAME, self.lora_B),
            "magnitude": (MAGNITUDE_NAME, self.magnitude),
        }
        return {
            attribute: whole_layout(name, tuple(tensor.shape), self.axis, self.partial)
            for attribute, (name, tensor) in tensors.items()
            if tensor is not None
        }


def build_adapter(
    linear: nn.Module, is_adapted: Sequence[bool], config: PeftConfig, streams: RngStreams
) -> LinearAdapter:
    """Build the adapter of a linear, split like the linear.

    Args:
        linear: column-parallel, row-parallel, or replicated.
        is_adapted: for each output of the linear, whether it has an adapter.
        config: rank, factor, dropout, kind.
        streams: random streams of dropout.
    """
    split: dict[str, Any] = {"streams": streams}
    if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
        split |= {"axis": linear.axis, "sequence_parallel": linear.sequence_parallel}
    if isinstance(linear, ColumnParallelLinear):
        return ColumnAdapter(linear.weight, linear.outputs, is_adapted, config, **split)
    if isinstance(linear, RowParallelLinear):
        outputs = [LinearOutput("", linear.out_features)]
        return RowAdapter(linear.weight, outputs, is_adapted, config, **split)
    weight = linear.weight
    assert isinstance(weight, Tensor)
    part = linear.layouts()["weight"].parts[0]  # pyrefly: ignore
    outputs = [LinearOutput("", part.shape[0])]
    split |= {"axis": part.replicas, "sequence_parallel": part.partial.size > 1}
    return ReplicatedAdapter(weight, outputs, is_adapted, config, **split)


def full_weight(linear: nn.Module) -> Float[Tensor, "F D"]:
    """Return the weight that a linear's forward applies, including an adapter if attached."""
    adapter = getattr(linear, ADAPTER, None)
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight if adapter is None else adapter.merged(weight)
