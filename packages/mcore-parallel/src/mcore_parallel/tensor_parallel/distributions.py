"""Distributions over a vocabulary that is split over the tensor ranks, without gathering it.

``vocab_parallel_kl`` compares the distributions of two models; ``vocab_parallel_log_probs``
returns the log-probabilities of given ids. Padding columns belong to neither. Both return
float32 or wider, equal on all ranks of the axis; their backward does not communicate.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.collectives import all_gather, all_reduce
from mcore_parallel.mesh import SINGLE, Axis


def vocab_parallel_kl(
    student: Float[Tensor, "*T v"],
    teacher: Float[Tensor, "*T v"],
    *,
    vocab_size: int,
    axis: Axis = SINGLE,
    temperature: float = 1.0,
) -> Float[Tensor, "*T"]:
    """Return the forward KL divergence of every token, differentiable in the student's logits.

    With ``p = softmax(teacher / t)`` and ``q = softmax(student / t)`` it is
    ``sum_k p[k] (log p[k] - log q[k])``. Forward all-reduces twice over ``axis``.

    Args:
        student: this rank's columns of the logits.
        teacher: the same columns of the other model's logits; they get no gradient.
        vocab_size: entries without padding.
        axis: ranks that split the columns into equal consecutive ranges.
        temperature: t, above 0.

    Reference:
        Hinton et al. 2015, Distilling the Knowledge in a Neural Network. arXiv:1503.02531.
    """
    return _VocabKL.apply(student, teacher.detach(), vocab_size, axis, temperature)


def vocab_parallel_log_probs(
    logits: Float[Tensor, "*T v"],
    ids: Int[Tensor, "*T k"],
    *,
    vocab_size: int,
    axis: Axis = SINGLE,
    temperature: float = 1.0,
) -> Float[Tensor, "*T k"]:
    """Return the log-probabilities of k ids of every token, differentiable in the logits.

    Forward all-reduces twice over ``axis``: the maximum, then the sum and the picked logits.

    Args:
        logits: this rank's columns.
        ids: global vocabulary ids, equal on all ranks of the axis.
        vocab_size: entries without padding.
        axis: ranks that split the columns into equal consecutive ranges.
        temperature: the logits are divided by it.
    """
    return _VocabLogProbs.apply(logits, ids, vocab_size, axis, temperature)


def vocab_parallel_top_k(
    logits: Float[Tensor, "*T v"],
    k: int,
    *,
    vocab_size: int,
    axis: Axis = SINGLE,
    temperature: float = 1.0,
) -> tuple[Int[Tensor, "*T k"], Float[Tensor, "*T k"]]:
    """Return the k most probable ids of every token and their log-probabilities.

    All-gathers k candidates of each rank over ``axis``; not differentiable.

    Args:
        logits: this rank's columns.
        k: at most ``vocab_size``.
        vocab_size: entries without padding.
        axis: ranks that split the columns into equal consecutive ranges.
        temperature: the logits are divided by it.
    """
    width = logits.shape[-1]
    scores = _scores(logits.detach(), vocab_size, axis, 1.0)
    best, columns = scores.topk(min(k, scores.shape[-1]), dim=-1)
    # Ranks with fewer true columns than k fill up with candidates that are never chosen.
    missing = min(k, width) - best.shape[-1]
    best = torch.nn.functional.pad(best, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(columns + axis.rank * width, (0, missing))
    best, positions = all_gather(best, axis, -1).topk(k, dim=-1)
    ids = all_gather(ids, axis, -1).gather(-1, positions)
    options: dict[str, Any] = {"axis": axis, "temperature": temperature}
    return ids, vocab_parallel_log_probs(logits.detach(), ids, vocab_size=vocab_size, **options)


class _VocabKL(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, vocab_size: int, axis: Axis, t: float
    ) -> Tensor:
        q, p = (_scores(each, vocab_size, axis, t) for each in (student, teacher))
        top_q, top_p = all_reduce(torch.stack([_largest(q), _largest(p)]), axis, "max")
        q, p = q - top_q.unsqueeze(-1), p - top_p.unsqueeze(-1)
        # KL = sum_k e^p (p - q) / Zp - log Zp + log Zq; the three sums in one all-reduce.
        weight = p.exp()
        sums = torch.stack([weight.sum(-1), q.exp().sum(-1), (weight * (p - q)).sum(-1)])
        sum_p, sum_q, cross = all_reduce(sums, axis)
        log_p, log_q = sum_p.log(), sum_q.log()
        ctx.save_for_backward(student, teacher, top_q, log_q, top_p, log_p)
        ctx.options = vocab_size, axis, t
        return cross / sum_p - log_p + log_q

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        student, teacher, top_q, log_q, top_p, log_p = ctx.saved_tensors
        vocab_size, axis, t = ctx.options
        q = _scores(student, vocab_size, axis, t) - top_q.unsqueeze(-1) - log_q.unsqueeze(-1)
        p = _scores(teacher, vocab_size, axis, t) - top_p.unsqueeze(-1) - log_p.unsqueeze(-1)
        # d KL / d student[k] = (q[k] - p[k]) / t.
        gradient = (q.exp() - p.exp()) * (grad / t).unsqueeze(-1)
        return _padded(gradient, student), None, None, None, None


class _VocabLogProbs(OnceDifferentiable):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, vocab_size: int, axis: Axis, t: float
    ) -> Tensor:
        scores = _scores(logits, vocab_size, axis, t)
        top = all_reduce(_largest(scores), axis, "max")
        scores = scores - top.unsqueeze(-1)
        column, is_mine = _columns(ids, logits.shape[-1], scores.shape[-1], axis)
        # A rank whose columns are all padding has no column to read.
        picked = scores.gather(-1, column) if scores.shape[-1] else torch.zeros_like(ids) * 1.0
        picked = picked.to(scores.dtype).where(is_mine, 0.0)
        sums = torch.cat([scores.exp().sum(-1, keepdim=True), picked], dim=-1)
        total, picked = all_reduce(sums, axis).split([1, ids.shape[-1]], dim=-1)
        log_sum = total.log()
        ctx.save_for_backward(logits, ids, top, log_sum)
        ctx.options = vocab_size, axis, t
        return picked - log_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, ids, top, log_sum = ctx.saved_tensors
        vocab_size, axis, t = ctx.options
        scores = _scores(logits, vocab_size, axis, t) - top.unsqueeze(-1) - log_sum
        # d log p[i] / d logit[k] = ([k == i] - p[k]) / t.
        gradient = scores.exp() * -grad.sum(-1, keepdim=True)
        column, is_mine = _columns(ids, logits.shape[-1], scores.shape[-1], axis)
        if scores.shape[-1]:
            gradient = gradient.scatter_add(-1, column, grad.where(is_mine, 0.0))
        return _padded(gradient / t, logits), None, None, None, None


def _scores(logits: Tensor, vocab_size: int, axis: Axis, temperature: float) -> Tensor:
    """Return this rank's columns without padding, in float32 or wider, over t."""
    width = logits.shape[-1]
    num_true = min(max(vocab_size - axis.rank * width, 0), width)
    wide = logits[..., :num_true].to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature


def _largest(scores: Tensor) -> Tensor:
    if scores.shape[-1]:
        return scores.amax(-1)
    return scores.new_full(scores.shape[:-1], -torch.inf)


def _columns(ids: Tensor, width: int, num_true: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return the local column of each id, 0 if another rank has it, and which are local."""
    local = ids - axis.rank * width
    is_mine = (local >= 0) & (local < num_true)
    return local.where(is_mine, 0), is_mine


def _padded(gradient: Tensor, logits: Tensor) -> Tensor:
    """Cast a gradient to the dtype of the logits; zeros in padding columns."""
    padding = logits.shape[-1] - gradient.shape[-1]
    return torch.nn.functional.pad(gradient.to(logits.dtype), (0, padding))
