"""Widths, lengths and counts of a twin's model: small, and divided as the real ones are.

Which numbers divide which decides the way through the code: heads and key/value groups by
tensor ranks, experts by expert ranks, vocabulary rows by both padding and tensor ranks.
"""

from dataclasses import replace
from math import gcd, lcm

from mcore_models.config import TransformerConfig
from mcore_moe.config import MoEConfig
from mcore_parallel.config import ParallelConfig
from mcore_parallel.logical_tensors import moe_layers, num_kv_heads
from mcore_train.composition import TrainConfig
from mcore_train.resolution import Plan

HEAD_DIM = 8
LEAST_SEQ_LENGTH = 16
LEAST_VOCAB_SIZE = 48


def shrink_model(plan: Plan, parallel: ParallelConfig, num_layers: int) -> TransformerConfig:
    """Shrink the model for a twin's layout; ``num_layers`` of its layers stay."""
    model, before = plan.config.model, plan.config.parallelism
    old_tp, tp = before.tensor_model_parallel_size, parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, num_kv_heads(model)
    per_group = min(2, heads // groups)
    if groups >= old_tp:
        kept = tp * min(2, groups // old_tp)
    else:
        kept = max(1, tp * groups // old_tp)
        per_group = lcm(per_group, tp // kept)
    # All-to-all context parallelism hands whole heads to context ranks.
    cp = parallel.context_parallel_size
    if (heads // old_tp) % before.context_parallel_size == 0:
        per_group = lcm(per_group, tp * cp // gcd(tp * cp, kept))
    if groups >= old_tp and (groups // old_tp) % before.context_parallel_size == 0:
        kept = lcm(kept, tp * cp)
        per_group = min(2, heads // groups)
    length = seq_length(parallel)
    own_head_dim = model.kv_channels and model.kv_channels * heads != model.hidden_size
    window = model.window_size
    return replace(
        model,
        num_layers=num_layers,
        num_attention_heads=kept * per_group,
        num_query_groups=kept if model.num_query_groups else 0,
        kv_channels=HEAD_DIM if model.kv_channels else 0,
        hidden_size=kept * per_group * HEAD_DIM + (16 if own_head_dim else 0),
        ffn_hidden_size=12 * tp,
        max_position_embeddings=length if model.max_position_embeddings else 0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        window_size=(min(window[0], length // 2 - 1), window[1]),
        init_method_std=0.1,
        embedding_init_method_std=0.0,
        make_vocab_size_divisible_by=min(model.make_vocab_size_divisible_by, 8),
    )


def seq_length(parallel: ParallelConfig) -> int:
    """Return the shortest sequence that the layout can cut evenly."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    cuts = tp * cp * (2 if cp > 1 else 1)
    return -(-LEAST_SEQ_LENGTH // cuts) * cuts


def vocab_size(plan: Plan, model: TransformerConfig, parallel: ParallelConfig) -> int:
    """Choose a small vocabulary, padded exactly if the real one is."""
    multiple = model.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size
    rows = -(-LEAST_VOCAB_SIZE // multiple) * multiple
    is_padded = plan.padded_vocab_size != plan.vocab_size
    return rows - min(3, multiple - 1) if is_padded else rows


def shrink_experts(
    config: TrainConfig, parallel: ParallelConfig, layers: list[list[int]]
) -> MoEConfig:
    """Shrink the experts for a twin's layout and the real layers that stay, by stage."""
    experts = config.experts
    if not experts.num_experts:
        return experts
    ep = parallel.expert_model_parallel_size
    kinds = moe_layers(experts, config.model.num_layers)
    kept = [int(kinds[i]) for stage in layers for i in stage]
    per_rank = experts.num_experts // config.parallelism.expert_model_parallel_size
    topk, groups = min(experts.moe_router_topk, 2), min(experts.moe_router_num_groups, 2)
    kept_groups = min(experts.moe_router_group_topk, 1)
    number = ep * min(per_rank, 2)
    is_choice = experts.moe_router_topk < experts.num_experts
    while number < topk + is_choice or (
        groups and (number % groups or number // groups < topk)
    ):
        number += ep
    expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    return replace(
        experts,
        num_experts=number,
        moe_router_topk=topk,
        moe_router_num_groups=groups,
        moe_router_group_topk=kept_groups,
        moe_router_load_balancing_type=(
            "aux_loss" if is_global_loss(experts) else experts.moe_router_load_balancing_type
        ),
        moe_ffn_hidden_size=10 * expert_tp,
        moe_layer_freq="1" if all(kept) else str(kept).replace(" ", ""),
        moe_input_jitter_eps=0.0,
        moe_expert_capacity_factor=0.0,
        moe_pad_expert_input_to_capacity=False,
        moe_shared_expert_intermediate_size=(
            6 * parallel.tensor_model_parallel_size
            if experts.moe_shared_expert_intermediate_size
            else 0
        ),
    )


def is_global_loss(experts: MoEConfig) -> bool:
    """Whether the balancing loss looks at the whole step, which no twin can compare."""
    return experts.moe_router_load_balancing_type == "global_aux_loss"
