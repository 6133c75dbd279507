"""``--pipeline-schedule auto``: the fastest schedule that fits, from the flags alone.

Costs are estimated: GEMMs and attention by their floating-point operations at one speed,
attention's backward at 2.5 times its forward (Dao 2023, arXiv:2307.08691), messages by their
bytes. Every rank computes the same choice.
"""

import logging
from dataclasses import replace
from functools import lru_cache

from mcore_base.options import find_faults
from mcore_models.config import TransformerConfig
from mcore_models.counting import GPU_GIB, USABLE
from mcore_models.families import Family
from mcore_models.flops import RankBytes, sum_by_layer
from mcore_models.logical_tensors import payload_width
from mcore_models.memory_changes import OptimizerChoice
from mcore_models.peft.memory import Shapes, run_bytes
from mcore_moe.config import MoEConfig
from mcore_parallel.optimizers.config import MATRIX_OPTIMIZERS
from mcore_parallel.pipeline_parallel.actions import Kind
from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_parallel.pipeline_parallel.schedule import check_schedule
from mcore_parallel.pipeline_parallel.search import (
    Candidate,
    Costs,
    search_schedules,
    search_table,
)
from mcore_train.batches.batch_ramp import build_ramp
from mcore_train.composition import TrainConfig, parts

FLOPS = 500e12
"""FLOP/s of one GPU, as an H200 reaches in bf16 layers."""
LINK_BYTES = 50e9
"""Bytes/s of a message: one port of 400 Gbit/s."""

log = logging.getLogger(__name__)


def choose_schedule(
    config: TrainConfig, family: Family, world_size: int, vocab_size: int, num_microbatches: int
) -> TrainConfig:
    """Return the config with ``auto`` replaced by the fastest schedule; logs the candidates.

    Args:
        config: all options, whose only conflicts may be those of a schedule.
        family: of the model.
        world_size: ranks of the job.
        vocab_size: tokens of the model.
        num_microbatches: of a step, on each data rank.

    Returns:
        The config with a schedule.
    """
    pipeline = config.pipeline
    candidates = search_schedules(
        pipeline,
        family.num_layers(config.model),
        config.parallelism.pipeline_model_parallel_size,
        num_microbatches,
        estimate_costs(config, family, vocab_size),
        lambda tried: (
            estimate_memory(
                replace(config, pipeline=tried),
                family,
                world_size,
                vocab_size,
                num_microbatches,
            ).total
        ),
        _cap_bytes(pipeline.pipeline_memory_cap),
        lambda tried: _problem(config, tried, num_microbatches),
    )
    best = candidates[0]
    if best.problem:
        raise ValueError(_nothing_fits(candidates, pipeline))
    log.info("--pipeline-schedule auto takes %s:\n%s", best.name, search_table(candidates))
    return replace(config, pipeline=best.pipeline)


def estimate_costs(config: TrainConfig, family: Family, vocab_size: int) -> Costs:
    """Estimate the seconds of a layer, of the loss and of a message for one micro-batch."""
    model, parallel, batch = config.model, config.parallelism, config.batch
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    length, layers = batch.seq_length, family.num_layers(model)

    def forward(seq_length: int, vocabulary: int) -> float:
        # flops_per_token counts a forward and a backward of twice its operations.
        return family.flops_per_token(model, vocabulary, seq_length, config.experts) / 3

    # Per token: matrix products of all layers, attention scores and values, output head.
    gemm = forward(1, 0)
    core = forward(length, 0) - gemm
    head = forward(1, vocab_size) - gemm
    tokens = batch.micro_batch_size * length // cp
    unit = tokens / tp / FLOPS
    kinds = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    layer = (gemm + core, gemm + 2.5 * core, gemm)
    width = 2 * payload_width(model) / (tp if parallel.sequence_parallel else 1)
    return Costs(
        layer={kind: unit * cost / layers for kind, cost in zip(kinds, layer, strict=True)},
        # Head and loss compute input and weight gradients in one backward.
        loss=dict(zip(kinds, (unit * head, 2 * unit * head, 0.0), strict=True)),
        message=tokens * width / LINK_BYTES,
    )


def estimate_memory(
    config: TrainConfig,
    family: Family,
    world_size: int,
    vocab_size: int,
    num_microbatches: int,
) -> RankBytes:
    """Estimate the bytes of the rank that needs most memory, by kind."""
    batch, pp = config.batch, config.parallelism.pipeline_model_parallel_size
    return run_bytes(
        config,
        _shapes(config, family, vocab_size),
        optimizer=optimizer_choice(config),
        layers=-(-family.num_layers(config.model) // pp),
        vocab_size=vocab_size,
        world_size=world_size,
        seq_length=batch.seq_length,
        decoder_seq_length=getattr(batch, "decoder_seq_length", 0),
        micro_batch_size=batch.micro_batch_size,
        num_microbatches=num_microbatches,
        weight_bytes=2 if config.precision.bf16 or config.precision.fp16 else 4,
    )


def optimizer_choice(config: TrainConfig) -> OptimizerChoice:
    """Return the options of a run's optimizer on which its memory depends."""
    return OptimizerChoice(
        name=config.optimizer.optimizer,
        adam=config.adam,
        sgd=config.sgd,
        muon=config.muon,
        soap=config.soap,
    )


def _shapes(config: TrainConfig, family: Family, vocab_size: int) -> Shapes:
    """Return shapes of the logical tensors, summed by layer unless single tensors matter."""
    model, experts = config.model, without_exchange(config.experts)
    has_matrices = config.optimizer.optimizer in MATRIX_OPTIMIZERS
    if config.peft.peft != "none" or config.fp8.fp8_format or has_matrices:
        return _all_shapes(family, model, vocab_size, experts)
    return _summed_shapes(family, model, vocab_size, experts)


def without_exchange(experts: MoEConfig) -> MoEConfig:
    """Return options of experts with neutral exchange and sums, which change no tensor."""
    return replace(
        experts,
        moe_token_dispatcher_type="alltoall",
        moe_expert_rows_limit=0.0,
        moe_wgrad_micro_batches="auto",
    )


@lru_cache(maxsize=8)
def _all_shapes(
    family: Family, model: TransformerConfig, vocab_size: int, experts: MoEConfig
) -> Shapes:
    return family.tensor_shapes(model, vocab_size, experts)


@lru_cache(maxsize=8)
def _summed_shapes(
    family: Family, model: TransformerConfig, vocab_size: int, experts: MoEConfig
) -> Shapes:
    return sum_by_layer(_all_shapes(family, model, vocab_size, experts))


def _problem(config: TrainConfig, pipeline: PipelineConfig, num_microbatches: int) -> str:
    """Return why a batch of the ramp or other options reject a schedule; empty if none does."""
    ramp, final = config.batch.rampup_batch_size, config.batch.global_batch_size
    if ramp and final:
        pp = config.parallelism.pipeline_model_parallel_size
        for size in build_ramp(ramp, final).sizes():
            check_schedule(pipeline, pp, max(1, size * num_microbatches // final))
    return next(iter(find_faults(*parts(replace(config, pipeline=pipeline)))), "")


def _cap_bytes(text: str) -> float:
    """Return the bytes of --pipeline-memory-cap: GiB, or 90 % of a GPU's memory by its name."""
    gpu_gib = GPU_GIB.get(text.lower().replace("_", "-"))
    try:
        gib = USABLE * gpu_gib if gpu_gib else float(text or "inf")
    except ValueError:
        gib = 0.0
    if gib <= 0:
        raise ValueError(
            f"--pipeline-memory-cap {text} is not known: use {', '.join(GPU_GIB)}, or GiB."
        )
    return gib * 2**30


def _nothing_fits(candidates: list[Candidate], pipeline: PipelineConfig) -> str:
    problems: dict[str, list[str]] = {}
    for each in candidates:
        problems.setdefault(each.problem.rstrip("."), []).append(each.name)
    if len(problems) == 1:
        return candidates[0].problem
    reasons = "; ".join(f"{', '.join(names)}: {text}" for text, names in problems.items())
    cap = pipeline.pipeline_memory_cap
    if not cap:
        return f"--pipeline-schedule auto: every schedule is rejected ({reasons})."
    return (
        f"--pipeline-schedule auto: no schedule fits --pipeline-memory-cap {cap} ({reasons}): "
        "raise the cap, or split or recompute more."
    )
