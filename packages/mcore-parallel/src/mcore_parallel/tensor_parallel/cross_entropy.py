"""Cross-entropy of logits whose vocabulary is split over the tensor ranks.

Padding columns of the vocabulary take no part in the maximum, the sum and the smoothing, and
the smoothing is uniform over the true vocabulary of all ranks. The losses equal those of
``torch.nn.functional.cross_entropy(..., reduction="none")`` on the gathered logits.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.tensor_parallel.embedding import check_range, padded_vocab


def vocab_parallel_cross_entropy(
    logits: Float[Tensor, "*T v"],
    labels: Int[Tensor, "*T"],
    *,
    vocab_size: int,
    padded_vocab_size: int = 0,
    axis: Axis = SINGLE,
    label_smoothing: float = 0.0,
) -> Float[Tensor, "*T"]:
    """Return the loss of every token, equal on all ranks of the axis.

    With K true classes, label y and smoothing s, the loss is torch's:
    ``(1 - s) * -log p[y] + s / K * sum_k -log p[k]``. (Megatron's s' = s K / (K - 1) spreads
    the same weight over the other classes only.) Forward all-reduces twice; backward does not
    communicate and gives the gradient of this rank's columns, zero in padding.

    Args:
        logits: this rank's columns, any floating dtype; computed in float32 or wider. Saved
            for backward instead of the softmax.
        labels: token ids, equal on all ranks of the axis.
        vocab_size: K, without padding.
        padded_vocab_size: columns over all ranks (the head's attribute); 0: the next
            multiple of ``axis.size``.
        axis: ranks that split the columns into equal consecutive ranges.
        label_smoothing: s, ``0 <= s < 1``.

    Returns:
        Losses, float32 or wider; NaN for a label outside the vocabulary on a GPU or in compiled
        code.

    Raises:
        ValueError: if the columns of all ranks are not the padded vocabulary (for example
            because logits were gathered), if labels and rows of logits differ in shape, or, on
            the CPU, if a label is outside the vocabulary.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels {list(labels.shape)} do not fit logits {list(logits.shape)}: one label "
            "for each row, in the same order (a head returns [S, B, v]: transpose labels "
            "[B, S], and cut them over context ranks like the tokens)"
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label smoothing {label_smoothing} must be at least 0 and below 1")
    width = logits.shape[-1]
    padded = padded_vocab_size or padded_vocab(vocab_size, 1, axis.size)
    if width * axis.size != padded or padded < vocab_size:
        raise ValueError(
            f"logits have {width} columns on each of {axis.size} ranks of axis {axis.name}, "
            f"but vocabulary {vocab_size} is padded to {padded}: pass this rank's columns "
            "only, not gathered ones, and the head's padded_vocab_size"
        )
    check_range(labels, vocab_size, "labels")
    return _VocabCrossEntropy.apply(logits, labels, vocab_size, axis, label_smoothing)


class _VocabCrossEntropy(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        axis: Axis,
        label_smoothing: float,
    ) -> Tensor:
        num_true = _true_columns(logits.shape[-1], vocab_size, axis)
        true = logits[..., :num_true]
        scores = true.to(torch.promote_types(logits.dtype, torch.float32))
        # Scores relative to the row's maximum over all ranks, so that exp cannot overflow.
        top = scores.amax(-1) if num_true else scores.new_full(labels.shape, -torch.inf)
        top = all_reduce(top, axis, "max")
        scores = scores - top.unsqueeze(-1)
        column, is_mine = _own_column(labels, logits.shape[-1], num_true, axis)
        if num_true:
            picked = scores.gather(-1, column).squeeze(-1).where(is_mine, 0.0)
        else:
            picked = scores.new_zeros(labels.shape)
        # One all-reduce for all sums; ``picked`` is zero on every rank but the label's.
        sums = [scores.exp().sum(-1), picked]
        if label_smoothing > 0:
            sums.append(scores.sum(-1))
        exp_sum, picked, *score_sum = all_reduce(torch.stack(sums), axis)
        log_sum = exp_sum.log()
        loss = (1 - label_smoothing) * (log_sum - picked)
        if label_smoothing > 0:
            loss = loss + label_smoothing * (log_sum - score_sum[0] / vocab_size)
        ctx.save_for_backward(logits, labels, top, log_sum)
        ctx.vocab_size, ctx.axis, ctx.label_smoothing = vocab_size, axis, label_smoothing
        return loss.where((labels >= 0) & (labels < vocab_size), torch.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, labels, top, log_sum = ctx.saved_tensors
        smoothing = ctx.label_smoothing
        num_true = _true_columns(logits.shape[-1], ctx.vocab_size, ctx.axis)
        scores = logits[..., :num_true].to(grad.dtype)
        # d loss / d logit[k] = p[k] - (1 - s) [k == y] - s / K.
        # Two subtractions, because top + log_sum would round log_sum away if top is large.
        probs = (scores - top.unsqueeze(-1) - log_sum.unsqueeze(-1)).exp()
        column, is_mine = _own_column(labels, logits.shape[-1], num_true, ctx.axis)
        target = (1 - smoothing) * is_mine.to(grad.dtype).unsqueeze(-1)
        if num_true:
            probs = probs.scatter_add(-1, column, -target) - smoothing / ctx.vocab_size
        grad_logits = (probs * grad.unsqueeze(-1)).to(logits.dtype)
        padding = logits.shape[-1] - num_true
        return torch.nn.functional.pad(grad_logits, (0, padding)), None, None, None, None


def _true_columns(width: int, vocab_size: int, axis: Axis) -> int:
    """Return the number of this rank's columns, from the first, that are not padding."""
    return min(max(vocab_size - axis.rank * width, 0), width)


def _own_column(labels: Tensor, width: int, num_true: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return each label's column on this rank, else 0, and whether this rank has it."""
    local = labels - axis.rank * width
    is_mine = (local >= 0) & (local < num_true)
    return local.where(is_mine, 0).unsqueeze(-1), is_mine
