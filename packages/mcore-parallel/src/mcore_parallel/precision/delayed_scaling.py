"""Scales that come from earlier steps: what every GEMM's operands were largest as.

While a step runs, each cast uses the magnitude that its operand had in the steps before, and
notes the one that it sees: one pass over the tensor instead of two. When the step ends, ranks
agree on what was seen, by one all-reduce, and the history moves on. So the scales of a step
are the same in all its micro-batches and passes: recomputation, accumulation and put-off
weight gradients repeat the very numbers, under any schedule and inside a CUDA graph.

Until a step has ended there is no history, and tensors are scaled as they come.

Differs from Transformer Engine, which moves the history on with every forward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.precision.fp8_cast import DeferredMatrix, Fp8, cast
from mcore_parallel.sharding import Piece, Shard

OPERANDS = ("x", "weight", "grad")
"""Of a linear's GEMMs, in the order in which their histories stand."""

Operand = Literal["x", "weight", "grad"]


class DelayedScales:
    """The histories of all linears of a rank, and what the running step has seen so far.

    Attributes:
        names: of the linears, in the order of their construction.
        is_fresh: whether no step has ended yet.
    """

    def __init__(
        self,
        history_len: int,
        *,
        takes_max: bool,
        axis: Axis = SINGLE,
        replicas: tuple[Axis, ...] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Begin without linears and without history.

        Args:
            history_len: steps that are remembered.
            takes_max: scale by the largest of them, not by the latest.
            axis: ranks that agree on what was seen: all that share the layers.
            replicas: axes whose product ``axis`` is, for checkpoints.
            device: of the histories.
        """
        self.names: list[str] = []
        self.is_fresh = True
        self._history_len, self._takes_max = history_len, takes_max
        self._axis, self._replicas, self._device = axis, replicas, device
        self._limits: list[list[float]] = []
        self._is_recording = False
        self._tensors: _Tensors | None = None

    def claim(self, name: str, grad_dtype: torch.dtype) -> int:
        """Add a linear by its logical name; return its number.

        Args:
            name: the same under every layout; made unique by a count.
            grad_dtype: fp8 format of the output's gradient.
        """
        assert self._tensors is None, "a linear was built after the first step"
        count = sum(each.rpartition(".")[0] == name for each in self.names)
        self.names.append(f"{name}.{count}")
        forward = torch.finfo(torch.float8_e4m3fn).max
        self._limits.append([forward, forward, torch.finfo(grad_dtype).max])
        return len(self.names) - 1

    def cast(
        self,
        number: int,
        operand: Operand,
        x: Float[Tensor, "T D"] | DeferredMatrix,
        dtype: torch.dtype,
        axis: Axis = SINGLE,
        *,
        has_rows: bool = True,
    ) -> Fp8:
        """Cast an operand of a linear by its history; ``axis`` matters until there is one."""
        amax, seen = self.views(number, operand)
        return cast(x, dtype, axis, has_rows=has_rows, amax=amax, seen=seen)

    def views(
        self, number: int, operand: Operand
    ) -> tuple[Float[Tensor, " 1"] | None, Float[Tensor, " 1"] | None]:
        """Return the magnitude to cast an operand by, and the one to raise to what is seen.

        None for the first until there is a history, for the second outside a step.
        """
        tensors, at = self._all, (number, OPERANDS.index(operand))
        amax = None if self.is_fresh else tensors.amax[at].view(1)
        return amax, tensors.seen[at].view(1) if self._is_recording else None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is seen inside, in forwards and backwards of one step."""
        self._all.seen.zero_()
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def move_on(self) -> None:
        """End a step: scale by what it has seen.

        All-reduces over all ranks that share the layers.
        """
        tensors = self._all
        seen = all_reduce(tensors.seen, self._axis, "max")
        # An operand that was zero, or not finite, says nothing of the next one.
        known = torch.where((seen > 0) & seen.isfinite(), seen, tensors.history[..., 0])
        earlier = tensors.history[..., :-1]
        tensors.history.copy_(torch.cat((known[..., None], earlier), -1))
        self._follow_history()
        self.is_fresh = False

    def _follow_history(self) -> None:
        tensors = self._all
        amax = tensors.history.amax(-1) if self._takes_max else tensors.history[..., 0]
        # Without any history an operand keeps its numbers, as with a scale of 1.
        tensors.amax.copy_(torch.where(amax > 0, amax, tensors.limits))

    def shards(self) -> dict[str, Shard]:
        """Describe the histories for a checkpoint, ``<linear>.history``: views, ``[3, H]``."""
        replicas = tuple(axis for axis in self._replicas if axis.size > 1)
        found = {}
        for name, history in zip(self.names, self._histories(), strict=True):
            shape = tuple(history.shape)
            piece = Piece((0,) * len(shape), shape, history)
            found[f"{name}.history"] = Shard(shape, history.dtype, (piece,), replicas)
        return found

    def _histories(self) -> list[Tensor]:
        return list(self._all.history) if self.names else []

    def restored(self) -> None:
        """Say that the histories were loaded, of at least one step; waits for the device."""
        if self.names:
            self._follow_history()
            self.is_fresh = not bool(self._all.history.any())

    @property
    def _all(self) -> "_Tensors":
        if self._tensors is None:
            shape, device = (len(self.names), len(OPERANDS)), self._device
            self._tensors = _Tensors(
                torch.zeros(*shape, self._history_len, device=device),
                torch.zeros(shape, device=device),
                torch.zeros(shape, device=device),
                torch.tensor(self._limits, device=device).view(shape),
            )
        return self._tensors


@dataclass(frozen=True, slots=True)
class _Tensors:
    """By linear and operand, float32; written in place, so that CUDA graphs may hold them."""

    history: Shaped[Tensor, "N 3 H"]
    """Largest magnitudes of earlier steps, the latest first; 0: none."""
    amax: Shaped[Tensor, "N 3"]
    """What casts of this step use."""
    seen: Shaped[Tensor, "N 3"]
    """Largest magnitudes of this step so far, on this rank."""
    limits: Shaped[Tensor, "N 3"]
    """Largest numbers of the operands' formats."""
