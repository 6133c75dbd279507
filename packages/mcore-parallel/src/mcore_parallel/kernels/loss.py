"""The cross-entropy over a slice of the vocabulary: Triton kernels and references.

Two passes over the logits of a chunk of tokens, both limited by memory traffic: ``row_stats``
reads the logits, ``softmax_gradient_`` overwrites them by their gradient. Between the two
passes ranks all-reduce the statistics (see ``linear_cross_entropy``).
"""

from collections.abc import Iterator
from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.optional_kernels import Sample, optional_kernel, tl, triton, wave

_BLOCK, _BLOCK_WARPS = 4096, 16
_LANES, _LANE_WARPS = 2048, 8


@triton.jit
@no_type_check
def _row_stats(
    logits, labels, out, stride, width, first, rows, PLAIN: tl.constexpr, LANES: tl.constexpr
):
    # Exponentials are the bottleneck. A lane adds four columns at a time, so that one
    # exponential rescales its running sum for four columns. Only the last step needs a mask.
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * stride
    lane = tl.arange(0, LANES)
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    plain = tl.zeros([LANES], tl.float32)
    whole = width // (4 * LANES) * (4 * LANES)
    for start in range(0, whole, 4 * LANES):
        chunk = base + start + lane
        a = tl.load(chunk).to(tl.float32)
        b = tl.load(chunk + LANES).to(tl.float32)
        c = tl.load(chunk + 2 * LANES).to(tl.float32)
        d = tl.load(chunk + 3 * LANES).to(tl.float32)
        top, total = _add_exponentials(top, total, a, b, c, d)
        if PLAIN:
            plain += (a + b) + (c + d)
    if whole < width:
        a = _columns(base, whole + lane, width)
        b = _columns(base, whole + LANES + lane, width)
        c = _columns(base, whole + 2 * LANES + lane, width)
        d = _columns(base, whole + 3 * LANES + lane, width)
        top, total = _add_exponentials(top, total, a, b, c, d)
        if PLAIN:
            plain += (_or_zero(a) + _or_zero(b)) + (_or_zero(c) + _or_zero(d))
    # Combine the lanes: sum over lanes of total * exp(top - peak). Without columns (a slice of
    # padding) the peak is -inf, and 0 in its place keeps the difference from being NaN.
    peak = tl.max(top, 0)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    label = tl.load(labels + row) - first
    is_local = (label >= 0) & (label < width)
    target = tl.load(base + tl.where(is_local, label, 0), mask=is_local, other=0.0).to(
        tl.float32
    )
    tl.store(out + row, peak)
    tl.store(out + rows + row, tl.sum(total * tl.exp(top - safe), 0))
    tl.store(out + 2 * rows + row, target)
    tl.store(out + 3 * rows + row, tl.sum(plain, 0))


@triton.jit
@no_type_check
def _add_exponentials(top, total, a, b, c, d):
    higher = tl.maximum(top, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
    # A lane without any column yet has -inf, and -inf - -inf would be NaN.
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    total = total * tl.exp(top - safe)
    total += (tl.exp(a - safe) + tl.exp(b - safe)) + (tl.exp(c - safe) + tl.exp(d - safe))
    return higher, total


@triton.jit
@no_type_check
def _columns(base, column, width):
    x = tl.load(base + column, mask=column < width, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
@no_type_check
def _or_zero(x):
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
@no_type_check
def _softmax_gradient(
    logits,
    labels,
    log_sum,
    weights,
    stride,
    width,
    padded,
    first,
    hit,
    smooth,
    slope,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * stride
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weights + row)
    shift = tl.load(log_sum + row)
    gain = 1.0 + slope * shift
    label = tl.load(labels + row) - first
    kind = logits.dtype.element_ty
    # gradient = weight * ((1 + slope log_sum) exp(x - log_sum) - smooth - hit [is the label])
    if weight == 0.0:  # a masked token gets zeros even if its logits are NaN
        for start in range(0, padded, BLOCK):
            column = start + columns
            tl.store(base + column, tl.zeros([BLOCK], kind), mask=column < padded)
    else:
        whole = width // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            x = tl.load(base + start + columns).to(tl.float32)
            grad = (
                gain * tl.exp(x - shift) - smooth - tl.where(start + columns == label, hit, 0.0)
            )
            tl.store(base + start + columns, (grad * weight).to(kind))
        for start in range(whole, padded, BLOCK):
            column = start + columns
            inside = column < width
            x = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
            grad = gain * tl.exp(x - shift) - smooth - tl.where(column == label, hit, 0.0)
            grad = tl.where(inside, grad * weight, 0.0)
            tl.store(base + column, grad.to(kind), mask=column < padded)


def row_stats_plain(
    logits: Float[Tensor, "T v"],
    labels: Int[Tensor, " T"],
    width: int,
    first: int,
    has_plain: bool = True,
) -> Float[Tensor, "4 T"]:
    """Compute ``row_stats`` in plain torch; float64 stays float64."""
    wide = logits[:, :width].to(torch.promote_types(logits.dtype, torch.float32))
    local = labels - first
    is_local = (local >= 0) & (local < width)
    if width == 0:
        none = wide.new_zeros(logits.shape[0])
        return torch.stack([none - torch.inf, none, none, none])
    peak = wide.amax(dim=1)
    target = wide.gather(1, torch.where(is_local, local, 0)[:, None]).squeeze(1)
    target = torch.where(is_local, target, 0)
    plain = wide.sum(1) if has_plain else torch.zeros_like(peak)
    return torch.stack([peak, torch.exp(wide - peak[:, None]).sum(1), target, plain])


def softmax_gradient_plain(
    logits: Float[Tensor, "T v"],
    labels: Int[Tensor, " T"],
    log_sum: Float[Tensor, " T"],
    weights: Float[Tensor, " T"],
    width: int,
    first: int,
    label_smoothing: float,
    vocab_size: int,
    z_loss: float = 0.0,
) -> None:
    """Compute ``softmax_gradient_`` in plain torch, in place."""
    wide = logits[:, :width].to(log_sum.dtype)
    gain = 1.0 + 2.0 * z_loss * log_sum[:, None]
    grad = gain * torch.exp(wide - log_sum[:, None]) - label_smoothing / vocab_size
    local = labels - first
    is_local = (local >= 0) & (local < width)
    grad[is_local.nonzero().squeeze(1), local[is_local]] -= 1.0 - label_smoothing
    grad = torch.where(weights[:, None] == 0, torch.zeros_like(grad), grad * weights[:, None])
    logits[:, :width] = grad.to(logits.dtype)
    logits[:, width:] = 0


def _kind(logits: Tensor) -> tuple[torch.dtype] | None:
    return None if logits.dtype == torch.float64 else (logits.dtype,)


def _stats_samples(
    device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[Sample]:
    labels = torch.tensor([3, 1], device=device)
    yield Sample(wave(2, 64, device=device, dtype=dtype), labels, 60, 0, True)


def _gradient_samples(
    device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[Sample]:
    labels = torch.tensor([3, 1], device=device)
    log_sum, weights = (torch.ones(2, device=device) for _ in range(2))
    logits = wave(2, 64, device=device, dtype=dtype)
    yield Sample(logits, labels, log_sum, weights, 60, 0, 0.1, 60, 1e-2)


@optional_kernel(
    "statistics of the cross-entropy in Triton",
    reference=row_stats_plain,
    kind=_kind,
    samples=_stats_samples,
)
def row_stats(
    logits: Float[Tensor, "T v"],
    labels: Int[Tensor, " T"],
    width: int,
    first: int,
    has_plain: bool = True,
) -> Float[Tensor, "4 T"]:
    """Return four statistics of each row of this rank's logits, reading the logits once.

    Args:
        logits: contiguous rows of the local vocabulary slice; padding columns at the end.
        labels: global vocabulary ids.
        width: columns of the slice that are not padding; may be 0.
        first: global id of column 0.
        has_plain: whether to compute the sum of logits (for label smoothing).

    Returns:
        float32 rows: maximum (-inf for an empty slice); sum of exp(x - maximum); the label's
        logit, 0 if another rank has the label; sum of logits, or 0.
    """
    rows = logits.shape[0]
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    _row_stats[(rows,)](
        logits,
        labels,
        out,
        logits.stride(0),
        width,
        first,
        rows,
        has_plain,
        _LANES,
        num_warps=_LANE_WARPS,
    )
    return out


@optional_kernel(
    "the gradient of the cross-entropy in Triton",
    reference=softmax_gradient_plain,
    kind=_kind,
    samples=_gradient_samples,
)
def softmax_gradient_(
    logits: Float[Tensor, "T v"],
    labels: Int[Tensor, " T"],
    log_sum: Float[Tensor, " T"],
    weights: Float[Tensor, " T"],
    width: int,
    first: int,
    label_smoothing: float,
    vocab_size: int,
    z_loss: float = 0.0,
) -> None:
    """Overwrite logits by the gradient of the weighted loss.

    Args:
        logits: as in ``row_stats``; padding columns become 0.
        labels: global vocabulary ids.
        log_sum: logarithm of the sum of exponentials over all ranks' columns, float32.
        weights: factor of each token's loss; a row of weight 0 becomes 0.
        width: columns of the slice that are not padding.
        first: global id of column 0.
        label_smoothing: probability spread evenly over the vocabulary.
        vocab_size: vocabulary of all ranks without padding.
        z_loss: factor of ``log_sum`` squared in the loss.
    """
    _softmax_gradient[(logits.shape[0],)](
        logits,
        labels,
        log_sum,
        weights,
        logits.stride(0),
        width,
        logits.shape[1],
        first,
        1.0 - label_smoothing,
        label_smoothing / vocab_size,
        2.0 * z_loss,
        _BLOCK,
        num_warps=_BLOCK_WARPS,
    )
