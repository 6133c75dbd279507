"""Routing as pure functions: from logits to k experts and their weights for each token.

Scores and weights are float32, or float64 if the logits are. Of equal scores the expert with
the lower number is chosen, on every device.
"""

from dataclasses import dataclass, replace
from math import gcd

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mcore_moe.config import MoEConfig, expert_capacity
from mcore_moe.dispatch.permutation import within_capacity
from mcore_moe.kernels.topk import top_experts


@dataclass(frozen=True, slots=True)
class Routing:
    """Chosen experts of each token, best first, and the weights of their outputs."""

    ids: Int[Tensor, "T k"]
    probs: Float[Tensor, "T k"]
    keep: Bool[Tensor, "T k"] | None = None
    """Choices that an expert computes; None: all. Dropped choices add nothing to the output."""


def expert_scores(logits: Float[Tensor, "T E"], score_function: str) -> Float[Tensor, "T E"]:
    """Return non-negative scores of all experts, float32 or wider.

    Args:
        logits: of the router.
        score_function: ``softmax`` or ``sparsemixer`` (rows sum to 1), ``sigmoid`` or
            ``sqrtsoftplus`` (elementwise).

    Raises:
        ValueError: if the score function is another one.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if score_function in ("softmax", "sparsemixer"):
        return logits.softmax(-1)
    if score_function == "sigmoid":
        return logits.sigmoid()
    if score_function == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    raise ValueError(
        f"unknown score function {score_function!r}: use softmax, sparsemixer, sigmoid or "
        "sqrtsoftplus, or add a branch to expert_scores."
    )


def route(
    logits: Float[Tensor, "T E"],
    config: MoEConfig,
    expert_bias: Float[Tensor, " E"] | None = None,
    ids: Int[Tensor, "T k"] | None = None,
) -> Routing:
    """Choose the experts of each token and their weights.

    Args:
        logits: of the router.
        config: score function, top-k, groups and scaling.
        expert_bias: added to the scores for the choice only, not to the weights; with softmax
            added to the softmax over all experts.
        ids: chosen experts; None: choose by score.

    Reference:
        Softmax after the choice: Jiang et al. 2024, Mixtral, arXiv:2401.04088. Sigmoid, bias
        and groups: DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2, arXiv:2412.19437.
    """
    if config.moe_router_score_function == "sparsemixer":
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        ids = top_experts(scores, 2) if ids is None else ids
        probs = _sparse_mixer_weights(scores, ids, config.moe_router_sparsemixer_eps)
        return Routing(ids, scale_weights(probs, config))
    softmax_after = (
        config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax
    )
    if softmax_after:
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    else:
        scores = expert_scores(logits, config.moe_router_score_function)
    if ids is None and expert_bias is not None:
        shares = expert_scores(logits, "softmax") if softmax_after else scores
        ids = _choose(shares + expert_bias, config)
    elif ids is None:
        ids = _choose(scores, config)
    probs = scores.gather(1, ids)
    if softmax_after:
        probs = probs.softmax(-1)
    elif (
        config.moe_router_score_function != "softmax"
        and config.moe_router_norm_topk_prob
        and config.moe_router_topk > 1
    ):
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    return Routing(ids, scale_weights(probs, config))


def scale_weights(probs: Float[Tensor, "T k"], config: MoEConfig) -> Float[Tensor, "T k"]:
    """Return the weights times the config's factor."""
    factor = config.moe_router_topk_scaling_factor
    return probs * factor if factor else probs


def balanced_ids(
    num_tokens: int, config: MoEConfig, device: torch.device
) -> Int[Tensor, "T k"]:
    """Return choices that give every expert equally many tokens, independent of scores.

    Consecutive choices are ``balanced_stride`` experts apart, so that the experts of a token
    are on at least as many ranks as with random choices.
    """
    topk, num_experts = config.moe_router_topk, config.num_experts
    choices = torch.arange(num_tokens * topk, device=device).view(num_tokens, topk)
    return choices * balanced_stride(num_experts) % num_experts


def balanced_stride(num_experts: int) -> int:
    """Return the stride nearest to the golden section that visits all experts.

    The stride is not 1 or -1, except with 2, 3, 4 or 6 experts, where no other stride visits
    all experts.
    """
    golden = round(0.618 * num_experts)
    by_distance = (golden + step * side for step in range(num_experts) for side in (1, -1))
    strides = (n for n in by_distance if 1 < n < num_experts - 1 and gcd(n, num_experts) == 1)
    return next(strides, max(1, num_experts - 1))


def limit_to_capacity(
    routing: Routing, config: MoEConfig, mask: Bool[Tensor, " T"] | None = None
) -> Routing:
    """Return the routing with ``keep`` set to choices of real tokens within the capacity.

    Every rank limits the choices of its own tokens; no communication.

    Args:
        routing: with all choices.
        config: capacity and drop policy.
        mask: true for real tokens; None: all tokens are real.
    """
    factor, ids = config.moe_expert_capacity_factor, routing.ids
    keep = None if mask is None else mask[:, None].expand_as(ids)
    if factor:
        # Padding counts for no expert.
        real_ids = ids if keep is None else ids.where(keep, config.num_experts)
        capacity = expert_capacity(ids.shape[0], config.num_experts, ids.shape[1], factor)
        fits = within_capacity(
            real_ids, routing.probs, config.num_experts, capacity, config.moe_token_drop_policy
        )
        keep = fits if keep is None else fits & keep
    return replace(routing, keep=keep)


def _sparse_mixer_weights(
    scores: Float[Tensor, "T E"], ids: Int[Tensor, "T 2"], eps: float
) -> Float[Tensor, "T 2"]:
    """Return the weights of the best and of the second-best expert.

    Each weight is a share of a softmax over the candidates with scores near the best candidate;
    the second softmax is without the best expert. Unlike Phi-3.5, training samples no experts.

    Reference:
        Liu et al. 2024, GRIN, arXiv:2409.12136, section 2.2 (SparseMixer-v2).
    """
    others = scores.scatter(1, ids[:, :1], float("-inf"))
    weights = []
    for rank, candidates in enumerate((scores, others)):
        best = candidates.detach().amax(-1, keepdim=True)
        difference = (best - scores.detach()) / scores.detach().abs().maximum(best)
        near = candidates.masked_fill(difference > 2 * eps, float("-inf"))
        weights.append(near.softmax(-1).gather(1, ids[:, rank : rank + 1]))
    return torch.cat(weights, 1)


def _choose(scores: Tensor, config: MoEConfig) -> Tensor:
    topk, group_topk = config.moe_router_topk, config.moe_router_group_topk
    if not group_topk:
        return top_experts(scores, topk)
    # The score of a group is the sum over its best experts: by default as many as each chosen
    # group contributes on average.
    num_scored = config.moe_router_group_score_topk or topk // group_topk
    grouped = scores.detach().unflatten(1, (config.moe_router_num_groups, -1))
    group_scores = grouped.topk(num_scored, dim=-1).values.sum(-1)
    allowed = torch.zeros_like(group_scores, dtype=torch.bool)
    allowed = allowed.scatter(1, top_experts(group_scores, group_topk), True)
    return top_experts(grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1), topk)
