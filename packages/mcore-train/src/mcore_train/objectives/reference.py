"""Builds, loads and runs the frozen model of an objective.

The frozen model is either a separate model in the run's layout (same tensor, pipeline and
context ranks; other depth and width), or the trained model with its adapters off. Each data
rank holds a separate model whole: ``--use-distributed-optimizer`` and full sharding do not
shard it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mcore_ckpt.save_load.loading import load
from mcore_ckpt.storage.index import ADAPTER
from mcore_models.building.layouts import layout_problems
from mcore_models.description import ModelDescription
from mcore_models.kernels.batch_invariant_model import use_batch_invariant_kernels
from mcore_models.layers.layer_setup import Execution
from mcore_models.peft.attaching import adapters_off
from mcore_models.protocol import MicroBatch, TrainableModel, share_embedding
from mcore_parallel.data_parallel.meta_matrices import give_memory
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.runner import Payload
from mcore_parallel.pipeline_parallel.stages import build_stages, stages_of_rank
from mcore_parallel.rng import RngStreams
from mcore_parallel.sharding import named_shards
from mcore_train.checkpoints.origin import checkpoint_extra, find_checkpoint
from mcore_train.composition import TrainConfig
from mcore_train.pipeline import Pipeline
from mcore_train.resolution import Plan

Entries = Callable[[Payload, MicroBatch], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model without training, on the stages of this rank."""

    chunks: Sequence[TrainableModel]
    pipeline: Pipeline
    frozen: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of a forward pass, which turns the adapters of a trained model off."""

    def annotate(self, batches: Sequence[MicroBatch], entries: Entries) -> list[MicroBatch]:
        """Return the micro-batches of a step with the entries of this model added.

        Communicates as a forward pass; all ranks call it together.

        Args:
            batches: this rank's micro-batches.
            entries: of ``Objective.reference_entries``; called on the last stage.
        """
        annotated = list(batches)

        def add(_model: TrainableModel, output: Payload, microbatch: int) -> None:
            batch = batches[microbatch]
            added = dict(entries(output, batch))
            annotated[microbatch] = replace(batch, entries={**batch.entries, **added})

        was_training = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        try:
            with torch.no_grad(), self.frozen():
                self.pipeline.forward(batches, add)
        finally:
            for chunk, mode in zip(self.chunks, was_training, strict=True):
                chunk.train(mode)
        return annotated


def reference_folder(config: TrainConfig) -> Path | None:
    """Return the checkpoint of the frozen model; None: the trained model without adapters.

    Raises:
        ValueError: if the options name none, or the folder holds no checkpoint.
    """
    options, loading = config.objective, config.loading
    model_path = options.reference_model
    if not model_path and config.peft.peft != "none":
        return None
    if not model_path:
        model_path = loading.pretrained_checkpoint or (loading.load if loading.finetune else "")
        if not model_path:
            raise ValueError(
                f"--objective {options.objective} compares with a frozen model: give its "
                "folder by --reference-model, or start the run from it by --load with "
                "--finetune or by --pretrained-checkpoint."
            )
    folder = find_checkpoint(model_path)
    if folder is None:
        raise ValueError(
            f"--reference-model {model_path} holds no checkpoint: give a run folder or a "
            "Hugging Face folder."
        )
    return folder


def describe_reference(folder: Path, plan: Plan) -> ModelDescription:
    """Return the frozen model's description, after a check against the run's layout.

    Reads the checkpoint's index; no communication.

    Raises:
        ValueError: with every reason why the model cannot be used.
    """
    flag, extra = f"--reference-model {folder}", checkpoint_extra(folder)
    if ADAPTER in extra:
        raise ValueError(
            f"{flag} holds an adapter: merge it into a whole model by mcore-ckpt convert."
        )
    if "model" not in extra:
        raise ValueError(
            f"{flag} does not describe its model: give a checkpoint of mcore-train, or a "
            "Hugging Face folder."
        )
    description = ModelDescription.from_dict(extra["model"])
    faults = []
    if description.family != plan.family.name:
        faults.append(
            f"{flag} is a {description.family}, and the run trains a {plan.family.name}."
        )
    if description.vocab_size != plan.vocab_size:
        faults.append(
            f"{flag} has a vocabulary of {description.vocab_size} tokens, and the run one of "
            f"{plan.vocab_size}: both models need the same tokenizer."
        )
    if description.config.mtp_num_layers:
        faults.append(f"{flag} has --mtp-num-layers, which a frozen model cannot have.")
    parallel, length = plan.config.parallelism, plan.config.batch.seq_length
    problems = layout_problems(description.config, parallel, description.moe, seq_length=length)
    faults += [f"{flag}: {problem}" for problem in problems]
    pp = parallel.pipeline_model_parallel_size
    try:
        build_stages(plan.config.pipeline, description.config.num_layers, pp)
    except ValueError as error:
        faults.append(f"{flag}: {error}")
    if faults:
        raise ValueError("\n".join(faults))
    # Pad both vocabularies alike, so that tensor ranks hold the same columns of both heads.
    divisor = plan.config.model.make_vocab_size_divisible_by
    return replace(
        description, config=replace(description.config, make_vocab_size_divisible_by=divisor)
    )


def check_reference(plan: Plan) -> None:
    """Raise ``ValueError`` if a run's frozen model cannot be used; reads an index."""
    config, objective = plan.config, plan.config.objective.objective
    if objective in ("pretrain", "sft") or config.objective.reference_cache:
        return
    if plan.family.dataset != "gpt":
        raise ValueError(
            f"--objective {objective} scores next tokens: train a GPT (mcore-train gpt)."
        )
    needs_none = objective == "grpo" and not config.grpo.grpo_kl_beta
    is_own = ":" in objective and not config.objective.reference_model
    if needs_none or is_own:
        return
    if (folder := reference_folder(config)) is not None:
        describe_reference(folder, plan)


def build_frozen_model(
    plan: Plan,
    ctx: ParallelContext,
    chunks: Sequence[TrainableModel],
    pipeline: Pipeline,
    streams: RngStreams,
    dtype: torch.dtype,
) -> FrozenModel:
    """Build and load the frozen model of the options; all ranks call it together.

    Args:
        plan: of the run.
        ctx: the layout.
        chunks: of the trained model, which is the frozen one if only adapters are trained.
        pipeline: of the trained model.
        streams: random streams of the run.
        dtype: of parameters and activations.

    Raises:
        ValueError: if the model does not fit the run.
    """
    config, folder = plan.config, reference_folder(plan.config)
    if folder is None:
        return FrozenModel(chunks, pipeline, partial(adapters_off, chunks))
    description = describe_reference(folder, plan)
    num_layers = description.config.num_layers
    stages = build_stages(config.pipeline, num_layers, ctx.pp.size)
    frozen = [
        plan.family.build(
            description.config,
            ctx,
            vocab_size=description.vocab_size,
            moe=description.moe,
            stage=stage,
            # Weights are drawn only where the folder may leave some out.
            seed=config.run.seed if config.strictness.may_leave_tensors else None,
            execution=Execution(kernels=config.kernels, streams=streams),
            device=ctx.device,
            dtype=dtype,
        )
        for stage in stages_of_rank(stages, ctx.pp.rank)
    ]
    if config.pipeline.v_shaped:
        share_embedding(frozen)
    shards = {}
    for chunk in frozen:
        for parameter in chunk.parameters():
            give_memory(parameter, ctx.device)
        if config.kernels.batch_invariant_mode:
            use_batch_invariant_kernels(chunk)
        chunk.requires_grad_(False).eval()
        shards |= named_shards(chunk, ctx.data_axes())
    load(
        folder,
        {f"model.{name}": shard for name, shard in shards.items()},
        ignore=("optimizer.", "rng.", "fp8."),
        cast=True,
        world=ctx.world,
        strictness=config.strictness,
        checksums=config.loading.load_checksums,
    )
    frozen_config = replace(config, model=description.config, experts=description.moe)
    return FrozenModel(frozen, Pipeline(frozen_config, ctx, frozen, dtype))
