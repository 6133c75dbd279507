"""Balancing the load of experts: losses and update rules as pure functions.

All load-balancing losses are E * sum_e f_e P_e, with f_e the share of choices that expert e
got, and P_e its mean score; 1.0 at perfect balance. The losses differ in the tokens over which
f is counted. Every loss returns *this rank's share*: the sum over ``axis`` is the loss of the
micro-batch, so gradients are summed, not averaged. No function changes its arguments.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis


def count_choices(
    ids: Int[Tensor, "T k"], num_experts: int, mask: Bool[Tensor, " T"] | None = None
) -> Int[Tensor, " E"]:
    """Return the number of tokens that chose each expert, int64.

    Args:
        ids: chosen experts.
        num_experts: E.
        mask: true for tokens that count; None: all tokens count.
    """
    ones = torch.ones_like(ids) if mask is None else mask[:, None].expand_as(ids).to(ids.dtype)
    counts = torch.zeros(num_experts, dtype=ids.dtype, device=ids.device)
    return counts.scatter_add(0, ids.reshape(-1), ones.reshape(-1))


def aux_loss(
    scores: Float[Tensor, "T E"], counts: Int[Tensor, " E"], topk: int, axis: Axis = SINGLE
) -> Float[Tensor, ""]:
    """Return this rank's share of the load-balancing loss of one micro-batch.

    All-reduces ``counts`` over ``axis``, so f_e and the number of tokens are those of the
    complete micro-batch.

    Args:
        scores: over all experts, rows sum to 1 (or 0 for a token that does not count).
        counts: choices of this rank's tokens, before capacity dropping.
        topk: choices per token.
        axis: ranks that share the micro-batch (tp x cp).

    Returns:
        Scalar, without coefficient: the sum over ``axis`` is 1.0 at perfect balance.

    Reference:
        Fedus et al. 2021, Switch Transformers, eq. 4. arXiv:2101.03961.
    """
    total = all_reduce(counts, axis)
    return _balance(scores.sum(0), total, total.sum(), topk)


def sequence_aux_loss(
    scores: Float[Tensor, "T E"],
    ids: Int[Tensor, "T k"],
    sequences: Int[Tensor, " T"],
    num_sequences: int,
    *,
    mask: Bool[Tensor, " T"] | None = None,
    axis: Axis = SINGLE,
) -> Float[Tensor, ""]:
    """Return this rank's share of the load-balancing loss by sequence, averaged over sequences.

    All-reduces counts over ``axis``. The loss does not depend on how a batch is divided into
    micro-batches.

    Args:
        scores: over all experts, rows sum to 1.
        ids: top-k of ``scores``.
        sequences: which sequence of the micro-batch each token belongs to.
        num_sequences: sequences in the micro-batch, equal on all ranks.
        mask: true for tokens that count.
        axis: ranks that share the micro-batch (tp x cp), each with a part of every sequence.

    Reference:
        DeepSeek-AI 2024, DeepSeek-V3, eq. 17 to 20. arXiv:2412.19437.
    """
    num_experts, topk = scores.shape[1], ids.shape[1]
    shape = (num_sequences, num_experts)
    # Count pairs of sequence and expert by one index.
    pairs = sequences[:, None] * num_experts + ids
    counts = count_choices(pairs, num_sequences * num_experts, mask).view(shape)
    if mask is not None:
        scores = scores * mask[:, None]
    sums = scores.new_zeros(shape).index_add(0, sequences, scores)
    total = all_reduce(counts, axis)
    return _balance(sums, total, total.sum(1, keepdim=True), topk) / num_sequences


def global_aux_loss(
    scores: Float[Tensor, "T E"],
    counts: Int[Tensor, " E"],
    seen: Int[Tensor, " E"],
    topk: int,
    axis: Axis = SINGLE,
) -> Float[Tensor, ""]:
    """Return this rank's share of the load-balancing loss over the step's batch so far.

    f_e is counted over all data ranks and all micro-batches of the step so far.

    All-reduces ``counts`` over ``axis`` for the number of tokens of this micro-batch.

    Args:
        scores: over all experts, rows sum to 1.
        counts: choices of this rank's tokens in this micro-batch.
        seen: choices of all ranks since the last step, including this micro-batch. f_e is
            divided by the sum of ``seen``, so micro-batches may differ in size.
        topk: choices per token.
        axis: ranks that share the micro-batch (tp x cp).

    Reference:
        Qiu et al. 2025, Demons in the Detail. arXiv:2501.11873.
    """
    num_choices = all_reduce(counts.sum(), axis)
    seen_share = seen.to(scores.dtype) / seen.sum().clamp(min=1)
    return (
        scores.shape[1] * topk * (seen_share * scores.sum(0)).sum() / num_choices.clamp(min=1)
    )


def _balance(
    sums: Float[Tensor, "*B E"],
    counts: Int[Tensor, "*B E"],
    num_choices: Int[Tensor, "..."],
    topk: int,
) -> Float[Tensor, ""]:
    # f_e = counts / num_choices and P_e = sums / (num_choices / topk), with num_choices / topk
    # the number of tokens; the clamp gives 0 instead of NaN without tokens.
    num_choices = num_choices.clamp(min=1).to(sums.dtype)
    shares = counts.to(sums.dtype) / num_choices
    return sums.shape[-1] * topk * (shares * sums / num_choices).sum()


def z_loss(
    logits: Float[Tensor, "T E"], mask: Bool[Tensor, " T"] | None = None, axis: Axis = SINGLE
) -> Float[Tensor, ""]:
    """Return this rank's share of the mean square of the log of the softmax denominator.

    All-reduces the number of tokens over ``axis``.

    Args:
        logits: of the router.
        mask: true for tokens that count.
        axis: ranks that share the micro-batch (tp x cp).

    Reference:
        Zoph et al. 2022, ST-MoE, eq. 5. arXiv:2202.08906.
    """
    if mask is None:
        mask = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    num_tokens = all_reduce(mask.sum(), axis).clamp(min=1)
    upcast = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (upcast.logsumexp(1).square() * mask).sum() / num_tokens


def updated_expert_bias(
    bias: Float[Tensor, "*L E"], counts: Int[Tensor, "*L E"], rate: float
) -> Float[Tensor, "*L E"]:
    """Return the expert bias after a step: increased below the mean load, decreased above.

    Counts are compared with their mean in integers, so the comparison is exact.

    Args:
        bias: added to the scores for the choice only.
        counts: choices of the whole step's tokens, all ranks.
        rate: amount of the change; an expert exactly at the mean keeps its bias.

    Reference:
        Wang et al. 2024, Auxiliary-Loss-Free Load Balancing, algorithm 1. arXiv:2408.15664.
    """
    gap = counts.sum(-1, keepdim=True) - counts * counts.shape[-1]
    return bias + rate * gap.sign().to(bias.dtype)


def sinkhorn(
    logits: Float[Tensor, "T E"],
    axis: Axis = SINGLE,
    tolerance: float = 1e-4,
    mask: Bool[Tensor, " T"] | None = None,
) -> Float[Tensor, "T E"]:
    """Return exp(logits), with rows and columns scaled to equal sums; no gradient.

    All-reduces column sums over ``axis`` in every iteration, and the host waits for the change
    of the factors.

    Args:
        logits: of the router.
        axis: ranks that share the micro-batch (tp x cp).
        tolerance: the iteration ends when the columns' factors change by less on average.
        mask: true for tokens that count; None: all tokens count.

    Returns:
        A matrix whose rows sum to 1/T for the T tokens that count, and to 0 for others; its
        columns sum to nearly 1/E.

    Reference:
        Sinkhorn 1967; Clark et al. 2022, section 3.3. arXiv:2202.01169.
    """
    with torch.no_grad():
        upcast = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if mask is None:
            mask = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
        cost = upcast.exp().where(mask[:, None], 0)
        num_tokens = all_reduce(mask.sum(), axis).clamp(min=1).to(cost.dtype)
        rows, columns = cost.new_ones(cost.shape[0]), cost.new_ones(cost.shape[1])
        change = float("inf")
        while change > tolerance:
            rows = 1 / (num_tokens * ((cost * columns).sum(1) + 1e-8))
            sums = all_reduce((cost * rows[:, None]).sum(0), axis)
            new_columns = 1 / (cost.shape[1] * (sums + 1e-8))
            change = (new_columns - columns).abs().mean().item()
            columns = new_columns
        return cost * columns * rows[:, None]
