"""From a plan to a run: model chunks, gradients, optimizer, schedule and data of one rank."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import cast

import torch
from torch import nn

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_data.tracing.data_plan import Stretch
from mcore_models.kernel_choice import optional_kernels
from mcore_models.kernels.fused_blocks import WIDEST, has_fused_width
from mcore_models.peft.attaching import attach_adapters
from mcore_models.protocol import TrainableModel, share_embedding
from mcore_models.qk_clip.row_factors import track_scores
from mcore_models.stage_model import StageModel
from mcore_parallel.collectives import all_reduce
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.data_parallel.engines import ENGINES, Engine
from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.layer_stacks import layer_stacks
from mcore_parallel.logical_tensors import head_dim
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.offloading.activations import ActivationOffload
from mcore_parallel.optional_kernels import agree_on_kernels
from mcore_parallel.pipeline_parallel.actions import Action, Schedule
from mcore_parallel.pipeline_parallel.forward_backward_overlap import Turns
from mcore_parallel.pipeline_parallel.schedule import build_schedule, forward_only
from mcore_parallel.pipeline_parallel.stages import stages_of_rank
from mcore_parallel.pipeline_parallel.weight_queue import WeightQueue
from mcore_parallel.precision.delayed_scaling import DelayedScales
from mcore_parallel.precision.fp8 import (
    RECIPES,
    LinearGemms,
    WeightCasts,
    delayed_scales,
    layer_gemms,
)
from mcore_parallel.precision.fp8_recipes import Recipe
from mcore_parallel.precision.transformer_engine import refusal
from mcore_parallel.rng import RngStreams
from mcore_parallel.sharding import Shard
from mcore_train.checkpoints.past import continue_plan
from mcore_train.composition import TrainConfig
from mcore_train.datasets import Datasets, load_datasets
from mcore_train.graphs.layers import LayerRecorder
from mcore_train.graphs.recorders import CudaRecorder
from mcore_train.graphs.whole_step import BackwardRecorder
from mcore_train.loss_scaling import LossScaler
from mcore_train.optimizers import OPTIMIZERS, BuildRule, build_optimizer
from mcore_train.options.expert_conflicts import expert_graph_conflicts
from mcore_train.options.implementation_conflicts import find_implementation_conflicts
from mcore_train.precision import check_device_format, torch_dtype
from mcore_train.resolution import Plan, load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """What names of options stand for; a program may give tables with entries of its own."""

    optimizers: Mapping[str, BuildRule] = field(default_factory=lambda: OPTIMIZERS)
    """By ``--optimizer``."""
    recipes: Mapping[str, type[Recipe]] = field(default_factory=lambda: RECIPES)
    """By ``--fp8-recipe``."""
    engines: Mapping[str, Engine] = field(default_factory=lambda: ENGINES)
    """By ``--data-parallel-sharding-strategy``."""


@dataclass(kw_only=True, slots=True)
class Run:
    """Everything that one rank trains with, and how far it has come."""

    plan: Plan
    ctx: ParallelContext
    chunks: list[TrainableModel]
    """Model chunks of this rank, in forward order; one without interleaving."""
    data_parallel: GradientSync
    """Who owns weights and gradients: the engine of --data-parallel-sharding-strategy."""
    optimizer: DistributedOptimizer
    streams: RngStreams
    datasets: Datasets
    dtype: torch.dtype
    """Of parameters and activations."""
    tokenizer: Tokenizer | None = None
    weight_casts: WeightCasts = field(default_factory=WeightCasts)
    """Casts of weights to fp8, kept for one step."""
    fp8_scales: DelayedScales | None = None
    """What ``--fp8-recipe delayed`` remembers; None for other recipes."""
    loss_scaler: LossScaler | None = None
    """Factor of the loss under ``--fp16``; None in other formats."""
    weight_queue: WeightQueue | None = None
    """Where linears put their weight gradients off; None where backward is whole."""
    turns: Turns | None = None
    """By which forwards and backwards of pairs take turns; None where there are none."""
    recorder: BackwardRecorder | LayerRecorder | None = None
    """What makes CUDA graphs of forward and backward; None where they are launched singly."""
    warmed_up: set[str] = field(default_factory=set)
    """Passes that have run once in this process, ``train`` and ``evaluate``: a pipeline's
    first pass waits for each message on the host (see ``run_schedule``)."""
    base: str = ""
    """Folder of the model that adapters stand beside; empty: checkpoints hold everything."""
    iteration: int = 0
    """Steps done."""
    consumed_train_samples: int = 0
    """Sequences trained on, over all ranks; where the data continues."""
    schedule_samples: int = 0
    """Sequences that the learning-rate schedule has counted."""
    small_files: dict[str, bytes] = field(default_factory=dict)
    """Of the checkpoint that it began from, which its own take along: how texts end. On rank
    0, which writes them."""
    stretches: list[Stretch] = field(default_factory=list)
    """Batch sizes that the run has had, over all its continuations."""
    built_actions: dict[tuple[str, int], Sequence[Action]] = field(default_factory=dict)
    """What ``step_actions`` and ``forward_actions`` have given, by kind and micro-batches:
    thousands of actions are not built in every step."""

    @property
    def read_entries(self) -> frozenset[str]:
        """Entries of batches that this rank reads: of a GPT a middle stage none."""
        return frozenset().union(*(chunk.read_entries for chunk in self.chunks))

    def step_actions(self, num_microbatches: int) -> Sequence[Action]:
        """This rank's part of the schedule of a step of so many micro-batches."""
        pipeline = self.plan.config.pipeline
        return self._built("train", partial(build_schedule, pipeline), num_microbatches)

    def forward_actions(self, num_microbatches: int) -> Sequence[Action]:
        """This rank's part of a schedule without backward."""
        v_shaped = self.plan.config.pipeline.v_shaped
        forwards = partial(forward_only, vpp=len(self.chunks), v_shaped=v_shaped)
        return self._built("evaluate", forwards, num_microbatches)

    def keeping_casts(self) -> AbstractContextManager[None]:
        """Keep casts of weights inside, where a weight's address identifies it."""
        return (
            self.weight_casts.keeping() if self.data_parallel.keeps_weights else nullcontext()
        )

    def _built(
        self, kind: str, build: Callable[[int, int], Schedule], num_microbatches: int
    ) -> Sequence[Action]:
        key = kind, num_microbatches
        if key not in self.built_actions:
            built = build(self.ctx.pp.size, num_microbatches)
            self.built_actions[key] = built[self.ctx.pp.rank]
        return self.built_actions[key]


def assemble(
    plan: Plan,
    ctx: ParallelContext,
    *,
    datasets: Datasets | None = None,
    dtype: torch.dtype | None = None,
    prepare: Callable[[Mapping[str, Shard]], None] | None = None,
    tables: Tables | None = None,
) -> Run:
    """Build the parts of a run on this rank; all ranks call it with equal plans.

    The run's plan counts by the batch sizes of the run that it continues, see ``load_run``.

    Args:
        plan: what ``resolve`` gave for this world.
        ctx: the layout's groups.
        datasets: to train on; left out, those that the plan's flags name.
        dtype: of parameters; left out, the plan's.
        prepare: changes initial weights, see ``GradientSync.fill_weights``.
        tables: what names of options stand for; left out, what this package has.

    Raises:
        ValueError: if data or tokenizer do not fit the flags.
        FileNotFoundError: if a file that the flags name does not exist.
    """
    plan = continue_plan(plan)
    config, tables = plan.config, tables or Tables()
    tokenizer = load_tokenizer(config)
    if datasets is None:
        datasets = load_datasets(plan, tokenizer)
    streams = RngStreams(config.run.seed, ctx)
    dtype = dtype or torch_dtype(plan.dtype)
    check_device_format(dtype, ctx.device, ctx.world)
    if ctx.device.type == "cuda":
        wanted = optional_kernels(
            config.model, config.kernels, ctx.device, dtype, ctx.tp, config.fp8, config.experts
        )
        agree_on_kernels(wanted, ctx.device, ctx.world)
        _warn_of_plain_blocks(plan, ctx)
    casts, scales = WeightCasts(), delayed_scales(config.fp8, ctx)
    layers = plan.family.num_layers(config.model), config.model.mtp_num_layers
    own = config.fp8, ctx, layers[0], casts, scales, layers[1]
    gemms = layer_gemms(*own, recipes=tables.recipes)
    chunks = _build_chunks(plan, ctx, gemms, streams, dtype)
    weight_queue = None
    if config.pipeline.splits_backward:
        weight_queue = WeightQueue()
        weight_queue.serve(*chunks)
    turns = None
    if config.pipeline.overlap_moe_expert_parallel_comm:
        turns = Turns()
        turns.serve(*chunks)
    engine = tables.engines[config.data_parallelism.sharding]
    data_parallel = _build_engine(engine, chunks, ctx, config)
    if prepare is not None:
        data_parallel.fill_weights(prepare)
    if config.offloading.cpu_offloading:
        for layers in chain.from_iterable(map(layer_stacks, chunks)):
            ActivationOffload(layers, config.offloading.cpu_offloading_num_layers, ctx.device)
    recorder = None
    if config.run.cuda_graph_impl != "none" and ctx.device.type == "cuda":
        recorder = _build_recorder(plan, chunks, data_parallel, streams, casts)
    optimizer = build_optimizer(config, ctx, data_parallel, tables.optimizers)
    scaler = LossScaler(config.precision, ctx.device) if config.precision.fp16 else None
    return Run(
        plan=plan,
        ctx=ctx,
        chunks=chunks,
        data_parallel=data_parallel,
        optimizer=optimizer,
        streams=streams,
        datasets=datasets,
        dtype=dtype,
        tokenizer=tokenizer,
        weight_casts=casts,
        fp8_scales=scales,
        loss_scaler=scaler,
        weight_queue=weight_queue,
        turns=turns,
        recorder=recorder,
    )


def _build_engine(
    engine: Engine, chunks: list[TrainableModel], ctx: ParallelContext, config: TrainConfig
) -> GradientSync:
    """Let an engine take the parameters over, and fill those that have no memory before."""
    is_filled = not any(p.is_meta for chunk in chunks for p in chunk.parameters())
    data_parallel = engine(chunks, ctx, config.data_parallelism)
    if not is_filled:
        data_parallel.fill_weights(partial(chunks[0].initialize, seed=config.run.seed))
    return data_parallel


def _build_recorder(
    plan: Plan,
    chunks: Sequence[TrainableModel],
    data_parallel: GradientSync,
    streams: RngStreams,
    casts: WeightCasts,
) -> BackwardRecorder | LayerRecorder:
    options = plan.config.run
    steps = options.cuda_graph_warmup_steps
    if options.cuda_graph_impl == "full_iteration":
        return BackwardRecorder(data_parallel, streams, steps)
    # Experts of other ranks stay outside graphs, as all messages between ranks do.
    is_one_rank = plan.config.parallelism.expert_model_parallel_size == 1
    return LayerRecorder(
        cast("Sequence[StageModel]", chunks),
        data_parallel,
        CudaRecorder(streams),
        steps,
        casts,
        records_experts=is_one_rank and not any(expert_graph_conflicts(plan.config, "")),
    )


def _build_chunks(
    plan: Plan,
    ctx: ParallelContext,
    gemms: Sequence[LinearGemms],
    streams: RngStreams,
    dtype: torch.dtype,
) -> list[TrainableModel]:
    """Build this rank's model chunks, in forward order, with adapters if there are any."""
    config = plan.config
    has_adapters = config.peft.peft != "none"
    chunks = [
        plan.family.build(
            config.model,
            ctx,
            vocab_size=plan.vocab_size,
            moe=config.experts,
            stage=stage,
            seed=config.run.seed,
            recomputing=config.recomputation,
            kernels=config.kernels,
            gemms=gemms,
            streams=streams,
            device=ctx.device,
            dtype=dtype,
            # A rank never holds whole what its engine shards; what adapters freeze is whole.
            is_filled=not config.data_parallelism.is_fully_sharded or has_adapters,
        )
        for stage in stages_of_rank(plan.stages, ctx.pp.rank)
    ]
    if config.pipeline.v_shaped:
        share_embedding(chunks)
    if config.kernels.transformer_impl == "transformer_engine":
        _use_transformer_engine(chunks, plan, ctx)
    for chunk in chunks:
        if has_adapters:
            attach_adapters(chunk, config.peft, streams=streams, seed=config.run.seed)
        if config.qk_clipping.qk_clip:
            track_scores(chunk)
    return chunks


def _warn_of_plain_blocks(plan: Plan, ctx: ParallelContext) -> None:
    """Log that attention over context ranks is not fused for heads of this width."""
    model = plan.config.model
    is_chosen = plan.config.kernels.attention_backend == "auto"
    if ctx.cp.size == 1 or ctx.config.cp_comm_type == "a2a" or not is_chosen:
        return
    width = head_dim(model)
    if not has_fused_width(width):
        log.warning(
            "heads of %d channels: over context ranks plain torch attends, in blocks; fused "
            "ones take multiples of 8 up to %d. --cp-comm-type a2a attends to whole sequences.",
            width,
            WIDEST,
        )


def _use_transformer_engine(
    chunks: Sequence[nn.Module], plan: Plan, ctx: ParallelContext
) -> None:
    """Let Transformer Engine compute the chunks; one warning where it does not.

    Scripts of Megatron name it everywhere, and this package's layers compute the same. One
    all-reduce over all ranks: those that share weights should round alike.
    """
    name = "--transformer-impl transformer_engine"
    why_not = next(find_implementation_conflicts(plan.config, plan.family), "")
    if ctx.device.type != "cuda":
        why_not = f"{name} computes on GPUs alone"
    elif not why_not and (missing := refusal()):
        why_not = f"{name}: {missing}"
    count = torch.tensor([bool(why_not)], dtype=torch.int32, device=ctx.device)
    if num_without := int(all_reduce(count, ctx.world)):
        why_not = why_not or f"{name} cannot be used on {num_without} of {ctx.world.size} ranks"
        log.warning("%s; this package's own layers compute.", why_not.rstrip("."))
        return
    from mcore_models.kernels.transformer_engine import use_transformer_engine

    for chunk in chunks:
        use_transformer_engine(chunk, plan.config.kernels.attention_backend)
