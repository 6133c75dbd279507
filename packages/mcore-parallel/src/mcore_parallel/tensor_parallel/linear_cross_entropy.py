"""Output head fused with the vocabulary-parallel cross-entropy, in chunks of tokens.

The logits of a chunk are freed once its loss and gradients are computed: for 8192 tokens and
a vocabulary of 128k that is half a gigabyte instead of ten. Forward computes the gradients too
(the loss is the root of backward, so the gradient of the loss is 1), and a GEMM accumulates the
weight's gradient into the main gradient in float32.
The slow reference is ``VocabParallelHead`` followed by ``vocab_parallel_cross_entropy``.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable, cast_factor, without_autocast
from mcore_parallel.autograd.grad_slot import accumulate_matmul, slot_of
from mcore_parallel.collectives import all_reduce, copy_to, gather_partial_from
from mcore_parallel.kernels.loss import row_stats, softmax_gradient_
from mcore_parallel.mesh import SINGLE, Axis

CHUNK_TOKENS = 4096


def linear_cross_entropy(
    x: Float[Tensor, "S B D"],
    weight: Float[Tensor, "v D"],
    labels: Int[Tensor, "B Q"],
    weights: Float[Tensor, "B Q"],
    *,
    vocab_size: int,
    axis: Axis = SINGLE,
    sequence_parallel: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Float[Tensor, ""], Float[Tensor, "B Q"]]:
    """Return the weighted sum of token losses and, without gradient, each token's loss.

    Over ``axis``: all-gathers ``x`` under sequence parallelism, all-reduces four numbers per
    token in forward, and all-reduces (or reduce-scatters) the gradient of ``x`` in backward.

    The sum must be a root of backward with gradient 1 (``torch.autograd.backward``), because
    forward has already computed the gradients; any other gradient fails an assertion on the
    device.

    Args:
        x: hidden states; under sequence parallelism this rank's S/tp of Q positions.
        weight: this rank's rows of the head; padding rows at the global end. If the weight has
            a main gradient, the gradient is added to it and autograd gets None.
        labels: global vocabulary ids, each below ``vocab_size``.
        weights: factor of every token's loss (mask over global count), float32 or wider.
        vocab_size: vocabulary without padding.
        axis: ranks that split the vocabulary.
        sequence_parallel: whether ``x`` is split along the sequence.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        z_loss: adds so many times log(Z)^2 to each token's loss, with Z the sum of the
            exponentials of the logits (PaLM, Chowdhery et al. 2022, arXiv:2204.02311, 5).
        softcap: logits become softcap x tanh(logit / softcap) before the loss; 0: no cap.
        chunk_tokens: tokens of a chunk, whose logits are in memory together.

    Raises:
        ValueError: if the rows of ``weight`` over all ranks are fewer than ``vocab_size``, or
            if x and labels have different tokens.

    Reference:
        Vocabulary-parallel loss: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    if weight.shape[0] * axis.size < vocab_size:
        raise ValueError(
            f"a head of {axis.size} x {weight.shape[0]} rows cannot hold a vocabulary of "
            f"{vocab_size}: pad it to a multiple of the ranks, see padded_vocab"
        )
    x = gather_partial_from(x, axis) if sequence_parallel else copy_to(x, axis)
    if labels.t().shape != x.shape[:2] or weights.shape != labels.shape:
        raise ValueError(
            f"labels {list(labels.shape)} and weights {list(weights.shape)} do not fit hidden "
            f"states {list(x.shape)}: they are [B, S] where these, gathered over the tensor "
            "ranks, are [S, B, D]; context ranks cut them like the tokens"
        )
    rows = x.reshape(-1, x.shape[-1])  # [S, B, D] -> [T, D]
    if not torch.is_grad_enabled():  # else forward would compute gradients for nothing
        rows, weight = rows.detach(), weight.detach()
    flat_labels = labels.t().reshape(-1)
    flat_weights = weights.t().reshape(-1)
    rows, matrix = cast_factor(rows), cast_factor(weight.detach())
    with without_autocast(rows.device):
        total, losses = _LinearCrossEntropy.apply(
            rows,
            weight,
            matrix,
            flat_labels,
            flat_weights,
            vocab_size,
            axis,
            label_smoothing,
            z_loss,
            softcap,
            chunk_tokens,
        )
    return total, losses.view(labels.t().shape).t()


class _LinearCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        matrix: Tensor,
        labels: Tensor,
        weights: Tensor,
        vocab_size: int,
        axis: Axis,
        label_smoothing: float,
        z_loss: float,
        softcap: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        # ``matrix`` is the weight, or its cast under autocast.
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = weights.to(wide)
        first = axis.rank * weight.shape[0]  # vocabulary id of this rank's first row
        width = min(max(vocab_size - first, 0), weight.shape[0])  # rows that are not padding
        shape = width, first, label_smoothing, vocab_size, z_loss
        needs_grad, needs_weight = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[1]
        dx = torch.empty_like(x if needs_grad else x[:0])
        slot = ctx.slot = slot_of(weight)
        main = None if slot is None else slot.main
        rows = weight.shape[0] if needs_weight else 0
        dw = weight.new_empty(rows, weight.shape[1], dtype=wide) if main is None else main
        # Whether the first chunk's GEMM writes over dw instead of adding to it.
        is_new = needs_weight and (slot is None or slot.take_stale())
        losses = torch.empty(x.shape[0], dtype=wide, device=x.device)
        for begin in range(0, x.shape[0], chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            logits, slope = _capped_logits(x[part], matrix, softcap)
            peak, total, target, plain = row_stats(
                logits, labels[part], width, first, label_smoothing > 0.0
            )
            # log sum_k exp(z_k) = M + log sum over ranks of exp(m_r - M) sum_k exp(z_k - m_r),
            # with m_r the maximum on rank r and M that over all ranks.
            highest = all_reduce(peak, axis, "max")
            shifted = torch.stack([total * torch.exp(peak - highest), target, plain])
            total, target, plain = all_reduce(shifted, axis)
            log_sum = highest + torch.log(total)
            # Smoothing: (1 - s) (log_sum - z_y) + s (log_sum - mean of z over the vocabulary).
            smooth_loss = log_sum - plain / vocab_size
            losses[part] = torch.lerp(log_sum - target, smooth_loss, label_smoothing)
            if z_loss:
                losses[part] += z_loss * log_sum.square()
            if needs_grad:
                # The gradient of the logits replaces the logits in memory.
                softmax_gradient_(logits, labels[part], log_sum, weights[part], *shape)
                torch.mm(_uncapped_gradient_(logits, slope), matrix, out=dx[part])
                if needs_weight:
                    accumulate_matmul(dw, logits.t(), x[part], overwrite=is_new)
                is_new = False
            del logits, slope  # before the next chunk's: one is in memory at a time
        if is_new:  # the batch has no tokens
            dw.zero_()
        if needs_grad:
            ctx.save_for_backward(dx, *((dw,) if needs_weight and main is None else ()))
            ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return _weighted_sum(losses, weights), losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _losses: Tensor) -> Any:
        dx, *dw = ctx.saved_tensors
        torch._assert_async(grad == 1, "linear_cross_entropy must be a root of backward")
        if ctx.slot is not None:
            ctx.slot.ready()
        grad_weight = dw[0].to(ctx.dtype) if dw else None
        return dx, grad_weight, *(None,) * 9


def _weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    # A masked token may have a NaN loss, and 0 * NaN is NaN.
    unmasked = torch.where(weights == 0, torch.zeros_like(losses), losses)
    return (unmasked * weights).sum()


def _uncapped_gradient_(gradient: Tensor, slope: Tensor | None) -> Tensor:
    """Multiply the gradient of capped logits by the cap's slope, in place."""
    return gradient if slope is None else gradient.mul_(slope)


def _capped_logits(x: Tensor, matrix: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Return logits, capped by ``softcap`` unless 0, and the slope of the cap at each logit."""
    logits = x @ matrix.t()
    if not softcap:
        return logits, None
    tanh = torch.tanh(logits / softcap)
    return tanh * softcap, 1 - tanh.square()
