"""A norm before an fp8 linear, whose result is computed as it is cast.

The norm's kernel reads the stream once: it writes the sum and finds the scale of each row, and
the result's largest magnitude. The cast's kernel reads the sum and writes what the linear
multiplies. The reference computes the result in 16 bits and casts that, to the same bits.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.optional_kernels import OptionalKernel, wave, works
from mcore_parallel.precision.fp8_cast import Fp8, Uncast, cast_plain


class NormedCast(Uncast):
    """Normed rows whose scales are known."""

    def __init__(
        self,
        x: Float[Tensor, "*B D"],
        scales: Float[Tensor, " T"],
        weight: Float[Tensor, " D"],
        offset: float,
        amax: Float[Tensor, " 1"],
    ) -> None:
        """Keep the factors; nothing is computed.

        Args:
            x: to norm, contiguous.
            scales: one for each row, float32.
            weight: of the norm.
            offset: added to it.
            amax: largest magnitude of the result.
        """
        super().__init__(x.shape)
        self._factors = x.detach(), scales, weight.detach(), offset
        self._amax = amax

    def largest(self) -> Float[Tensor, " 1"]:
        """Return the largest magnitude, which the norm has found."""
        return self._amax

    def cast(
        self,
        amax: Float[Tensor, " 1"],
        dtype: torch.dtype,
        *,
        has_rows: bool,
        seen: Float[Tensor, " 1"] | None,
    ) -> Fp8:
        """Cast by a known magnitude; by the kernel for 16 bits."""
        x, scales, weight, offset = self._factors
        if not (x.is_cuda and x.shape[:-1].numel() % 4 == 0 and has_kernel(x)):
            return super().cast(amax, dtype, has_rows=has_rows, seen=seen)
        from mcore_models.kernels.normed_fp8 import cast_by

        factors = x.flatten(0, -2), scales, weight, offset
        return cast_by(*factors, amax, dtype, has_rows=has_rows, seen=seen)

    def make(self) -> Float[Tensor, "*B D"]:
        """Compute it as the norm does."""
        x, scales, weight, offset = self._factors
        wide = x.float() * scales.view(*x.shape[:-1], 1) * (weight.float() + offset)
        return wide.to(x.dtype)


def has_kernel(x: Float[Tensor, "*B D"]) -> bool:
    """Say whether the kernel casts norms of a tensor on a GPU."""
    is_narrow = x.dtype in (torch.bfloat16, torch.float16)
    return is_narrow and works(NORMED_CAST_KERNEL, x.device, x.dtype)


def _try_kernel(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Norm and cast by the kernel, and one after the other in torch; a trial."""
    from mcore_models.kernels.normed_fp8 import cast_by

    x, weight = (3.0 * wave(*s, device=device, dtype=dtype) for s in ((96, 272), (272,)))
    scales = 1.0 + wave(96, device=device, dtype=torch.float32)
    matrix = NormedCast(x, scales, weight, 0.5, scales[:1]).make()
    amax, seen = matrix.abs().amax().float().view(1), torch.zeros(1, device=device)
    for noted in (None, seen):
        own = cast_by(x, scales, weight, 0.5, amax, torch.float8_e4m3fn, seen=noted)
        for got, want in zip(own, cast_plain(matrix, amax, torch.float8_e4m3fn), strict=True):
            yield got.float(), want.float()
    yield seen, amax


NORMED_CAST_KERNEL = OptionalKernel("norms cast to fp8", ("triton",), _try_kernel)
"""What casts norms before fp8 linears where it works."""
