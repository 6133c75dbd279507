"""A frozen base in 8 or 4 bits: weights are dequantized only while their module computes.

Frozen matrices with adapters, and those of routed experts, are stored in blocks of 64 columns,
as 8-bit integers or as one of the 16 levels of NormalFloat, times the largest magnitude of the
block. Hooks dequantize the weights before their module's forward and again before its backward,
and free the memory after each.

Dettmers et al. 2023, QLoRA, arXiv:2305.14314, section 3; without quantization of the scales.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.kernels.few_bits import widen_levels
from mcore_models.peft.attaching import adapted_linears
from mcore_models.peft.config import BLOCK
from mcore_moe.experts.experts import Experts


class QuantizedMatrix:
    """A matrix stored in 8 or 4 bits, with a scale for each block of columns.

    Attributes:
        codes: ``[F, blocks, 64]``, int8; or ``[F, blocks, 32]``, uint8, two 4-bit levels each.
        scales: ``[F, blocks, 1]``, float32: largest magnitude of each block.
    """

    def __init__(self, weight: Float[Tensor, "F D"], bits: int) -> None:
        """Quantize a matrix; the last block is padded with zeros."""
        self.bits, self.columns = bits, weight.shape[1]
        blocks = F.pad(weight.float(), (0, -self.columns % BLOCK)).unflatten(1, (-1, BLOCK))
        self.scales = blocks.abs().amax(2, keepdim=True)
        shares = blocks / self.scales.clamp(min=torch.finfo(torch.float32).tiny)
        if bits == 8:
            self.codes = (shares * 127).round().to(torch.int8)
            return
        levels = _levels(weight.device)
        borders = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(shares, borders).to(torch.uint8)
        self.codes = codes[..., ::2] | codes[..., 1::2] << 4  # two to a byte, even one low

    def widened(self) -> Float[Tensor, "F D"]:
        """Return the dequantized matrix, float32."""
        out = self.scales.new_empty(self.scales.shape[0], self.columns)
        self.widen_into(out)
        return out

    def widen_into(self, out: Float[Tensor, "F D"]) -> None:
        """Write the dequantized matrix to ``out``, contiguous, of any dtype."""
        if self.bits == 4:
            widen_levels(self.codes, self.scales, _levels(out.device), out)
        else:
            shares = self.codes.float().div_(127)
            out.copy_(shares.mul_(self.scales).flatten(1)[:, : self.columns])

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


@cache
def _levels(device: torch.device) -> Float[Tensor, " levels"]:
    """Return the levels of 4-bit NormalFloat: quantiles of N(0, 1), 0 and both ends exact."""
    last = 1 - (1 / 32 + 1 / 30) / 2
    above = torch.special.ndtri(torch.linspace(last, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(last, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([below, above.new_zeros(1), above]).sort().values
    return (levels / levels.max()).float().to(device)


def _matrices(weight: Float[Tensor, "... F D"]) -> list[Tensor]:
    """Return views of a weight's matrices: one for each expert, or one for a linear."""
    return list(weight.data.view(-1, *weight.shape[-2:]))


class QuantizedWeights:
    """Hooks of a module whose weights have memory only while the module computes."""

    def __init__(self, module: Any, weights: Sequence[nn.Parameter], bits: int) -> None:
        """Quantize weights, free their memory, and add hooks that run after an adapter's."""
        self.weights = weights
        # A matrix for each expert, so that quantizing needs temporary memory for one expert.
        self.matrices = [[QuantizedMatrix(m, bits) for m in _matrices(w)] for w in weights]
        for weight in weights:
            # New memory: storage that NumPy has viewed, as during a load, cannot be resized.
            weight.data = torch.empty_like(weight)
        self._sizes = [weight.untyped_storage().nbytes() for weight in weights]
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)
        self._free()

    def _before(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._fill()
        x, *others = inputs
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # the hook on its gradient frees the weights
        return (x, *others)

    def _fill(self, *_: Any) -> None:
        for weight, stored, size in zip(self.weights, self.matrices, self._sizes, strict=True):
            storage = weight.untyped_storage()
            if not storage.nbytes():
                storage.resize_(size)
                # The values are the same as before, so autograd's saved references stay valid.
                for target, matrix in zip(_matrices(weight), stored, strict=True):
                    matrix.widen_into(target)

    def _free(self, *_: Any) -> None:
        for weight in self.weights:
            weight.untyped_storage().resize_(0)

    def _after(self, _module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        if torch.is_grad_enabled():
            y.register_hook(self._fill)
            inputs[0].register_hook(self._free)
        self._free()


def quantize_base(model: nn.Module, bits: int) -> list[QuantizedWeights]:
    """Quantize frozen weights of linears with adapters, and of routed experts, in place.

    No communication. The weights must be loaded. Afterwards only a module's own forward and
    backward can read the weights: they cannot be loaded, saved, merged, or used by latent
    attention with a state. Blocks consist of this rank's columns, so another tensor parallel
    size may round differently.

    Args:
        model: with adapters, see ``attach_adapters``; experts may have adapters or not.
        bits: of a weight, 8 or 4.

    Returns:
        The quantized weights, one object for each linear and each layer of experts.

    Raises:
        ValueError: if ``bits`` is not 4 or 8, or the weights are quantized already.
    """
    if bits not in (4, 8):
        raise ValueError(f"--peft-base-bits {bits} cannot quantize the base: use 4 or 8.")
    modules = [(linear, [linear.weight]) for linear, _ in adapted_linears(model)]
    modules += [
        (module, [module.fc1_weight, module.fc2_weight])
        for module in model.modules()
        if isinstance(module, Experts)
    ]
    if not all(w.untyped_storage().nbytes() for _, weights in modules for w in weights):
        raise ValueError("the base is quantized already: build and load the model again.")
    return [QuantizedWeights(module, weights, bits) for module, weights in modules]
