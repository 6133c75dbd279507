"""A small twin of a run: other sizes, the same layout and the same ways through the code.

What makes one layout differ from another stays: degrees of parallelism, which numbers
divide which (heads and groups by tensor ranks, experts by expert ranks, layers by stages,
micro-batches by stages), switches, precision, recomputation, optimizer. Widths, lengths and
counts shrink until eight ranks train it on two CPU cores in seconds. Pure: no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, lcm

from mcore_data.config import DataConfig, TokenizerConfig
from mcore_models.config import RecomputeConfig
from mcore_parallel.config import DataParallelConfig, ParallelConfig, PipelineConfig
from mcore_parallel.layout import build_grids
from mcore_parallel.logical_tensors import moe_layers
from mcore_train.composition import TrainConfig
from mcore_train.config import (
    BatchConfig,
    EvalConfig,
    LaunchConfig,
    LoadConfig,
    LogConfig,
    OptimizerConfig,
    SaveConfig,
    ScheduleConfig,
)
from mcore_train.layout_check.small_run_sizes import (
    is_global_loss,
    seq_length,
    shrink_experts,
    shrink_model,
    vocab_size,
)
from mcore_train.resolution import Plan

NUM_STEPS = 3
CLIP_GRAD = 0.05
"""Below the norm of any twin's gradient, so that clipping is seen."""
LR = 1e-2
"""Large enough for every weight to move in three steps."""
MOST_LAYERS = 8
"""Layers of a twin, unless there are more stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """A run small enough to compute twice, and in what it differs from the real one."""

    config: TrainConfig
    world_size: int
    notes: tuple[str, ...]
    """What therefore is not checked, one line each."""


def smallest_world(config: TrainConfig) -> int:
    """Return the fewest ranks of the layout with two or more data ranks and all instances."""
    parallel = config.parallelism
    dense = (
        parallel.tensor_model_parallel_size
        * parallel.context_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    expert = (
        (parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size)
        * parallel.expert_model_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    instances = parallel.num_distributed_optimizer_instances
    return lcm(dense * lcm(2, instances), expert * instances)


def build_twin(plan: Plan, max_ranks: int) -> Twin:
    """Shrink a run that can be resolved to at most ``max_ranks`` ranks.

    Args:
        plan: of the real run.
        max_ranks: of the twin; degrees above are halved, but none that splits vanishes.

    Raises:
        ValueError: if the layout needs more ranks than that with all its axes split.
    """
    config = plan.config
    parallel, world_size = _shrink_layout(config.parallelism, plan.world_size, max_ranks)
    num_stages, layers = _keep_layers(plan, parallel)
    num_layers = sum(map(len, layers))
    model = shrink_model(plan, parallel, num_layers)
    twin = replace(
        config,
        model=model,
        experts=shrink_experts(config, parallel, layers),
        batch=_shrink_batch(plan, parallel, world_size),
        optimizer=_shrink_optimizer(config.optimizer),
        schedule=ScheduleConfig(),
        recomputation=_shrink_recompute(config.recomputation, num_layers // num_stages),
        parallelism=parallel,
        data_parallelism=_shrink_buckets(config.data_parallelism),
        pipeline=_shrink_pipeline(plan, parallel, layers),
        tokenizer=TokenizerConfig(vocab_size=vocab_size(plan, model, parallel)),
        data=DataConfig(
            mock_data=True,
            num_workers=0,
            reset_position_ids=config.data.reset_position_ids,
            reset_attention_mask=config.data.reset_attention_mask,
            dataloader_inter_document_masking=config.data.dataloader_inter_document_masking,
        ),
        evaluation=EvalConfig(),
        saving=SaveConfig(),
        loading=LoadConfig(),
        logging=LogConfig(),
        run=replace(
            config.run,
            exit_interval=0,
            exit_duration_in_mins=0.0,
            cuda_graph_warmup_steps=1,  # so that a graph is recorded, and launched again
        ),
        launch=LaunchConfig(),
    )
    return Twin(
        config=twin, world_size=world_size, notes=tuple(_notes(plan, parallel, world_size))
    )


def _shrink_layout(
    parallel: ParallelConfig, world_size: int, max_ranks: int
) -> tuple[ParallelConfig, int]:
    """Halve degrees, data ranks first, until the world fits; what splits goes on splitting."""
    tp, cp, pp = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
    degrees = {"dp": world_size // (tp * cp * pp), "cp": cp, "tp": tp, "pp": pp}
    while (world := _product(degrees)) > max_ranks:
        name = next((n for n in degrees if degrees[n] > 2 and n == "dp"), "")
        name = name or max(degrees, key=lambda n: degrees[n])
        least = _least_factor(degrees[name])
        if degrees[name] // least < 2:
            raise ValueError(
                f"the layout splits over {_product(degrees)} ranks at least, two on each axis: "
                f"give --max-ranks {world}."
            )
        degrees[name] //= least
    shrunk = replace(
        parallel,
        tensor_model_parallel_size=degrees["tp"],
        context_parallel_size=degrees["cp"],
        pipeline_model_parallel_size=degrees["pp"],
        nccl_communicator_config_path="",  # changes when numbers come, not which
    )
    return _shrink_experts(shrunk, parallel, world, world_size), world


def _shrink_experts(
    shrunk: ParallelConfig, before: ParallelConfig, world: int, world_size: int
) -> ParallelConfig:
    """Choose degrees of experts and optimizer instances that the smaller world has room for.

    Where only one of the two can split, experts do. Under orders of ranks that do not end in
    pp, only some degrees give dense and expert layers the same pipelines.
    """
    tp, outside = (
        shrunk.tensor_model_parallel_size,
        world // shrunk.pipeline_model_parallel_size,
    )
    given = before.expert_tensor_parallel_size
    kept = tp if given == before.tensor_model_parallel_size else gcd(given, outside)
    expert_tp = kept if given else 0
    room = outside // (expert_tp or tp)
    data_ranks = outside // tp
    instances = gcd(before.num_distributed_optimizer_instances, data_ranks, room)
    ep = before.expert_model_parallel_size
    for wanted in (gcd(ep, room // instances), gcd(ep, room), *range(room, 1, -1)):
        if room % wanted or (wanted == 1) != (ep == 1):
            continue
        fitting = replace(
            shrunk,
            expert_tensor_parallel_size=expert_tp,
            expert_model_parallel_size=wanted,
            num_distributed_optimizer_instances=gcd(instances, room // wanted),
        )
        if _is_layout(fitting, world):
            return fitting
    raise ValueError(
        f"no layout of {world} ranks splits experts as this one does: give --max-ranks "
        f"{world_size}."
    )


def _is_layout(parallel: ParallelConfig, world_size: int) -> bool:
    try:
        build_grids(parallel, world_size)
    except ValueError:
        return False
    return True


def _keep_layers(plan: Plan, parallel: ParallelConfig) -> tuple[int, list[list[int]]]:
    """Choose which of the real layers stay, stage by stage: one or two of each stage.

    A second layer is of the other kind (experts or none) where the stage has both.
    """
    kinds = moe_layers(plan.config.experts, plan.config.model.num_layers)
    stages = plan.stages
    num_stages = parallel.pipeline_model_parallel_size * (
        plan.config.pipeline.num_virtual_stages_per_pipeline_rank
    )
    if num_stages != len(stages):
        stages = stages[: num_stages - 1] + stages[-1:]
    most = max(1, min(2, MOST_LAYERS // num_stages))
    counts = {len(stage.layers) for stage in stages if stage.layers}
    kept = []
    for stage in stages:
        own = list(stage.layers)
        first = own[:1]
        second = [i for i in own[1:] if kinds[i] != kinds[own[0]]][:1] or own[1:2]
        has_two = len(own) > min(counts) if len(counts) > 1 else most == 2
        kept.append(first + (second if has_two else []))
    return num_stages, kept


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
    micro = min(plan.config.batch.micro_batch_size, 2)
    data_ranks = world_size // (
        parallel.tensor_model_parallel_size * parallel.context_parallel_size * pp
    )
    return BatchConfig(
        micro_batch_size=micro,
        global_batch_size=micro * data_ranks * kept,
        seq_length=seq_length(parallel),
        train_iters=NUM_STEPS,
    )


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
    spelled = ""
    if not is_even:
        segments = ["t" * len(stage) for stage in layers]
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


def _shrink_recompute(recompute: RecomputeConfig, layers_per_stage: int) -> RecomputeConfig:
    count = min(recompute.recompute_num_layers, max(1, layers_per_stage))
    return replace(recompute, recompute_num_layers=count)


def _shrink_buckets(config: DataParallelConfig) -> DataParallelConfig:
    """Make several buckets where the real run has several."""
    has_many = (
        config.ddp_bucket_size or config.overlap_grad_reduce or config.overlap_param_gather
    )
    return replace(config, ddp_bucket_size=2000 if has_many else 0)


def _notes(plan: Plan, parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """Say what the twin leaves out."""
    config = plan.config
    yield "sizes: the twin is small; overflow, memory and speed at full size"
    yield "your data, tokenizer and learning-rate schedule: made-up rows, a constant rate"
    if world_size != plan.world_size or parallel != config.parallelism:
        yield (
            f"degrees: {describe_layout(config.parallelism, plan.world_size)} shrank to "
            f"{describe_layout(parallel, world_size)}"
        )
    if parallel.pipeline_model_parallel_size != config.parallelism.pipeline_model_parallel_size:
        yield "the real split of layers: stages in the middle were left out"
    if config.model.hidden_dropout or config.model.attention_dropout:
        yield "dropout: its masks differ between layouts by design, so it is off"
    if config.experts.num_experts and config.experts.moe_expert_capacity_factor:
        yield "dropping of tokens over capacity: it depends on the ranks by design"
    if config.experts.num_experts and is_global_loss(config.experts):
        yield (
            "the global balancing loss: what it has seen of a step before a micro-batch "
            "depends on the data ranks by design, so aux_loss stands in"
        )
    if config.experts.num_experts and config.experts.moe_input_jitter_eps:
        yield "router jitter: it is random on each rank, so it is off"


def describe_layout(parallel: ParallelConfig, world_size: int) -> str:
    """Name the degrees above 1: ``8 ranks: tp2 pp2 dp2 sp``."""
    tp, cp, pp = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
    degrees = {
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "dp": world_size // (tp * cp * pp),
        "ep": parallel.expert_model_parallel_size,
        "etp": parallel.expert_tensor_parallel_size,
        "instances": parallel.num_distributed_optimizer_instances,
    }
    words = [f"{name}{n}" for name, n in degrees.items() if n > 1]
    words += ["sp"] if parallel.sequence_parallel else []
    return f"{world_size} ranks: {' '.join(words) or 'one after the other'}"


def _product(degrees: dict[str, int]) -> int:
    total = 1
    for degree in degrees.values():
        total *= degree
    return total


def _least_factor(number: int) -> int:
    return next((f for f in range(2, number + 1) if number % f == 0), 1)
