"""The short causal convolution of recurrent layers: Triton kernels and reference.

A program computes a tile of tokens and channels; it reads the W - 1 tokens before the tile
from the L2 cache. Backward writes the gradient before the activation once, in the inputs'
dtype, and sums the weights' gradients over each tile; the tiles are summed in a fixed order.
"""

from collections.abc import Iterator
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.optional_kernels import (
    Sample,
    optional_kernel,
    sine_leaf,
    tl,
    triton,
)

_TOKENS, _CHANNELS = 32, 128
"""Tokens and channels of a tile."""


@triton.jit
@no_type_check
def _tile(length, width, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the tokens and channels of a tile, and the mask of elements inside the tensor."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return token.to(tl.int64), channel, (token < length)[:, None] & (channel < width)[None, :]


@triton.jit
@no_type_check
def _before(
    x, x_token, x_row, docs, token, channel, mine, lag, inside, batch, HAS_DOCS: tl.constexpr
):  # fmt: skip
    """Load the inputs ``lag`` tokens before a tile's tokens; 0 if of another document."""
    earlier = token - lag
    sees = earlier >= 0
    row = tl.program_id(2)
    if HAS_DOCS:
        there = tl.load(docs + earlier * batch + row, mask=sees, other=-1)
        sees = sees & (there == mine)
    at = earlier[:, None] * x_token + row * x_row + channel[None, :]
    return tl.load(x + at, mask=inside & sees[:, None], other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _mixed(
    x, x_token, x_row, weight, bias, docs, token, channel, mine, inside, batch, width,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCS: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return the convolution of a tile, float32, before the activation."""
    result = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for lag in tl.static_range(W):
        tap = tl.load(weight + channel * W + (W - 1 - lag), mask=channel < width, other=0.0)
        seen = _before(
            x, x_token, x_row, docs, token, channel, mine, lag, inside, batch, HAS_DOCS
        )
        result += seen * tap.to(tl.float32)[None, :]
    if HAS_BIAS:
        shift = tl.load(bias + channel, mask=channel < width, other=0.0)
        result += shift.to(tl.float32)[None, :]
    return result


@triton.jit(do_not_specialize=["length", "batch"])
@no_type_check
def _forward(
    x, x_token, x_row, weight, bias, docs, y, length, batch, width,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCS: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, channel, inside = _tile(length, width, TOKENS, CHANNELS)
    mine = tl.zeros([TOKENS], tl.int32)
    if HAS_DOCS:
        mine = tl.load(docs + token * batch + tl.program_id(2), mask=token < length, other=0)
    mixed = _mixed(
        x, x_token, x_row, weight, bias, docs, token, channel, mine, inside, batch, width,
        W, HAS_BIAS, HAS_DOCS, TOKENS, CHANNELS,
    )  # fmt: skip
    mixed = mixed.to(y.dtype.element_ty).to(tl.float32)  # rounded like the reference
    at = (token[:, None] * batch + tl.program_id(2)) * width + channel[None, :]
    tl.store(y + at, (mixed * tl.sigmoid(mixed)).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "batch"])
@no_type_check
def _before_activation(
    x, x_token, x_row, weight, bias, docs, dy, dmixed, dweight, length, batch, width,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DOCS: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the gradient before SiLU, and a tile's share of weight and bias gradients."""
    token, channel, inside = _tile(length, width, TOKENS, CHANNELS)
    row = tl.program_id(2)
    mine = tl.zeros([TOKENS], tl.int32)
    if HAS_DOCS:
        mine = tl.load(docs + token * batch + row, mask=token < length, other=0)
    mixed = _mixed(
        x, x_token, x_row, weight, bias, docs, token, channel, mine, inside, batch, width,
        W, HAS_BIAS, HAS_DOCS, TOKENS, CHANNELS,
    )  # fmt: skip
    mixed = mixed.to(dy.dtype.element_ty).to(tl.float32)
    at = (token[:, None] * batch + row) * width + channel[None, :]
    grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(mixed)
    grad *= share * (1 + mixed * (1 - share))
    tl.store(dmixed + at, grad.to(dmixed.dtype.element_ty), mask=inside)
    part = (tl.program_id(0) * batch + row) * (W + 1)
    for lag in tl.static_range(W):
        seen = _before(
            x, x_token, x_row, docs, token, channel, mine, lag, inside, batch, HAS_DOCS
        )
        at = (part + W - 1 - lag) * width + channel
        tl.store(dweight + at, tl.sum(grad * seen, 0), mask=channel < width)
    at = (part + W) * width + channel
    tl.store(dweight + at, tl.sum(grad, 0), mask=channel < width)


@triton.jit(do_not_specialize=["length", "batch"])
@no_type_check
def _inputs(
    dmixed, weight, docs, dx, length, batch, width,
    W: tl.constexpr, HAS_DOCS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the inputs' gradient, a sum over later tokens of the same document."""
    token, channel, inside = _tile(length, width, TOKENS, CHANNELS)
    row = tl.program_id(2)
    mine = tl.zeros([TOKENS], tl.int32)
    if HAS_DOCS:
        mine = tl.load(docs + token * batch + row, mask=token < length, other=0)
    result = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for lag in tl.static_range(W):
        later = token + lag
        seen = later < length
        if HAS_DOCS:
            there = tl.load(docs + later * batch + row, mask=seen, other=-1)
            seen = seen & (there == mine)
        tap = tl.load(weight + channel * W + (W - 1 - lag), mask=channel < width, other=0.0)
        at = (later[:, None] * batch + row) * width + channel[None, :]
        grad = tl.load(dmixed + at, mask=inside & seen[:, None], other=0.0)
        result += grad.to(tl.float32) * tap.to(tl.float32)[None, :]
    at = (token[:, None] * batch + row) * width + channel[None, :]
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)


class _Convolution(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, docs: Tensor | None
    ) -> Tensor:
        length, batch, width = x.shape
        y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        strided = x, x.stride(0), x.stride(1)
        ctx.constants = {"W": weight.shape[-1], "HAS_DOCS": docs is not None}
        ctx.constants |= {"TOKENS": _TOKENS, "CHANNELS": _CHANNELS}
        ctx.grid = triton.cdiv(length, _TOKENS), triton.cdiv(width, _CHANNELS), batch
        has_bias = bias is not None
        sizes = length, batch, width
        _forward[ctx.grid](
            *strided, weight, bias, docs, y, *sizes, HAS_BIAS=has_bias, **ctx.constants
        )
        ctx.save_for_backward(x, weight, bias, docs)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, docs = ctx.saved_tensors
        length, batch, width = x.shape
        taps = weight.shape[-1]
        dy = dy.contiguous()
        dmixed, dx = torch.empty_like(dy), torch.empty_like(dy)
        # For each tile: the gradients of its W taps, then of the bias; summed below in a fixed
        # order, so that every run gives the same bits.
        parts = dy.new_empty((ctx.grid[0], batch, taps + 1, width), dtype=torch.float32)
        strided, sizes = (x, x.stride(0), x.stride(1)), (length, batch, width)
        has_bias = bias is not None
        _before_activation[ctx.grid](
            *strided, weight, bias, docs, dy, dmixed, parts, *sizes,
            HAS_BIAS=has_bias, **ctx.constants,
        )  # fmt: skip
        _inputs[ctx.grid](dmixed, weight, docs, dx, *sizes, **ctx.constants)
        total = parts.sum((0, 1))
        dweight = total[:taps].t().reshape(weight.shape).to(weight.dtype)
        dbias = None if bias is None else total[taps].to(bias.dtype)
        return dx, dweight, dbias, None


def causal_conv(
    x: Float[Tensor, "S B F"],
    weight: Float[Tensor, "F 1 W"],
    bias: Float[Tensor, " F"] | None = None,
    *,
    starts: Bool[Tensor, "S B"] | None = None,
    before: Float[Tensor, "w B F"] | None = None,
) -> Float[Tensor, "S B F"]:
    """Return the convolution of every channel over its last W tokens; no communication.

    Args:
        x: inputs.
        weight: of each channel; the newest token's weight is last.
        bias: of each channel.
        starts: mask of the first tokens of documents; earlier tokens do not contribute.
        before: the W - 1 inputs before the first input; None: zeros.
    """
    width, length = weight.shape[-1], x.shape[0]
    wide = torch.promote_types(x.dtype, torch.float32)
    if before is None:
        before = x.new_zeros(width - 1, *x.shape[1:])
    padded = torch.cat([before.to(x.dtype), x])
    taps = weight[:, 0].to(wide)
    y = x * taps[:, -1]
    sees = None if starts is None else torch.ones_like(starts)
    for lag in range(1, width):
        earlier = padded[width - 1 - lag : width - 1 - lag + length] * taps[:, -1 - lag]
        if sees is not None and starts is not None:
            # Token t mixes token t - lag only if no document starts in between.
            newer = F.pad(starts, (0, 0, lag - 1, 0))[:length]
            sees = sees & ~newer
            earlier = earlier * sees[..., None]
        y = y + earlier
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)


def _plain(
    x: Float[Tensor, "S B F"],
    weight: Float[Tensor, "F 1 W"],
    bias: Float[Tensor, " F"] | None = None,
    *,
    starts: Bool[Tensor, "S B"] | None = None,
    before: Float[Tensor, "w B F"] | None = None,
) -> Float[Tensor, "S B F"]:
    return F.silu(causal_conv(x, weight, bias, starts=starts, before=before))


def _kind(x: Tensor, before: Tensor | None) -> tuple[torch.dtype] | None:
    return None if before is not None or x.dtype == torch.float64 else (x.dtype,)


def _samples(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Sample]:
    shapes = (40, 2, 136), (136, 1, 4), (136,)
    yield Sample(*(sine_leaf(*shape, device=device, dtype=dtype) for shape in shapes))


@optional_kernel(
    "a short convolution in Triton", reference=_plain, kind=_kind, samples=_samples
)
def conv_silu(
    x: Float[Tensor, "S B F"],
    weight: Float[Tensor, "F 1 W"],
    bias: Float[Tensor, " F"] | None = None,
    *,
    starts: Bool[Tensor, "S B"] | None = None,
    before: Float[Tensor, "w B F"] | None = None,  # noqa: ARG001 - the reference continues
) -> Float[Tensor, "S B F"]:
    """Return SiLU of ``causal_conv``, with the same arguments; one kernel on a GPU."""
    # Document numbers: tokens with equal numbers are mixed.
    docs = None if starts is None else starts.cumsum(0, dtype=torch.int32)
    x = x if x.stride(2) == 1 else x.contiguous()
    return _Convolution.apply(x, weight.contiguous(), bias, docs)
