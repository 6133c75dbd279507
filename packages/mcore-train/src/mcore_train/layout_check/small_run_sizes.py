"""Widths, lengths and counts of a small run's model: small, and divided as the real ones are.

Which numbers divide which decides the way through the code: heads and key/value groups by
tensor ranks, experts by expert ranks, vocabulary rows by both padding and tensor ranks.
"""

from dataclasses import replace
from math import lcm
from tempfile import gettempdir
from typing import Any

from mcore_models.config import RecomputeConfig, TransformerConfig, is_local, is_rotated
from mcore_models.layer_patterns import further_letters, join_layers, pattern_layers
from mcore_models.logical_tensors import mamba_sizes, moe_layers, num_kv_heads
from mcore_models.qk_clip.config import QKClipConfig
from mcore_moe.config import MoEConfig
from mcore_parallel.config import ParallelConfig
from mcore_parallel.offloading.config import OffloadConfig
from mcore_parallel.precision.config import Fp8Config
from mcore_train.composition import TrainConfig
from mcore_train.layout_check.path_signature import (
    cuts_vectors,
    has_flat_shards,
    has_shared_keys,
    head_relations,
    mamba_relations,
    vector_length,
    vocabulary_rows,
)
from mcore_train.precision_config import PrecisionConfig
from mcore_train.resolution import Plan

HEAD_DIM = 8
LEAST_SEQ_LENGTH = 16
LEAST_VOCAB_SIZE = 48
MOST_GAIN = 0.8
"""Of a matrix on random numbers: with more, wide models multiply every rounding by layers."""
MOST_LOSS_SCALE = 1024.0


def shrink_model(
    plan: Plan, parallel: ParallelConfig, layers: list[list[int]], shards: int
) -> TransformerConfig:
    """Shrink the model for a small run's layout.

    Args:
        plan: of the real run.
        parallel: of the small run.
        layers: of the real run that stay, by stage.
        shards: of the small run's distributed optimizer; 1 without it.
    """
    model = plan.config.model
    heads, groups = _shrink_heads(plan, parallel)
    length = seq_length(plan, parallel)
    own_head_dim = model.kv_channels and model.kv_channels * model.num_attention_heads != (
        model.hidden_size
    )
    fp8 = plan.config.fp8
    is_fp8 = bool(fp8.fp8_format)
    channels = fp8_multiple(fp8) if is_fp8 else HEAD_DIM
    if shards > 1 and cuts_vectors(plan):
        channels *= -(-(vector_length(shards) + 1) // (channels * heads))
    is_flat = shards > 1 and has_flat_shards(plan)
    if is_flat and heads * channels & (heads * channels - 1) == 0:
        channels += channels // 2  # a border falls inside no row whose width is a power of two
    pairs = int(channels * model.rotary_percent) // 2
    return replace(
        model,
        num_layers=sum(map(len, layers)),
        num_attention_heads=heads,
        num_query_groups=groups if model.num_query_groups else 0,
        kv_channels=channels if model.kv_channels else 0,
        hidden_size=heads * channels + (16 if own_head_dim else 0),
        ffn_hidden_size=((3 * channels if is_flat else channels) if is_fp8 else 12)
        * parallel.tensor_model_parallel_size,
        max_position_embeddings=length if model.max_position_embeddings else 0,
        mtp_num_layers=mtp_layers(model),
        q_lora_rank=channels if model.q_lora_rank else 0,
        kv_lora_rank=channels,
        qk_head_dim=channels,
        qk_pos_emb_head_dim=channels // 2,
        v_head_dim=channels + 2 * (model.v_head_dim != model.qk_head_dim) * (not is_fp8),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        window_size=_shrink_window(plan, length),
        window_attn_skip_freq=shrink_skip_freq(model),
        rope_skip_freq=shrink_rope_freq(model),
        longrope_short_factor=(model.longrope_short_factor * pairs)[:pairs],
        longrope_long_factor=(model.longrope_long_factor * pairs)[:pairs],
        attention_chunk_size=min(model.attention_chunk_size, length // 2),
        init_method_std=min(0.1, MOST_GAIN / (heads * channels) ** 0.5),
        mup_base_hidden_size=4 if model.use_mup else 0,
        embedding_init_method_std=0.0,
        make_vocab_size_divisible_by=_vocab_multiple(plan, parallel),
        **_shrink_recurrent(model, parallel, layers, before=plan.config.parallelism),
    )


def mtp_layers(model: TransformerConfig) -> int:
    """Choose how many layers of multi-token prediction a small run has."""
    return min(model.mtp_num_layers, 2)


def _shrink_recurrent(
    model: TransformerConfig,
    parallel: ParallelConfig,
    layers: list[list[int]],
    before: ParallelConfig,
) -> dict[str, Any]:
    """Keep the letters of layers that stay, and the fewest heads that divide alike."""
    letters = pattern_layers(model.hybrid_override_pattern)
    if not letters:
        return {}
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    wanted = mamba_relations(model.mamba_num_groups, before)
    fitting = [n for n in range(1, 2 * tp * cp + 1) if n % tp == 0 or tp % n == 0]
    groups = min(fitting, key=lambda n: (mamba_relations(n, parallel) != wanted, n))
    sizes = mamba_sizes(model)
    has_several = sizes.heads > sizes.groups
    pattern = join_layers(letters[i] for stage in layers for i in stage)
    further = "/" + further_letters(model.hybrid_override_pattern)
    return {
        "hybrid_override_pattern": pattern + further * mtp_layers(model),
        "mamba_num_groups": groups,
        "mamba_num_heads": lcm(groups, tp * cp) * (2 if has_several else 1),
        "mamba_head_dim": 4,
        "mamba_state_dim": 6,
        "mamba_chunk_size": 4,
        "linear_num_key_heads": tp * cp,
        "linear_num_value_heads": tp * cp * (1 + has_shared_keys(model)),
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
    }


def _shrink_heads(plan: Plan, parallel: ParallelConfig) -> tuple[int, int]:
    """Choose the fewest heads and key/value heads that divide as the real ones do."""
    model, before = plan.config.model, plan.config.parallelism
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    wanted = head_relations(model.num_attention_heads, num_kv_heads(model), before)
    candidates = sorted(
        (kept * per_group, kept)
        for kept in range(1, 4 * tp * cp + 1)
        for per_group in range(1, tp * cp + 2)
        if kept * per_group % tp == 0 and (kept % tp == 0 or tp % kept == 0)
    )

    def unlike(heads: int, groups: int) -> tuple[bool, int]:
        ways = head_relations(heads, groups, parallel)
        missed = [way for way in wanted if ways.get(way) != wanted[way]]
        return "query heads over context ranks" in missed, len(missed)

    return min(candidates, key=lambda pair: (*unlike(*pair), *pair))


def _shrink_window(plan: Plan, length: int) -> tuple[int, int]:
    model, parallel = plan.config.model, plan.config.parallelism
    before, after = model.window_size
    is_dropped = model.attention_dropout > 0 and parallel.context_parallel_size > 1
    is_dropped &= plan.family.dataset == "gpt"  # encoders gather keys either way
    if before < 0 and is_dropped and parallel.cp_comm_type != "a2a":
        # Without dropout, a window that hides nothing takes dropout's way over context ranks.
        return length, after
    return min(before, length // 2 - 1), after


def shrink_skip_freq(model: TransformerConfig) -> str:
    """Let every second layer see all tokens where some do and some do not."""
    kinds = {is_local(model, layer) for layer in range(model.num_layers)}
    if len(kinds) == 2:
        return "2"
    return "0" if kinds == {True} or model.window_attn_skip_freq == "0" else "1"


def shrink_rope_freq(model: TransformerConfig) -> str:
    """Let every second layer go without rotation where some do and some do not."""
    kinds = {is_rotated(model, layer) for layer in range(model.num_layers)}
    if len(kinds) == 2:
        return "2"
    return "0" if kinds == {True} or model.rope_skip_freq == "0" else "1"


def seq_length(plan: Plan, parallel: ParallelConfig) -> int:
    """Return the shortest sequence that the layout can cut evenly.

    A chunk of a context rank has room for two borders of documents inside.
    """
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    cuts = tp * cp * (2 if cp > 1 else 1)
    if plan.config.fp8.fp8_format:
        cuts = lcm(cuts, fp8_multiple(plan.config.fp8) * cp)
    least = max(LEAST_SEQ_LENGTH, 8 * cp if has_documents(plan.config) else 0)
    return -(-least // cuts) * cuts


def fp8_multiple(fp8: Fp8Config) -> int:
    """Return what sizes of operands on a rank are multiples of, so that GEMMs are in fp8."""
    return 128 if fp8.fp8_recipe == "blockwise" else 16


def has_documents(config: TrainConfig) -> bool:
    """Whether documents of a row do not see each other."""
    data = config.data
    return data.reset_attention_mask or data.dataloader_inter_document_masking


def _vocab_multiple(plan: Plan, parallel: ParallelConfig) -> int:
    """Choose --make-vocab-size-divisible-by: a whole share where a rank has padding alone."""
    tp = parallel.tensor_model_parallel_size
    if tp > 1 and "all padding" in vocabulary_rows(plan):
        return 8 * -(-LEAST_VOCAB_SIZE // (8 * (tp - 1)))
    return min(plan.config.model.make_vocab_size_divisible_by, 8)


def vocab_size(plan: Plan, model: TransformerConfig, parallel: ParallelConfig) -> int:
    """Choose a small vocabulary, whose padding lies on as many kinds of ranks as the real."""
    tp, multiple = parallel.tensor_model_parallel_size, model.make_vocab_size_divisible_by
    rows = vocabulary_rows(plan)
    padding = 3 if "partly padding" in rows else 0
    if "all padding" in rows and tp > 1:
        return (tp - 1) * multiple - padding
    rows = -(-LEAST_VOCAB_SIZE // (multiple * tp)) * multiple * tp
    return rows - min(padding, multiple * tp - 1)


def shrink_qk_clip(options: QKClipConfig) -> QKClipConfig:
    """Lower the threshold to what the scores of a small run pass, so that clipping is seen."""
    return replace(options, qk_clip_threshold=1e-3) if options.qk_clip else options


def shrink_loss_scale(options: PrecisionConfig) -> PrecisionConfig:
    """Begin where the gradients of a small run fit float16; a real run's scale sinks there."""
    if not options.fp16:
        return options
    if options.loss_scale:
        return replace(options, loss_scale=min(options.loss_scale, MOST_LOSS_SCALE))
    least = min(options.min_loss_scale, MOST_LOSS_SCALE)
    first = min(options.initial_loss_scale, MOST_LOSS_SCALE)
    return replace(options, initial_loss_scale=first, min_loss_scale=least)


def shrink_fp8(fp8: Fp8Config, num_layers: int) -> Fp8Config:
    """Keep at most a layer at each end out of fp8, and one in it."""
    first = min(fp8.num_layers_at_start_in_bf16, 1, num_layers - 1)
    last = min(fp8.num_layers_at_end_in_bf16, 1, num_layers - 1 - first)
    if not fp8.first_last_layers_bf16:
        return fp8
    return replace(fp8, num_layers_at_start_in_bf16=first, num_layers_at_end_in_bf16=last)


def shrink_recompute(recompute: RecomputeConfig, layers_per_stage: int) -> RecomputeConfig:
    """Recompute as many of the layers that stay."""
    count = min(recompute.recompute_num_layers, max(1, layers_per_stage))
    return replace(recompute, recompute_num_layers=count)


def shrink_offload(offload: OffloadConfig, least_layers: int) -> OffloadConfig:
    """Leave the run's drive alone, and a layer of each stage on the device."""
    count = min(offload.cpu_offloading_num_layers, max(0, least_layers - 1))
    return replace(
        offload,
        optimizer_offload_dir=gettempdir() if offload.optimizer_offload_dir else "",
        cpu_offloading=count > 0,
        cpu_offloading_num_layers=count,
    )


def shrink_experts(
    config: TrainConfig, parallel: ParallelConfig, layers: list[list[int]]
) -> MoEConfig:
    """Shrink the experts for a small run's layout and the real layers that stay, by stage."""
    experts = config.experts
    if not experts.num_experts:
        return experts
    ep = parallel.expert_model_parallel_size
    letters = pattern_layers(config.model.hybrid_override_pattern)
    kinds_kept = [letters[i] for stage in layers for i in stage] if letters else []
    further = further_letters(config.model.hybrid_override_pattern)
    if letters and not any("E" in kind for kind in (*kinds_kept, further)):
        return MoEConfig()
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
        moe_router_group_score_topk=min(experts.moe_router_group_score_topk, kept_groups),
        moe_router_load_balancing_type=(
            "aux_loss" if is_global_loss(experts) else experts.moe_router_load_balancing_type
        ),
        moe_ffn_hidden_size=16 if experts.moe_experts_dtype else 10 * expert_tp,
        moe_layer_freq="1" if all(kept) else str(kept).replace(" ", ""),
        moe_input_jitter_eps=0.0,
        moe_expert_capacity_factor=0.0,
        moe_pad_expert_input_to_capacity=False,
        moe_latent_size=12 if experts.moe_latent_size else 0,
        moe_shared_expert_intermediate_size=(
            6 * parallel.tensor_model_parallel_size
            if experts.moe_shared_expert_intermediate_size
            else 0
        ),
    )


def is_global_loss(experts: MoEConfig) -> bool:
    """Whether the balancing loss looks at the whole step, which no small run can compare."""
    return experts.moe_router_load_balancing_type == "global_aux_loss"
