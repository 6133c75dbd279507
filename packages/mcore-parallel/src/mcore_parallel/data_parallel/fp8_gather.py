"""Weights gathered in fp8: half the bytes of those that their GEMMs cast anyway.

A linear with ``--fp8-recipe tensorwise`` casts its weight with one scale of the logical tensor.
Here the owner of a range casts it with that scale before the gather, and every rank holds what
the fp8 numbers stand for, in the model's own 16-bit format. The GEMM's cast of these gives the
same numbers and the same scale again: to the last bit nothing changes but what is sent. Main
weights stay as they are, so that small updates add up.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from mcore_parallel.collectives import all_reduce
from mcore_parallel.kernels.fp8_cast import cast_flat, dequantize_flat, largest_magnitude
from mcore_parallel.launch.call_checks import agree
from mcore_parallel.mesh import Axis
from mcore_parallel.precision.fp8 import FORWARD_DTYPE, Fp8Gemm
from mcore_parallel.precision.fp8_recipes import Tensorwise

if TYPE_CHECKING:
    from mcore_parallel.data_parallel.buckets import Bucket


def fp8_weights(chunks: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the weights of linears whose GEMMs cast them by their own largest magnitude."""
    found = set()
    for module in (module for chunk in chunks for module in chunk.modules()):
        gemm = getattr(module, "gemm", None)
        if isinstance(gemm, Fp8Gemm) and type(gemm.recipe) is Tensorwise:
            weight = module.weight
            assert isinstance(weight, nn.Parameter)
            found.add(weight)
    return found


class Fp8Gather:
    """One gather of a bucket in fp8; the weights are there after ``wait``."""

    def __init__(self, bucket: "Bucket", axis: Axis, *, async_op: bool) -> None:
        """Cast this rank's range and begin to gather; waits for the largest magnitudes.

        Args:
            bucket: of weights that are all cast in their GEMMs.
            axis: ranks that hold parts or copies of the same logical weights.
            async_op: return before the bytes have arrived.
        """
        self._bucket = bucket
        own, ranges = bucket.own_weights(), bucket.owned_ranges()
        places = {slot.named.parameter: i for i, slot in enumerate(bucket.slots)}
        wide = torch.promote_types(own.dtype, torch.float32)
        amax = torch.zeros(len(places), dtype=wide, device=own.device)
        for owned in ranges:
            place = places[owned.named.parameter]
            amax[place : place + 1] = largest_magnitude(owned.view(own)[None])
        self._amax = all_reduce(amax, axis, "max")
        self._wire = torch.zeros(bucket.size, dtype=torch.uint8, device=own.device)
        own_wire = bucket.owned(self._wire)
        for owned in ranges:
            amax = self._of(places[owned.named.parameter])
            cast_flat(owned.view(own), amax, owned.view(own_wire).view(FORWARD_DTYPE))
        agree(bucket.shard.agreement, "all_gather of weights in fp8", self._wire)
        self._work = dist.all_gather_into_tensor(
            self._wire, own_wire, group=bucket.shard.group, async_op=async_op
        )

    def wait(self) -> None:
        """Wait for the bytes and write the weights, in place."""
        if self._work is not None:
            self._work.wait()
        for place, slot in enumerate(self._bucket.slots):
            numbers = self._wire[slot.start : slot.stop].view(FORWARD_DTYPE)
            dequantize_flat(
                numbers, self._of(place), self._bucket.params[slot.start : slot.stop]
            )

    def _of(self, place: int) -> Shaped[Tensor, " 1"]:
        return self._amax[place : place + 1]
