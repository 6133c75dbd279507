"""Builds a ``Run`` from a ``Plan``: model chunks, engine, optimizer, pipeline, data of a rank.

``assemble`` is the only place where these parts meet. It builds model chunks, ``Pipeline``,
data-parallel engine and optimizer in this order, since each attaches to the ones before it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import cast

import torch
from torch import nn

from mcore_base.options import Values, find_faults
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_data.tracing.data_plan import BatchSizePhase
from mcore_models.building.stage_model import StageModel
from mcore_models.kernels.batch_invariant_model import use_batch_invariant_kernels
from mcore_models.kernels.choice import optional_kernels
from mcore_models.kernels.fused_blocks import WIDEST, has_fused_width
from mcore_models.layers.layer_setup import Execution
from mcore_models.logical_tensors import head_dim
from mcore_models.peft.attaching import attach_adapters
from mcore_models.protocol import BatchEntry, MicroBatch, TrainableModel, share_embedding
from mcore_models.qk_clip.row_factors import track_scores
from mcore_parallel.collectives import all_reduce
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.data_parallel.engines import ENGINES, Engine
from mcore_parallel.data_parallel.gradient_noise import GradientNoise, ShardedGradientNoise
from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.data_parallel.meta_matrices import give_memory
from mcore_parallel.kernels import symmetric_gemm
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.offloading.activations import ActivationOffload
from mcore_parallel.optional_kernels import agree_on_kernels
from mcore_parallel.pipeline_parallel.stages import stages_of_rank
from mcore_parallel.precision.delayed_scaling import DelayedScales
from mcore_parallel.precision.fp8 import RECIPES, WeightCasts, delayed_scales, layer_gemms
from mcore_parallel.precision.fp8_recipes import Recipe
from mcore_parallel.precision.transformer_engine import refusal
from mcore_parallel.rng import RngStreams
from mcore_parallel.sharding import Shard, layer_stacks
from mcore_parallel.step_clock import StepClock
from mcore_train.batches.datasets import Datasets, load_datasets
from mcore_train.checkpoints.origin import continue_plan
from mcore_train.composition import TrainConfig, parts
from mcore_train.config import unrecordable_experts
from mcore_train.graphs.layers import LayerRecorder
from mcore_train.graphs.recorders import CudaRecorder
from mcore_train.graphs.whole_step import BackwardRecorder
from mcore_train.objectives.objective import Objective, objective_class
from mcore_train.objectives.reference import FrozenModel, build_frozen_model
from mcore_train.pipeline import Pipeline
from mcore_train.planning.expert_wgrads import (
    choose_expert_wgrads,
    has_automatic_wgrads,
    set_wgrad_micro_batches,
)
from mcore_train.planning.system import SYSTEMS, system_of_device
from mcore_train.precision import check_device_format, torch_dtype
from mcore_train.resolution import Plan, load_tokenizer
from mcore_train.updating.loss_scaling import LossScaler
from mcore_train.updating.optimizers import OPTIMIZERS, BuildRule, build_optimizer
from mcore_train.updating.recent_steps import RecentSteps

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """Optimizers, fp8 recipes and engines by option value; a program may add its own."""

    optimizers: Mapping[str, BuildRule] = field(default_factory=lambda: OPTIMIZERS)
    """Builders of update rules by value of ``--optimizer``."""
    recipes: Mapping[str, type[Recipe]] = field(default_factory=lambda: RECIPES)
    """Classes of fp8 recipes by value of ``--fp8-recipe``."""
    engines: Mapping[str, Engine] = field(default_factory=lambda: ENGINES)
    """Data-parallel engines by value of ``--data-parallel-sharding-strategy``."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """Counters of a run: the only state besides tensors that a step changes."""

    iteration: int = 0
    """Steps done."""
    consumed_train_samples: int = 0
    """Sequences trained on, over all ranks; the next batch begins after them."""
    schedule_samples: int = 0
    """Sequences counted by the learning-rate schedule, which leaves out skipped steps."""
    batch_size_phases: list[BatchSizePhase] = field(default_factory=list)
    """Batch sizes of the run so far, including those before it was resumed."""
    spikes: list[int] = field(default_factory=list)
    """Iterations that were spikes, among the last --spike-window steps."""

    def count_step(self, batch_size: int, *, is_skipped: bool) -> None:
        """Count one more step of ``batch_size`` sequences over all ranks."""
        phases = self.batch_size_phases
        if not phases or phases[-1].batch_size != batch_size:
            phases.append(
                BatchSizePhase(self.iteration + 1, self.consumed_train_samples, batch_size)
            )
        self.iteration += 1
        self.consumed_train_samples += batch_size
        if not is_skipped:
            self.schedule_samples += batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """State of 16-bit and 8-bit formats that persists between steps."""

    weight_casts: WeightCasts = field(default_factory=WeightCasts)
    """Casts of weights to fp8, kept for one step."""
    fp8_scales: DelayedScales | None = None
    """Histories of ``--fp8-recipe delayed``; None for other recipes."""
    loss_scaler: LossScaler | None = None
    """Factor of the loss under ``--fp16``; None in other formats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Folders and files from which a run was loaded."""

    checkpoint: str = ""
    """Folder of the loaded weights; empty: weights were drawn from the seed."""
    adapter_base: str = ""
    """Folder of the model that adapters are trained on; empty: checkpoints of the run hold
    all weights."""
    carried_files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files of the checkpoint (such as generation_config.json) that the run's own
    checkpoints repeat, by name; on rank 0, which writes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything that one rank trains with. Parts are fixed; a step changes their tensors."""

    plan: Plan
    ctx: ParallelContext
    chunks: Sequence[TrainableModel]
    """Model chunks of this rank, in forward order; one without interleaving."""
    dtype: torch.dtype
    """Dtype of parameters and activations."""
    streams: RngStreams
    precision: Precision
    pipeline: Pipeline
    data_parallel: GradientSync
    """Holds weights and gradients: the engine of --data-parallel-sharding-strategy."""
    optimizer: DistributedOptimizer
    recorder: BackwardRecorder | LayerRecorder | None
    """Records and replays CUDA graphs of forward and backward; None without CUDA graphs."""
    datasets: Datasets
    tokenizer: Tokenizer | None
    objective: Objective
    """Losses that the run minimizes over the results of its model."""
    frozen: FrozenModel | None = None
    """Reference or teacher model of the objective; None if the objective has none, or if the
    results of that model are stored."""
    recent: RecentSteps | None = None
    """Losses and gradient norms of recent steps, by which spikes are detected; None if the run
    does not look for spikes."""
    noise: GradientNoise | ShardedGradientNoise | None = None
    """Measures the noise of a step's gradient; None if layers are CUDA graphs, or if fully
    sharded gradients are summed over several optimizer instances."""
    origin: Origin = field(default_factory=Origin)
    progress: Progress = field(default_factory=Progress)

    @property
    def entries(self) -> Mapping[str, BatchEntry]:
        """Entries of a batch: those of the model, and those that the objective adds."""
        return {**self.chunks[0].entries, **self._objective_entries}

    @property
    def read_entries(self) -> frozenset[str]:
        """Entries of batches that this rank reads: a middle stage of a GPT reads none."""
        read = frozenset().union(*(chunk.read_entries for chunk in self.chunks))
        has_loss = any(chunk.stage.has_loss for chunk in self.chunks)
        return read | frozenset(self._objective_entries if has_loss else ())

    @property
    def _objective_entries(self) -> Mapping[str, BatchEntry]:
        """Entries that the objective adds, and those that a frozen model has stored."""
        is_stored = self.plan.config.objective.reference_cache
        stored = self.objective.stored_entries if is_stored else ()
        return {**self.objective.added_entries, **dict.fromkeys(stored, BatchEntry())}

    @property
    def loss_names(self) -> list[str]:
        """Losses and metrics of the objective, the main loss first."""
        return list(self.objective.coefficients)

    def annotate(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Add results of the frozen model to micro-batches; all ranks call it together."""
        if self.frozen is None:
            return list(batches)
        with self.ctx.clock.span("compute"):
            return self.frozen.annotate(batches, self.objective.reference_entries)

    def keeping_casts(self) -> AbstractContextManager[None]:
        """Return a context that keeps fp8 casts of weights, if weights keep their addresses."""
        keeps = self.data_parallel.keeps_weights
        return self.precision.weight_casts.keeping() if keeps else nullcontext()


def assemble(
    plan: Plan,
    ctx: ParallelContext,
    *,
    datasets: Datasets | None = None,
    dtype: torch.dtype | None = None,
    prepare: Callable[[Mapping[str, Shard]], None] | None = None,
    draws_weights: bool = True,
    tables: Tables | None = None,
) -> Run:
    """Build the parts of a run on this rank; all ranks call it with equal plans.

    A run that continues another one counts samples by the batch sizes that the checkpoint
    records, see ``continue_plan``.

    Args:
        plan: the result of ``resolve`` for this world size.
        ctx: axes and process groups of the layout.
        datasets: data to train on; None: the datasets that the plan's flags name.
        dtype: dtype of parameters; None: the plan's.
        prepare: changes initial weights, see ``GradientSync.fill_weights``.
        draws_weights: draw initial weights from the plan's seed; False: matrices are zero
            unless ``prepare`` sets them. Adapters are always drawn.
        tables: optimizers, fp8 recipes and engines by option value; None: those of mcore.

    Raises:
        ValueError: if data or tokenizer do not fit the flags.
        FileNotFoundError: if a file that the flags name does not exist.
    """
    plan = _with_expert_wgrads(continue_plan(plan), ctx)
    config, tables = plan.config, tables or Tables()
    tokenizer = load_tokenizer(config)
    objective_type = objective_class(config)
    if datasets is None:
        makes_batches = objective_type.makes_batches()
        datasets = Datasets() if makes_batches else load_datasets(plan, tokenizer)
    streams = RngStreams(config.run.seed, ctx)
    dtype = dtype or torch_dtype(plan.dtype)
    check_device_format(dtype, ctx.device, ctx.world)
    _choose_kernels(plan, ctx, dtype)

    # The order matters. The pipeline attaches the weight queue to the layers. The engine reads
    # from the weights whether their gradients are deferred, and moves parameters into its
    # buckets. The optimizer allocates state for the ranges that the engine assigns to the rank.
    precision = Precision(
        fp8_scales=delayed_scales(config.fp8, ctx),
        loss_scaler=LossScaler(config.precision, ctx.device) if config.precision.fp16 else None,
    )
    is_filled = draws_weights and not config.data_parallelism.is_fully_sharded
    chunks = _build_chunks(
        *(plan, ctx, precision, streams, dtype, tables.recipes),
        is_filled=is_filled,
        draws_weights=draws_weights,
    )
    pipeline = Pipeline(config, ctx, chunks, dtype)
    data_parallel = _build_engine(tables, chunks, ctx, config, draws_weights=draws_weights)
    if prepare is not None:
        data_parallel.fill_weights(prepare)
    if config.offloading.cpu_offloading:
        for layers in chain.from_iterable(map(layer_stacks, chunks)):
            ActivationOffload(layers, config.offloading.cpu_offloading_num_layers, ctx.device)
    objective, frozen = objective_type(config, ctx, chunks[-1]), None
    if objective.has_reference and not config.objective.reference_cache:
        frozen = build_frozen_model(plan, ctx, chunks, pipeline, streams, dtype)
        objective.reference = frozen.chunks[-1]
    recorder = None
    if config.run.cuda_graph_impl != "none" and ctx.device.type == "cuda":
        casts = precision.weight_casts
        recorder = _build_recorder(plan, chunks, data_parallel, streams, casts, ctx.clock)
    return Run(
        plan=plan,
        ctx=ctx,
        chunks=chunks,
        dtype=dtype,
        streams=streams,
        precision=precision,
        pipeline=pipeline,
        data_parallel=data_parallel,
        optimizer=build_optimizer(config, ctx, data_parallel, tables.optimizers),
        recorder=recorder,
        datasets=datasets,
        tokenizer=tokenizer,
        objective=objective,
        frozen=frozen,
        recent=_build_recent_steps(config, ctx.device),
        noise=None if isinstance(recorder, LayerRecorder) else _build_noise(data_parallel),
    )


def _build_recent_steps(config: TrainConfig, device: torch.device) -> RecentSteps | None:
    needs_recent_steps = (
        config.spikes.spike_policy != "none" or config.watching.rerun_on_mismatch
    )
    return RecentSteps(config.spikes, device) if needs_recent_steps else None


def _build_noise(data_parallel: GradientSync) -> GradientNoise | ShardedGradientNoise | None:
    if isinstance(data_parallel, DataParallel):
        return GradientNoise(data_parallel)
    # Imported here, since DTensors take a second that other engines do not need.
    from mcore_parallel.data_parallel.fully_sharded import FullyShardedDataParallel

    if not isinstance(data_parallel, FullyShardedDataParallel):
        return None  # an engine of the program's own
    # Several optimizer instances sum their gradients once a step, so that no rank has the sum
    # of one micro-batch over all data ranks.
    is_one_instance = data_parallel.ctx.optimizer_replica.size == 1
    return ShardedGradientNoise(data_parallel) if is_one_instance else None


def _with_expert_wgrads(plan: Plan, ctx: ParallelContext) -> Plan:
    """Return the plan with the choice for ``--moe-wgrad-micro-batches auto``, on GPUs.

    All-reduces the memory of the ranks' GPUs over the world.
    """
    is_chosen = plan.expert_wgrads or not has_automatic_wgrads(plan.config)
    if ctx.device.type != "cuda" or is_chosen:
        return plan
    memory_bytes = torch.tensor(torch.cuda.mem_get_info(ctx.device)[1], device=ctx.device)
    chosen = choose_expert_wgrads(
        *(plan.config, plan.family, plan.world_size, plan.vocab_size),
        system_of_device(torch.cuda.get_device_name(ctx.device)) or SYSTEMS["h200"],
        float(all_reduce(memory_bytes, ctx.world, "min")),
    )
    return replace(plan, expert_wgrads=chosen)


def _choose_kernels(plan: Plan, ctx: ParallelContext, dtype: torch.dtype) -> None:
    """Choose the optional kernels of a GPU job; all-gathers over the world."""
    if ctx.device.type != "cuda":
        return
    config = plan.config
    candidates = optional_kernels(
        *(config.model, config.kernels, ctx.device, dtype, ctx.tp, config.fp8, config.experts)
    )
    has_muon = config.optimizer.optimizer == "muon" and dtype == torch.bfloat16
    if has_muon and symmetric_gemm.is_available(ctx.device):
        candidates.append((symmetric_gemm.symmetric_product, ()))
    agree_on_kernels(candidates, ctx.device, ctx.world)
    _warn_of_plain_blocks(plan, ctx)


def _build_engine(
    tables: Tables,
    chunks: list[TrainableModel],
    ctx: ParallelContext,
    config: TrainConfig,
    *,
    draws_weights: bool,
) -> GradientSync:
    """Build the data-parallel engine of the chunks, then fill parameters on the meta device."""
    engine = tables.engines[config.data_parallelism.sharding]
    meta_parameters = [p for chunk in chunks for p in chunk.parameters() if p.is_meta]
    if not config.data_parallelism.is_fully_sharded:
        for parameter in meta_parameters:
            give_memory(parameter, ctx.device)
    data_parallel = engine(chunks, ctx, config.data_parallelism)
    if meta_parameters and draws_weights:
        data_parallel.fill_weights(partial(chunks[0].initialize, seed=config.run.seed))
    return data_parallel


def _build_recorder(
    plan: Plan,
    chunks: Sequence[TrainableModel],
    data_parallel: GradientSync,
    streams: RngStreams,
    casts: WeightCasts,
    clock: StepClock,
) -> BackwardRecorder | LayerRecorder:
    options = plan.config.run
    steps = options.cuda_graph_warmup_steps
    if options.cuda_graph_impl == "full_iteration":
        is_timed = plan.config.logging.waterfall_interval > 0
        return BackwardRecorder(data_parallel, streams, steps, clock, is_timed=is_timed)
    # Experts of other ranks stay outside graphs, as all messages between ranks do.
    is_one_rank = plan.config.parallelism.expert_model_parallel_size == 1
    return LayerRecorder(
        cast("Sequence[StageModel]", chunks),
        data_parallel,
        CudaRecorder(streams, clock),
        steps,
        casts,
        records_experts=is_one_rank
        and not any(unrecordable_experts(Values(parts(plan.config)))),
    )


def _build_chunks(
    plan: Plan,
    ctx: ParallelContext,
    precision: Precision,
    streams: RngStreams,
    dtype: torch.dtype,
    recipes: Mapping[str, type[Recipe]],
    *,
    is_filled: bool,
    draws_weights: bool,
) -> list[TrainableModel]:
    """Build this rank's model chunks, in forward order, with adapters if there are any."""
    config = plan.config
    if chosen := plan.expert_wgrads:
        config = set_wgrad_micro_batches(config, chosen.num_together)
    gemms = layer_gemms(
        config.fp8,
        ctx,
        num_layers=plan.family.num_layers(config.model),
        casts=precision.weight_casts,
        scales=precision.fp8_scales,
        num_mtp_layers=config.model.mtp_num_layers,
        recipes=recipes,
    )
    execution = Execution(
        recomputing=config.recomputation,
        kernels=config.kernels,
        gemms=gemms,
        streams=streams,
    )
    has_adapters = config.peft.peft != "none"
    chunks = [
        plan.family.build(
            config.model,
            ctx,
            vocab_size=plan.vocab_size,
            moe=config.experts,
            stage=stage,
            # fully_shard fills parameters after sharding, so that no rank holds a full weight.
            # Frozen weights under adapters are not sharded: they are filled here.
            seed=config.run.seed if is_filled or (has_adapters and draws_weights) else None,
            execution=execution,
            device=ctx.device,
            dtype=dtype,
        )
        for stage in stages_of_rank(plan.stages, ctx.pp.rank)
    ]
    if config.pipeline.v_shaped:
        share_embedding(chunks)
    if config.kernels.transformer_impl == "transformer_engine":
        _use_transformer_engine(chunks, plan, ctx)
    for chunk in chunks:
        if has_adapters:
            for parameter in chunk.parameters():
                give_memory(parameter, ctx.device)
            attach_adapters(chunk, config.peft, streams=streams, seed=config.run.seed)
        if config.qk_clipping.qk_clip:
            track_scores(chunk)
        if config.kernels.batch_invariant_mode:
            use_batch_invariant_kernels(chunk)
    return chunks


def _warn_of_plain_blocks(plan: Plan, ctx: ParallelContext) -> None:
    """Warn if no fused kernel takes the head width in attention over context ranks."""
    model = plan.config.model
    is_chosen = plan.config.kernels.attention_backend == "auto"
    if ctx.cp.size == 1 or ctx.config.cp_comm_type == "a2a" or not is_chosen:
        return
    width = head_dim(model)
    if not has_fused_width(width):
        log.warning(
            "heads of %d channels: attention over context ranks runs in plain torch, as fused "
            "kernels take multiples of 8 up to %d. --cp-comm-type a2a, which attends to whole "
            "sequences, has no such limit.",
            width,
            WIDEST,
        )


def _use_transformer_engine(
    chunks: Sequence[nn.Module], plan: Plan, ctx: ParallelContext
) -> None:
    """Replace layers by those of Transformer Engine, or log one warning with the reason.

    Most scripts of Megatron give the flag, and this package's own layers compute the same
    function. All-reduces over the world: if one rank cannot use it, no rank does, since ranks
    that share weights must round alike.
    """
    name = "--transformer-impl transformer_engine"
    why_not = next(iter(find_faults(*parts(plan.config), notes=True)), "")
    if ctx.device.type != "cuda":
        why_not = f"{name} needs a GPU"
    elif not why_not and (missing := refusal()):
        why_not = f"{name}: {missing}"
    count = torch.tensor([bool(why_not)], dtype=torch.int32, device=ctx.device)
    if num_without := int(all_reduce(count, ctx.world)):
        why_not = why_not or f"{name} cannot be used on {num_without} of {ctx.world.size} ranks"
        log.warning("%s; using this package's own layers instead.", why_not.rstrip("."))
        return
    from mcore_models.kernels.transformer_engine import use_transformer_engine

    for chunk in chunks:
        use_transformer_engine(chunk, plan.config.kernels.attention_backend)
