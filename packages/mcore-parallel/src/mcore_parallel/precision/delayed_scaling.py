"""Delayed scaling: scales of fp8 casts from the largest magnitudes of earlier steps.

During a step each cast is scaled by the history of its operand, and records the largest
magnitude of the current tensor in the same pass: one pass over the tensor instead of two. At
the end of the step one all-reduce combines the recorded magnitudes of all ranks, and the
history advances. All micro-batches and passes of a step use the same scales, so recomputation,
gradient accumulation and deferred weight gradients repeat the same numbers, under any schedule
and inside a CUDA graph.

In the first step, without history, each tensor is scaled by its own largest magnitude.

Differs from Transformer Engine, which advances the history with every forward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.optimizers.update_rule import unless_applied
from mcore_parallel.precision.fp8_cast import DeferredMatrix, Fp8, cast
from mcore_parallel.sharding import Piece, Shard

OPERANDS = ("x", "weight", "grad")
"""Operands of a linear's GEMMs, in the order of their histories."""

Operand = Literal["x", "weight", "grad"]


class DelayedScales:
    """Histories of all linears of a rank, and the magnitudes of the running step so far.

    Attributes:
        names: names of the linears, in the order of their construction.
        is_fresh: whether there is no history, since no step has ended.
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
        """Start without linears and without history.

        Args:
            history_len: steps in the history.
            takes_max: scale by the maximum of the history, not by the latest step.
            axis: ranks that combine their magnitudes: all that share the layers.
            replicas: axes whose product is ``axis``, for checkpoints.
            device: device of the histories.
        """
        self.names: list[str] = []
        self.is_fresh = True
        self._history_len, self._takes_max = history_len, takes_max
        self._axis, self._replicas, self._device = axis, replicas, device
        self._limits: list[list[float]] = []
        self._is_recording = False
        self._tensors: _Tensors | None = None

    def claim(self, name: str, grad_dtype: torch.dtype) -> int:
        """Register a linear by its logical name; return its number.

        Args:
            name: equal under every layout; a count makes it unique.
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
        """Cast an operand of a linear by its history; in the first step by its own magnitude.

        Without history all-reduces the largest magnitude over ``axis``.
        """
        amax, seen = self.views(number, operand)
        return cast(x, dtype, axis, has_rows=has_rows, amax=amax, seen=seen)

    def views(
        self, number: int, operand: Operand
    ) -> tuple[Float[Tensor, " 1"] | None, Float[Tensor, " 1"] | None]:
        """Return views of an operand's magnitude to scale by, and of the one to record in.

        The first is None if there is no history, the second outside ``noting``.
        """
        tensors, index = self._all, (number, OPERANDS.index(operand))
        amax = None if self.is_fresh else tensors.amax[index].view(1)
        return amax, tensors.seen[index].view(1) if self._is_recording else None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record magnitudes inside the block: the forwards and backwards of one step."""
        self._all.seen.zero_()
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def move_on(self, is_applied: Bool[Tensor, ""] | None = None) -> None:
        """End a step: append the recorded magnitudes to the histories.

        All-reduces over all ranks that share the layers.

        Args:
            is_applied: if false, the histories do not change; None: the step is applied.
        """
        tensors = self._all
        seen = all_reduce(tensors.seen, self._axis, "max")
        # A zero or non-finite magnitude would be useless as a scale: repeat the latest one.
        latest = torch.where((seen > 0) & seen.isfinite(), seen, tensors.history[..., 0])
        earlier = tensors.history[..., :-1]
        with unless_applied(is_applied, (tensors.history,)):
            tensors.history.copy_(torch.cat((latest[..., None], earlier), -1))
        self._update_amax()
        self.is_fresh = False

    def _update_amax(self) -> None:
        tensors = self._all
        amax = tensors.history.amax(-1) if self._takes_max else tensors.history[..., 0]
        # An operand without history gets a scale of 1: amax = the format's largest number.
        tensors.amax.copy_(torch.where(amax > 0, amax, tensors.limits))

    def shards(self) -> dict[str, Shard]:
        """Return the histories as shards ``<linear>.history`` of views ``[3, H]``."""
        replicas = tuple(axis for axis in self._replicas if axis.size > 1)
        shards = {}
        for name, history in zip(self.names, self._histories(), strict=True):
            shape = tuple(history.shape)
            piece = Piece((0,) * len(shape), shape, history)
            shards[f"{name}.history"] = Shard(shape, history.dtype, (piece,), replicas)
        return shards

    def _histories(self) -> list[Tensor]:
        return list(self._all.history) if self.names else []

    def restored(self) -> None:
        """Update the scales after a checkpoint has filled the histories; synchronises."""
        if self.names:
            self._update_amax()
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
    """float32 by linear and operand; written in place, since CUDA graphs refer to them."""

    history: Shaped[Tensor, "N 3 H"]
    """Largest magnitudes of earlier steps, the latest first; 0: no step."""
    amax: Shaped[Tensor, "N 3"]
    """Magnitudes that the casts of this step scale by."""
    seen: Shaped[Tensor, "N 3"]
    """Largest magnitudes of this step so far, on this rank."""
    limits: Shaped[Tensor, "N 3"]
    """Largest numbers of the operands' fp8 formats."""
