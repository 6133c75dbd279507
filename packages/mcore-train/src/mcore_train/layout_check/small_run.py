"""A small run that stands for the real one: other sizes, the same ways through the code.

What makes one layout differ from another stays: degrees of parallelism, which numbers divide
which, switches, precision, recomputation, optimizer. Widths, lengths and counts shrink until
eight ranks train it on two CPU cores in seconds. Pure: no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mcore_ckpt.config import LocalConfig, RetentionConfig
from mcore_data.config import DataConfig, TokenizerConfig
from mcore_models.config import TransformerConfig, is_local, is_rotated
from mcore_models.encoder_config import T5Config, encoder_layers
from mcore_models.families import Family
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_parallel.pipeline_parallel.stages import Stage
from mcore_train.checkpoints.origin import start_kind
from mcore_train.composition import TrainConfig
from mcore_train.config import (
    BatchConfig,
    EvalConfig,
    LaunchConfig,
    LoadConfig,
    LogConfig,
    OptimizerConfig,
    SampleConfig,
    SaveConfig,
    ScheduleConfig,
)
from mcore_train.layout_check.path_signature import differences, layer_kinds
from mcore_train.layout_check.small_run_degrees import describe_layout, shrink_layout
from mcore_train.layout_check.small_run_sizes import (
    mtp_layers,
    seq_length,
    shrink_experts,
    shrink_fp8,
    shrink_loss_scale,
    shrink_model,
    shrink_offload,
    shrink_qk_clip,
    shrink_recompute,
    shrink_rope_freq,
    shrink_skip_freq,
    vocab_size,
)
from mcore_train.options.idle_options import without_idle_options
from mcore_train.resolution import Plan, resolve

NUM_STEPS = 3
CLIP_GRAD = 0.05  # below the norm of any small run's gradient, so that clipping is seen
LR = 1e-2  # large enough for every weight to move in three steps
SLOT_MULTIPLE = 64  # elements: where a tensor may begin in its bucket
MOST_LAYERS = 8  # of a small run, unless there are more stages


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallRun:
    """A run small enough to compute twice, and how it differs from the real one."""

    config: TrainConfig
    family: Family
    noisy: TrainConfig | None
    """The same with dropout, router jitter and dropped tokens, which differ between layouts by
    design; None where the real run has none of them."""
    world_size: int
    notes: tuple[str, ...]
    """What therefore is not checked, one line each."""
    start: Literal["", "weights", "run"] = ""
    """What is loaded before the first step, see ``start_kind``: a small run's own files."""
    loading: LoadConfig = field(default_factory=LoadConfig)
    """How the real run loads it."""


def build_small_run(plan: Plan, max_ranks: int) -> SmallRun:
    """Shrink a run that can be resolved to at most ``max_ranks`` ranks.

    Args:
        plan: of the real run.
        max_ranks: of the small run; degrees above are halved, but none that splits vanishes.

    Raises:
        ValueError: if the layout needs more ranks than that with all its axes split.
    """
    config = plan.config
    parallel, world_size = shrink_layout(config.parallelism, plan.world_size, max_ranks)
    num_stages, layers = _keep_layers(plan, parallel)
    shards = _num_shards(config, parallel, world_size)
    num_layers = sum(map(len, layers))
    model = _split_stacks(plan, shrink_model(plan, parallel, layers, shards), layers)
    shrunk = replace(
        config,
        model=model,
        experts=shrink_experts(config, parallel, layers),
        peft=replace(config.peft, lora_dropout=0.0, peft_base_bits=0),
        batch=_shrink_batch(plan, parallel, world_size),
        optimizer=_shrink_optimizer(config.optimizer),
        precision=shrink_loss_scale(config.precision),
        fp8=shrink_fp8(config.fp8, num_layers),
        qk_clipping=shrink_qk_clip(config.qk_clipping),
        schedule=ScheduleConfig(),
        recomputation=shrink_recompute(config.recomputation, num_layers // num_stages),
        offloading=shrink_offload(config.offloading, min(map(len, layers))),
        parallelism=parallel,
        data_parallelism=_shrink_buckets(config, model, shards),
        pipeline=_shrink_pipeline(plan, parallel, layers),
        tokenizer=TokenizerConfig(vocab_size=vocab_size(plan, model, parallel)),
        data=DataConfig(
            mock_data=True,
            num_workers=0,
            reset_position_ids=config.data.reset_position_ids,
            reset_attention_mask=config.data.reset_attention_mask,
            dataloader_inter_document_masking=config.data.dataloader_inter_document_masking,
            full_validation=config.data.full_validation,
        ),
        evaluation=EvalConfig(
            eval_interval=NUM_STEPS if config.evaluation.interval else 0,
            eval_iters=1,
        ),
        samples=SampleConfig(),
        saving=SaveConfig(),
        retention=RetentionConfig(),
        local_saving=LocalConfig(),
        loading=LoadConfig(),
        logging=LogConfig(),
        run=replace(
            config.run,
            check_weight_hash_across_dp_replicas_interval=0,
            exit_interval=0,
            exit_duration_in_mins=0.0,
            cuda_graph_warmup_steps=1,  # so that a graph is recorded, and launched again
        ),
        launch=LaunchConfig(),
    )
    shrunk = without_idle_options(shrunk)  # sizes of parts that this model has not
    small = resolve(shrunk, world_size, family=plan.family)
    return SmallRun(
        config=shrunk,
        family=plan.family,
        noisy=_add_noise(shrunk, config),
        world_size=world_size,
        notes=tuple(_notes(plan, small)),
        start=start_kind(config),
        loading=config.loading,
    )


def _split_stacks(
    plan: Plan, model: TransformerConfig, layers: list[list[int]]
) -> TransformerConfig:
    """Give encoder and decoder as many layers as stay of each."""
    real = plan.config.model
    if not isinstance(model, T5Config) or not isinstance(real, T5Config):
        return model
    kept = [layer < encoder_layers(real) for stage in layers for layer in stage]
    return replace(
        model,
        num_layers=1,
        encoder_num_layers=sum(kept),
        decoder_num_layers=len(kept) - sum(kept),
    )


def _keep_layers(plan: Plan, parallel: ParallelConfig) -> tuple[int, list[list[int]]]:
    """Choose which of the real layers stay, stage by stage: one or two of each stage.

    Those that stay show kinds that the stage has, first what no stage before it shows; one
    stage alone keeps one of each kind.
    """
    kinds = layer_kinds(plan)
    stages = plan.stages
    num_stages = parallel.pipeline_model_parallel_size * plan.config.pipeline.num_chunks
    if num_stages != len(stages):
        end = 2 if _keeps_mtp_apart(plan, parallel) else 1
        stages = stages[: num_stages - end] + _last_stages(stages)[-end:]
    most = max(1, min(2, MOST_LAYERS // num_stages))
    if num_stages == 1:
        most = max(most, len(set(kinds)))
    counts = {len(stage.layers) for stage in stages if stage.layers}
    kept: list[list[int]] = []
    for stage in stages:
        count = most
        if len(counts) > 1:
            count = 2 if len(stage.layers) > min(counts) else 1
        before = [layer for layers in kept for layer in layers]
        kept.append(_choose_layers(plan, list(stage.layers), count, before))
    return num_stages, kept


def _keeps_mtp_apart(plan: Plan, parallel: ParallelConfig) -> bool:
    """Whether multi-token prediction stays on a stage before the loss, then the last but one.

    Of two ranks, the first would hold it on another stage than the embedding.
    """
    is_apart = not plan.stages[-1].has_mtp
    return is_apart and (parallel.pipeline_model_parallel_size > 2 or len(plan.stages) == 2)


def _last_stages(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stage of multi-token prediction, where it is another one, and the last."""
    return (*(stage for stage in stages[:-1] if stage.has_mtp), stages[-1])


def _choose_layers(plan: Plan, layers: list[int], count: int, before: list[int]) -> list[int]:
    """Choose layers of a stage: a window where the small run has one, kinds not seen yet."""
    kinds, chosen = layer_kinds(plan), []
    model = plan.config.model
    small = replace(
        model,
        window_attn_skip_freq=shrink_skip_freq(model),
        rope_skip_freq=shrink_rope_freq(model),
    )
    while len(chosen) < min(count, len(layers)):
        wanted = (
            is_local(small, len(before) + len(chosen)),
            is_rotated(small, len(before) + len(chosen)),
        )
        here, earlier = ({kinds[layer] for layer in some} for some in (chosen, before))
        chosen.append(
            min(
                (layer for layer in layers if layer not in chosen),
                key=lambda layer: (
                    (is_local(model, layer), is_rotated(model, layer)) != wanted,
                    kinds[layer] in here,
                    kinds[layer] in earlier,
                    layer,
                ),
            )
        )
    return chosen


def _shrink_batch(plan: Plan, parallel: ParallelConfig, world_size: int) -> BatchConfig:
    pp, before = parallel.pipeline_model_parallel_size, plan.config.parallelism
    number = plan.num_microbatches
    group = _group_size(plan, parallel)
    if pp == 1:
        kept = min(number, 2)
    elif group:
        kept = 2 * group
    elif number % before.pipeline_model_parallel_size == 0:
        kept = pp if number == before.pipeline_model_parallel_size or pp > 2 else 2 * pp
    else:
        kept = min(number, pp + 1)
    options = plan.config.pipeline
    if options.pipeline_schedule == "dualpipev" or options.overlap_moe_expert_parallel_comm:
        kept = max(kept, min(number, 2 * pp))
    micro = min(plan.config.batch.micro_batch_size, 2)
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    data_ranks = world_size // (tp * cp * pp)
    size = micro * data_ranks * kept
    common = {"micro_batch_size": micro, "seq_length": seq_length(plan, parallel)}
    kind: Any = type(plan.config.batch)
    if kind is not BatchConfig:  # a T5's: the decoder has half the encoder's tokens, or as many
        half = common["seq_length"] // 2
        common["decoder_seq_length"] = half if half % _cuts(parallel) == 0 else 2 * half
    if not plan.config.batch.rampup_batch_size:
        return kind(**common, global_batch_size=size, train_iters=NUM_STEPS)
    # One step of the first size, the others of twice that.
    return kind(
        **common,
        global_batch_size=2 * size,
        rampup_batch_size=(size, size, size),
        train_samples=size + (NUM_STEPS - 1) * 2 * size,
    )


def _cuts(parallel: ParallelConfig) -> int:
    """Say what the tokens of a row must be a multiple of."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    return tp * cp * (2 if cp > 1 else 1)


def _group_size(plan: Plan, parallel: ParallelConfig) -> int:
    """Micro-batches of an interleaved group: 0, or one more than the stages have ranks."""
    given = plan.config.pipeline.microbatch_group_size_per_virtual_pipeline_stage
    if given in (0, plan.config.parallelism.pipeline_model_parallel_size):
        return 0
    return parallel.pipeline_model_parallel_size + 1


def _shrink_pipeline(
    plan: Plan, parallel: ParallelConfig, layers: list[list[int]]
) -> PipelineConfig:
    """Spell the stages out, so that uneven ones stay uneven."""
    given = plan.config.pipeline
    is_even = len({len(stage) for stage in layers}) == 1
    is_apart, spelled = _keeps_mtp_apart(plan, parallel), ""
    if is_apart or not is_even:
        segments = ["t" * len(stage) for stage in layers]
        if is_apart:
            segments[-2] += "m" * mtp_layers(plan.config.model)
        segments[0], segments[-1] = "E" + segments[0], segments[-1] + "L"
        spelled = "|".join(segments)
    return replace(
        given,
        microbatch_group_size_per_virtual_pipeline_stage=_group_size(plan, parallel),
        pipeline_model_parallel_layout=spelled,
        decoder_first_pipeline_num_layers=0,
        decoder_last_pipeline_num_layers=0,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )


def _shrink_optimizer(optimizer: OptimizerConfig) -> OptimizerConfig:
    return replace(
        optimizer,
        lr=LR,
        min_lr=0.0,
        clip_grad=CLIP_GRAD if optimizer.clip_grad else 0.0,
        weight_decay=0.1 if optimizer.weight_decay else 0.0,
        start_weight_decay=-1.0,
        end_weight_decay=-1.0,
        weight_decay_incr_style="constant",
    )


def _num_shards(config: TrainConfig, parallel: ParallelConfig, world_size: int) -> int:
    """Count the ranks that share one instance of the optimizer; 1: each rank has it whole."""
    if config.data_parallelism.sharding == "no_shard":
        return 1
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return world_size // model_ranks // parallel.num_distributed_optimizer_instances


def _shrink_buckets(
    config: TrainConfig, model: TransformerConfig, shards: int
) -> DataParallelConfig:
    """Make several buckets where the real run has several, and shard borders in vectors.

    Under sequence parallelism vectors have buckets of their own: a border falls into the
    middle one of three. Elsewhere each gets a bucket.
    """
    own = config.data_parallelism
    if own.is_fully_sharded:
        return own
    has_many = own.ddp_bucket_size or own.overlap_grad_reduce or own.overlap_param_gather
    size = 2000 if has_many else 0
    if shards > 1 and config.parallelism.sequence_parallel:
        slot = -(-model.hidden_size // SLOT_MULTIPLE) * SLOT_MULTIPLE
        size = 2 * slot + 1
    elif shards > 1:
        size = model.hidden_size
    return replace(own, ddp_bucket_size=size)


def _add_noise(shrunk: TrainConfig, config: TrainConfig) -> TrainConfig | None:
    """Put back what layouts by design do not compute alike."""
    model, experts = config.model, config.experts
    prob = config.peft.lora_dropout
    is_dropping = experts.num_experts and experts.moe_expert_capacity_factor
    is_noisy = experts.num_experts and experts.moe_input_jitter_eps
    has_dropout = model.hidden_dropout or model.attention_dropout or prob
    if not (has_dropout or is_dropping or is_noisy):
        return None
    noisy_model = replace(
        shrunk.model,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
    )
    noisy_experts = replace(
        shrunk.experts,
        moe_input_jitter_eps=experts.moe_input_jitter_eps,
        moe_expert_capacity_factor=experts.moe_expert_capacity_factor,
        moe_pad_expert_input_to_capacity=experts.moe_pad_expert_input_to_capacity,
    )
    peft = replace(shrunk.peft, lora_dropout=prob)
    return replace(shrunk, model=noisy_model, experts=noisy_experts, peft=peft)


BY_DESIGN = {
    "--hidden-dropout": "dropout: its numbers, as masks differ between layouts by design "
    "(which ranks share a mask, and that a continued run goes on with it, is checked)",
    "--attention-dropout": "dropout of attention weights: its numbers, likewise",
    "--lora-dropout": "dropout before adapters: its numbers, likewise",
    "--moe-expert-capacity-factor": "dropping of tokens over capacity: it depends on the ranks "
    "by design",
    "--moe-input-jitter-eps": "router jitter: its numbers, as they are random on each rank",
    "--moe-router-load-balancing-type": "the global balancing loss: what it has seen of a step "
    "before a micro-batch depends on the data ranks by design, so aux_loss stands in",
}
"""Differences that a small run cannot do without, and why."""


def _notes(plan: Plan, small: Plan) -> Iterator[str]:
    """Say what the small run leaves out."""
    before, parallel = plan.config.parallelism, small.config.parallelism
    yield "sizes: the small run is small; overflow, memory and speed at full size"
    yield "your data, tokenizer and learning-rate schedule: made-up rows, a constant rate"
    if start_kind(plan.config):
        yield "the files that --load names: made-up weights of one rank stand in for them"
    if small.world_size != plan.world_size or parallel != before:
        yield (
            f"degrees: {describe_layout(before, plan.world_size)} shrank to "
            f"{describe_layout(parallel, small.world_size)}"
        )
    if parallel.pipeline_model_parallel_size != before.pipeline_model_parallel_size:
        yield "the real split of layers: stages in the middle were left out"
    for what, (way, small_way) in differences(plan, small).items():
        yield BY_DESIGN.get(what) or f"{what}: {way} in the run, {small_way} in the small run"
