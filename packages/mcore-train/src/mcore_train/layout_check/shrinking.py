"""Chooses options of a small run: sizes that the layout divides like the real ones.

Options that no layout divides have a small value in their metadata (``shrinks_to``). Most other
sizes are a fixed number of channels for each rank; the rest are the smallest sizes with the
same ``relations`` as the real ones. No torch.
"""

from dataclasses import fields, replace
from math import lcm
from tempfile import gettempdir
from typing import Any

from mcore_base.options import rules_of
from mcore_ckpt.config import LocalConfig, RetentionConfig
from mcore_data.config import DataConfig, TokenizerConfig
from mcore_models.config import TransformerConfig, is_rotated
from mcore_models.encoder_config import T5Config, encoder_layers
from mcore_models.layer_patterns import further_letters, is_local, join_layers, pattern_layers
from mcore_models.logical_tensors import mamba_sizes, moe_layers, num_kv_heads
from mcore_parallel.config import ParallelConfig
from mcore_parallel.pipeline_parallel.stages import Stage
from mcore_train.composition import flat, parts
from mcore_train.config import (
    EvalConfig,
    LaunchConfig,
    LoadConfig,
    LogConfig,
    MemoryConfig,
    SampleConfig,
    SaveConfig,
    ScheduleConfig,
    SpikeConfig,
)
from mcore_train.layout_check.relations import (
    cuts_vectors,
    has_flat_shards,
    head_relations,
    layer_kinds,
    mamba_relations,
    vector_length,
    vocabulary_rows,
)
from mcore_train.objectives.config import (
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    ObjectiveConfig,
)
from mcore_train.resolution import Plan

NUM_STEPS = 3
MOST_LAYERS = 8  # of a small run, unless there are more stages
HEAD_DIM = 8
LEAST_SEQ_LENGTH = 16
LEAST_VOCAB_SIZE = 48
SLOT_MULTIPLE = 64  # elements: where a tensor may begin in its bucket
MOST_GAIN = 0.8
"""Largest gain of a matrix on random numbers: with more, rounding errors of wide models grow
from layer to layer."""
MOST_LOSS_SCALE = 1024.0
"""Loss scale with which the gradients of a small run fit float16; the scale of a real run sinks
to such values."""

_AT_DEFAULTS = (
    *(ScheduleConfig, TokenizerConfig, DataConfig, EvalConfig, SampleConfig, SaveConfig),
    *(RetentionConfig, LocalConfig, LoadConfig, LogConfig, MemoryConfig, LaunchConfig),
    *(ObjectiveConfig, DPOConfig, DistillationConfig, GRPOConfig),
    SpikeConfig,
)
"""Parts of a small run that have their defaults: no files, schedule, reports, texts or frozen
models; its objective is pretraining."""


class Shrinking:
    """Options of a small run by topic; each public method returns some options by name."""

    def __init__(self, plan: Plan, layout: ParallelConfig, world_size: int) -> None:
        self.plan, self.config, self.model = plan, plan.config, plan.config.model
        self.layout, self.before = layout, plan.config.parallelism
        self.tp, self.cp, self.pp = (
            layout.tensor_model_parallel_size,
            layout.context_parallel_size,
            layout.pipeline_model_parallel_size,
        )
        self.expert_tp = layout.expert_tensor_parallel_size or self.tp
        self.data_ranks = world_size // (self.tp * self.cp * self.pp)
        self.shards = 1  # ranks that share one instance of the optimizer
        if self.config.data_parallelism.sharding != "no_shard":
            instances = layout.num_distributed_optimizer_instances
            self.shards = self.data_ranks * self.cp // instances
        self.kept_layers = _keep_layers(plan, layout)
        self.flat_layers = [layer for stage in self.kept_layers for layer in stage]
        self.heads, self.groups = self._fewest_heads()
        self.channels = self._head_channels()
        self.seq_length = self._shortest_sequence()

    def constants(self) -> dict[str, Any]:
        """Return active options with the small values of their metadata."""
        real = flat(self.config)
        return {
            name: rule.shrinks_to
            for part in parts(self.config)
            for name, rule in rules_of(type(part)).items()
            if rule.shrinks_to is not ... and real[name]
        }

    def layers(self) -> dict[str, Any]:
        """Return the kinds of the kept layers, spelled out layer by layer."""
        model, experts = self.model, self.config.experts
        chosen: dict[str, Any] = {
            "num_layers": len(self.flat_layers),
            "mtp_num_layers": min(model.mtp_num_layers, 2),
            "window_attn_skip_freq": _window_skip_freq(model),
            "rope_skip_freq": _rope_skip_freq(model),
        }
        if shared := model.num_kv_shared_layers:
            first = model.num_layers - shared
            chosen["num_kv_shared_layers"] = sum(i >= first for i in self.flat_layers)
        if shares := model.activation_sparsity_pattern:
            # Half of the gates are cut: of the small run's few gates none may exceed a higher
            # quantile.
            halved = tuple(0.5 * (shares[i] > 0) for i in self.flat_layers)
            chosen["activation_sparsity_pattern"] = halved
        if isinstance(model, T5Config):
            in_encoder = [layer < encoder_layers(model) for layer in self.flat_layers]
            num_encoder, num_decoder = sum(in_encoder), in_encoder.count(False)
            depths = {"encoder_num_layers": num_encoder, "decoder_num_layers": num_decoder}
            chosen |= {"num_layers": 1, **depths}
        if letters := pattern_layers(model.hybrid_override_pattern):
            further = "/" + further_letters(model.hybrid_override_pattern)
            pattern = join_layers(letters[i] for i in self.flat_layers)
            chosen["hybrid_override_pattern"] = pattern + further * chosen["mtp_num_layers"]
        if experts.num_experts:
            has_experts = moe_layers(experts, model.num_layers)
            freq = [int(has_experts[i]) for i in self.flat_layers]
            chosen["moe_layer_freq"] = "1" if all(freq) else str(freq).replace(" ", "")
        return chosen

    def stages(self) -> dict[str, Any]:
        """Return the pipeline stages, spelled out if they are uneven."""
        is_even = len({len(stage) for stage in self.kept_layers}) == 1
        is_apart, spelled = _keeps_mtp_apart(self.plan, self.layout), ""
        if is_apart or not is_even:
            segments = ["t" * len(stage) for stage in self.kept_layers]
            if is_apart:
                segments[-2] += "m" * min(self.model.mtp_num_layers, 2)
            segments[0], segments[-1] = "E" + segments[0], segments[-1] + "L"
            spelled = "|".join(segments)
        return {
            "pipeline_model_parallel_layout": spelled,
            "decoder_first_pipeline_num_layers": 0,
            "decoder_last_pipeline_num_layers": 0,
            "account_for_embedding_in_pipeline_split": False,
            "account_for_loss_in_pipeline_split": False,
            "microbatch_group_size_per_virtual_pipeline_stage": self._group_size(),
        }

    def vocabulary(self) -> dict[str, Any]:
        """Return a vocabulary whose padding on tensor ranks is of the real kinds."""
        rows = vocabulary_rows(self.plan)
        padding = 3 if "partly padding" in rows else 0
        multiple = min(self.model.make_vocab_size_divisible_by, 8)
        if "all padding" in rows and self.tp > 1:
            # Whole shares of the multiple: the last rank has padding alone.
            multiple = 8 * -(-LEAST_VOCAB_SIZE // (8 * (self.tp - 1)))
            size = (self.tp - 1) * multiple - padding
        else:
            share = multiple * self.tp
            size = _round_up(LEAST_VOCAB_SIZE, share) - min(padding, share - 1)
        return {"make_vocab_size_divisible_by": multiple, "vocab_size": size}

    def heads_and_widths(self) -> dict[str, Any]:
        """Return the fewest heads, and widths that heads and tensor ranks divide."""
        model, channels, length = self.model, self.channels, self.seq_length
        width = model.kv_channels * model.num_attention_heads
        has_own_width = bool(model.kv_channels) and width != model.hidden_size
        is_fp8 = bool(self.config.fp8.fp8_format)
        ffn = 12
        if is_fp8:
            ffn = 3 * channels if self._has_flat_shards else channels
        pairs = max(1, int(channels * model.rotary_percent) // 2)
        has_share = model.position_embedding_type == "rope" and model.rotary_percent != 1
        # A whole number of pairs, which the published share may not give at this width.
        share = 2 * pairs / channels if has_share else model.rotary_percent
        return {
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups if model.num_query_groups else 0,
            "kv_channels": channels if model.kv_channels else 0,
            "rotary_percent": share,
            "global_kv_channels": 2 * channels if model.global_kv_channels else 0,
            "global_num_query_groups": self.groups if model.global_num_query_groups else 0,
            "hidden_size": self.heads * channels + 16 * has_own_width,
            "ffn_hidden_size": ffn * self.tp,
            "max_position_embeddings": length if model.max_position_embeddings else 0,
            "q_lora_rank": channels if model.q_lora_rank else 0,
            "kv_lora_rank": channels,
            "qk_head_dim": channels,
            "qk_pos_emb_head_dim": channels // 2,
            "v_head_dim": channels + 2 * (model.v_head_dim != model.qk_head_dim and not is_fp8),
            "window_size": self._window(),
            "attention_chunk_size": min(model.attention_chunk_size, length // 2),
            "longrope_short_factor": (model.longrope_short_factor * pairs)[:pairs],
            "longrope_long_factor": (model.longrope_long_factor * pairs)[:pairs],
            "init_method_std": min(0.1, MOST_GAIN / (self.heads * channels) ** 0.5),
        }

    def recurrent_heads(self) -> dict[str, Any]:
        """Return the fewest heads of Mamba and delta layers with the real relations."""
        model, tp, cp = self.model, self.tp, self.cp
        if not model.hybrid_override_pattern:
            return {}
        real_relations = mamba_relations(model.mamba_num_groups, self.before)
        fitting = [n for n in range(1, 2 * tp * cp + 1) if n % tp == 0 or tp % n == 0]
        groups = min(
            fitting, key=lambda n: (mamba_relations(n, self.layout) != real_relations, n)
        )
        real = mamba_sizes(model)
        shared_keys = model.linear_num_value_heads > model.linear_num_key_heads
        return {
            "mamba_num_groups": groups,
            "mamba_num_heads": lcm(groups, tp * cp) * (1 + (real.heads > real.groups)),
            "linear_num_key_heads": tp * cp,
            "linear_num_value_heads": tp * cp * (1 + shared_keys),
        }

    def experts(self) -> dict[str, Any]:
        """Return the fewest experts with a choice, in two groups if there are groups."""
        experts = self.config.experts
        if not experts.num_experts:
            return {}
        pattern = self.model.hybrid_override_pattern
        letters = pattern_layers(pattern)
        kept_letters = [letters[i] for i in self.flat_layers] if letters else []
        if letters and not any(
            "E" in kind for kind in (*kept_letters, further_letters(pattern))
        ):
            return {"num_experts": 0}  # none of the layers that stay
        ep = self.layout.expert_model_parallel_size
        per_rank = experts.num_experts // self.before.expert_model_parallel_size
        topk, groups = min(experts.moe_router_topk, 2), min(experts.moe_router_num_groups, 2)
        number = ep * min(per_rank, 2)
        is_choice = experts.moe_router_topk < experts.num_experts
        while number < topk + is_choice or (
            groups and (number % groups or number // groups < topk)
        ):
            number += ep
        kept_groups = min(experts.moe_router_group_topk, 1)
        shared = 6 * self.tp if experts.moe_shared_expert_intermediate_size else 0
        balancing = experts.moe_router_load_balancing_type
        return {
            "num_experts": number,
            "moe_router_topk": topk,
            "moe_router_num_groups": groups,
            "moe_router_group_topk": kept_groups,
            "moe_router_group_score_topk": min(
                experts.moe_router_group_score_topk, kept_groups
            ),
            "moe_router_load_balancing_type": (
                "aux_loss" if balancing == "global_aux_loss" else balancing
            ),
            "moe_ffn_hidden_size": 16 if experts.moe_experts_dtype else 10 * self.expert_tp,
            "moe_shared_expert_intermediate_size": shared,
        }

    def batch(self) -> dict[str, Any]:
        """Return micro-batches with the real relation to stages, and three steps."""
        batch = self.config.batch
        micro, length = min(batch.micro_batch_size, 2), self.seq_length
        size = micro * self.data_ranks * self._num_microbatches()
        chosen: dict[str, Any] = {
            "micro_batch_size": micro,
            "seq_length": length,
            "global_batch_size": size,
            "train_iters": NUM_STEPS,
            "train_samples": 0,
        }
        if self.config.optimizer.optimizer == "schedule_free":  # refuses other schedules
            chosen["lr_decay_style"] = "constant"
        if batch.seq_length_schedule:  # one step of halves, then whole rows
            chosen["seq_length_schedule"] = f"0:{length // 2} {length}:{length}"
        if batch.step_batch_size_schedule:  # the same sizes as under a ramp
            chosen |= {
                "global_batch_size": 2 * size,
                "step_batch_size_schedule": f"0:{size} {size * length}:{2 * size}",
                "train_iters": 0,
                "train_samples": size + (NUM_STEPS - 1) * 2 * size,
            }
        if batch.rampup_batch_size:  # one step of the first size, the others of twice that
            chosen |= {
                "global_batch_size": 2 * size,
                "rampup_batch_size": (size, size, size),
                "train_iters": 0,
                "train_samples": size + (NUM_STEPS - 1) * 2 * size,
            }
        if isinstance(self.model, T5Config):  # half the encoder's tokens, or as many
            half = length // 2
            chosen["decoder_seq_length"] = half if half % self._cuts == 0 else 2 * half
        return chosen

    def buckets(self) -> dict[str, Any]:
        """Return a bucket size with several buckets if the real run has several.

        Shard borders fall into vectors: with sequence parallelism vectors have buckets of their
        own, and a border falls into the middle one of three; otherwise each vector has a
        bucket.
        """
        options = self.config.data_parallelism
        if options.is_fully_sharded:
            return {}
        hidden_size = self.heads_and_widths()["hidden_size"]
        has_many = (
            options.ddp_bucket_size
            or options.overlap_grad_reduce
            or options.overlap_param_gather
        )
        size = 2000 if has_many else 0
        if self.shards > 1 and self.before.sequence_parallel:
            size = 2 * _round_up(hidden_size, SLOT_MULTIPLE) + 1
        elif self.shards > 1:
            size = hidden_size
        return {"ddp_bucket_size": size}

    def shares_of_layers(self) -> dict[str, Any]:
        """Return the counts of layers without fp8, recomputed and offloaded."""
        depth, fp8 = len(self.flat_layers), self.config.fp8
        offload = self.config.offloading
        chosen: dict[str, Any] = {
            "recompute_num_layers": min(
                self.config.recomputation.recompute_num_layers,
                max(1, depth // len(self.kept_layers)),
            )
        }
        if fp8.first_last_layers_bf16:  # at most one at each end, and one layer in fp8
            first = min(fp8.num_layers_at_start_in_bf16, 1, depth - 1)
            last = min(fp8.num_layers_at_end_in_bf16, 1, depth - 1 - first)
            chosen["num_layers_at_start_in_bf16"] = first
            chosen["num_layers_at_end_in_bf16"] = last
        if offload.cpu_offloading:  # one layer of each stage stays on the device
            least = min(map(len, self.kept_layers))
            count = min(offload.cpu_offloading_num_layers, max(0, least - 1))
            chosen |= {"cpu_offloading": count > 0, "cpu_offloading_num_layers": count}
        return chosen

    def thresholds(self) -> dict[str, Any]:
        """Return loss scales without overflow, and a QK-clip threshold that clips."""
        chosen: dict[str, Any] = {}
        if self.config.precision.fp16:
            for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
                chosen[name] = min(getattr(self.config.precision, name), MOST_LOSS_SCALE)
        if self.config.qk_clipping.qk_clip:
            chosen["qk_clip_threshold"] = 1e-3
        return chosen

    def data_and_rates(self) -> dict[str, Any]:
        """Return synthetic data with the real masks, constant rates, and no files."""
        chosen = {f.name: f.default for part in _AT_DEFAULTS for f in fields(part)}
        for name in (
            *("reset_position_ids", "reset_attention_mask", "full_validation"),
            "dataloader_inter_document_masking",
        ):
            chosen[name] = getattr(self.config.data, name)
        evaluates = self.config.evaluation.interval
        chosen |= {"eval_interval": NUM_STEPS if evaluates else 0, "eval_iters": 1}
        if self.config.offloading.optimizer_offload_dir:
            chosen["optimizer_offload_dir"] = gettempdir()
        return chosen | {
            "mock_data": True,
            "num_workers": 0,
            "min_lr": 0.0,
            "decoupled_min_lr": 0.0,
            # Patterns with numbers name layers that a small model may not have.
            "parameter_groups": tuple(
                entry
                for entry in self.config.parameter_rates.parameter_groups
                if not any(letter.isdigit() for letter in entry.split()[0])
            ),
            "start_weight_decay": -1.0,
            "end_weight_decay": -1.0,
            "weight_decay_incr_style": "constant",
            "embedding_init_method_std": 0.0,
            "check_weight_hash_across_dp_replicas_interval": 0,
            "exit_interval": 0,
            "exit_duration_in_mins": 0.0,
            "nccl_communicator_config_path": "",  # changes when numbers come, not which
        }

    @property
    def _cuts(self) -> int:
        """Number that must divide the tokens of a row."""
        return self.tp * self.cp * (2 if self.cp > 1 else 1)

    @property
    def _has_flat_shards(self) -> bool:
        return self.shards > 1 and has_flat_shards(self.plan)

    def _fewest_heads(self) -> tuple[int, int]:
        """Choose the fewest heads and key/value heads that divide as the real ones do."""
        model, tp, cp = self.model, self.tp, self.cp
        real_relations = head_relations(
            model.num_attention_heads, num_kv_heads(model), self.before
        )
        candidates = sorted(
            (kept * per_group, kept)
            for kept in range(1, 4 * tp * cp + 1)
            for per_group in range(1, tp * cp + 2)
            if kept * per_group % tp == 0 and (kept % tp == 0 or tp % kept == 0)
        )

        def unlike(heads: int, groups: int) -> tuple[bool, int]:
            relations = head_relations(heads, groups, self.layout)
            missed = [
                name for name in real_relations if relations.get(name) != real_relations[name]
            ]
            return "query heads over context ranks" in missed, len(missed)

        return min(candidates, key=lambda pair: (*unlike(*pair), *pair))

    def _head_channels(self) -> int:
        """Choose the width of a head: for fp8 GEMMs, and for shard borders inside rows."""
        channels = self._fp8_multiple() if self.config.fp8.fp8_format else HEAD_DIM
        if self.shards > 1 and cuts_vectors(self.plan):
            least = vector_length(self.shards) + 1
            channels *= -(-least // (channels * self.heads))
        width = self.heads * channels
        if self._has_flat_shards and width & (width - 1) == 0:
            channels += channels // 2  # no border cuts a row whose width is a power of two
        return channels

    def _fp8_multiple(self) -> int:
        """Return the number that must divide operand sizes of a rank for fp8 GEMMs."""
        return 128 if self.config.fp8.fp8_recipe == "blockwise" else 16

    def _shortest_sequence(self) -> int:
        """Choose the shortest sequence that the layout can cut evenly.

        A chunk of a context rank has room for two borders of documents inside.
        """
        cuts, data = self._cuts, self.config.data
        if self.config.fp8.fp8_format:
            cuts = lcm(cuts, self._fp8_multiple() * self.cp)
        is_packed = data.reset_attention_mask or data.dataloader_inter_document_masking
        return _round_up(max(LEAST_SEQ_LENGTH, 8 * self.cp if is_packed else 0), cuts)

    def _window(self) -> tuple[int, int]:
        before, after = self.model.window_size
        is_dropped = self.model.attention_dropout > 0 and self.before.context_parallel_size > 1
        is_dropped &= self.plan.family.dataset == "gpt"  # encoders gather keys either way
        if before < 0 and is_dropped and self.before.cp_comm_type != "a2a":
            # Without dropout, a window that hides nothing takes dropout's branch over
            # context ranks.
            return self.seq_length, after
        least = self.seq_length // 2 - 1
        return min(before, least), min(after, least)

    def _num_microbatches(self) -> int:
        number, before = self.plan.num_microbatches, self.before.pipeline_model_parallel_size
        pp, group = self.pp, self._group_size()
        if pp == 1:
            count = min(number, 2)
        elif group:
            count = 2 * group
        elif number % before == 0:
            count = pp if number == before or pp > 2 else 2 * pp
        else:
            count = min(number, pp + 1)
        options = self.config.pipeline
        if options.pipeline_schedule == "dualpipev" or options.overlap_moe_expert_parallel_comm:
            count = max(count, min(number, 2 * pp))
        return count

    def _group_size(self) -> int:
        """Return micro-batches of an interleaved group: 0, or pipeline ranks plus one."""
        group_size = self.config.pipeline.microbatch_group_size_per_virtual_pipeline_stage
        return 0 if group_size in (0, self.before.pipeline_model_parallel_size) else self.pp + 1


def _keep_layers(plan: Plan, layout: ParallelConfig) -> list[list[int]]:
    """Return the kept layers of each stage: one or two of the real stage.

    Kept layers are of the kinds that the stage has, first of kinds that no earlier stage keeps;
    a single stage keeps one layer of each kind, and so does every stage of a model whose layers
    share keys.
    """
    kinds = layer_kinds(plan)
    stages = plan.stages
    num_stages = layout.pipeline_model_parallel_size * plan.config.pipeline.num_chunks
    if num_stages != len(stages):
        end = 2 if _keeps_mtp_apart(plan, layout) else 1
        # Keep the stage of multi-token prediction, if it is another one, and the last stage.
        last = (*(stage for stage in stages[:-1] if stage.has_mtp), stages[-1])
        stages = stages[: num_stages - end] + last[-end:]
    most = max(1, min(2, MOST_LAYERS // num_stages))
    if num_stages == 1:
        most = max(most, len(set(kinds)))
    counts = {len(stage.layers) for stage in stages if stage.layers}
    kept: list[list[int]] = []
    for stage in stages:
        count = most
        if len(counts) > 1:
            count = 2 if len(stage.layers) > min(counts) else 1
        if plan.config.model.num_kv_shared_layers:
            # Layers that read keys and the layer that computes the keys stay on one stage.
            count = max(count, len({kinds[layer] for layer in stage.layers}))
        before = [layer for layers in kept for layer in layers]
        kept.append(_choose_layers(plan, stage, count, before))
    return kept


def _keeps_mtp_apart(plan: Plan, layout: ParallelConfig) -> bool:
    """Whether multi-token prediction stays on a stage before the loss, then the last but one.

    Of two ranks, the first would hold it on another stage than the embedding.
    """
    is_apart = not plan.stages[-1].has_mtp
    return is_apart and (layout.pipeline_model_parallel_size > 2 or len(plan.stages) == 2)


def _choose_layers(plan: Plan, stage: Stage, count: int, before: list[int]) -> list[int]:
    """Choose layers of a stage, with windows where the small run has them."""
    kinds, chosen, layers = layer_kinds(plan), [], list(stage.layers)
    model = plan.config.model
    skips = {"window_attn_skip_freq": _window_skip_freq(model)}
    small = replace(model, **skips, rope_skip_freq=_rope_skip_freq(model))
    while len(chosen) < min(count, len(layers)):
        position = len(before) + len(chosen)
        small_kind = is_local(small, position), is_rotated(small, position)
        others = () if model.num_kv_shared_layers else before
        here, earlier = ({kinds[layer] for layer in some} for some in (chosen, others))
        chosen.append(
            min(
                (layer for layer in layers if layer not in chosen),
                key=lambda layer: (
                    (is_local(model, layer), is_rotated(model, layer)) != small_kind,
                    kinds[layer] in here,
                    kinds[layer] in earlier,
                    layer,
                ),
            )
        )
    return chosen


def _window_skip_freq(model: TransformerConfig) -> str:
    is_windowed = {is_local(model, layer) for layer in range(model.num_layers)}
    return _skip_freq(is_windowed, model.window_attn_skip_freq)


def _rope_skip_freq(model: TransformerConfig) -> str:
    return _skip_freq(
        {is_rotated(model, layer) for layer in range(model.num_layers)}, model.rope_skip_freq
    )


def _skip_freq(kinds: set[bool], given: str) -> str:
    """Return a pattern that skips every second layer if some of the real layers skip."""
    if len(kinds) == 2:
        return "2"
    return "0" if kinds == {True} or given == "0" else "1"


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
