"""Finds conflicts of options with the plan of a run: its stages, tensors and steps.

Conflicts among options alone are rules of the configs, see ``mcore_base.options``.
"""

from collections.abc import Iterator, Sequence

from mcore_models.families import Family
from mcore_models.peft.config import OTHER_WORDS, TABLES, linears, without_target
from mcore_parallel.pipeline_parallel.stages import Stage, stages_of_rank
from mcore_train.composition import TrainConfig
from mcore_train.updating.group_entries import find_idle_entries, read_entries


def find_stage_conflicts(config: TrainConfig, stages: Sequence[Stage]) -> Iterator[str]:
    """Find options that need layers or tensors which a pipeline stage does not have."""
    yield from _empty_ranks(stages, config)
    yield from _offload_conflicts(config, stages)
    yield from _misplaced_predictions(stages, config)


def find_adapter_conflicts(
    config: TrainConfig, family: Family, vocab_size: int, stages: Sequence[Stage]
) -> Iterator[str]:
    """Find targets of ``--peft`` that are not linears, and stages without a target."""
    peft, experts = config.peft, config.experts
    if peft.peft == "none":
        return
    names = linears(family.tensor_shapes(config.model, vocab_size, experts))
    if unmatched := without_target(peft, names):
        known = sorted({name.rpartition(".")[2] for name in names})
        yield (
            f"--lora-target-modules {' '.join(unmatched)} matches no linear of this model: use "
            f"all-linear, words of a name such as {names[0]}, or {', '.join(known)}."
        )
        return
    targets = [name for name in names if peft.is_target(name)]
    if peft.peft == "dora" and any(".experts." in name for name in targets):
        yield "--peft dora has no routed experts: use --peft lora, or other targets."
    shapes = family.tensor_shapes(config.model, vocab_size, experts)
    for name in peft.modules_to_save:
        if TABLES[OTHER_WORDS.get(name, name)][0] not in shapes:
            yield (
                f"--modules-to-save {name}: this model's head is its embedding, which both "
                "train: use embedding."
            )
    objective = config.objective
    is_own_reference = objective.objective in ("dpo", "grpo") and not objective.reference_model
    if peft.modules_to_save and is_own_reference:
        yield (
            f"--modules-to-save changes the model that --objective {objective.objective} "
            "compares with, which is the trained one without its adapters: give the base by "
            "--reference-model."
        )
    yield from _empty_stages(targets, stages)


def find_group_conflicts(config: TrainConfig, family: Family, vocab_size: int) -> Iterator[str]:
    """Find entries of ``--parameter-groups`` that cannot be read, or match no parameter."""
    texts = config.parameter_rates.parameter_groups
    try:
        entries = read_entries(texts)
    except ValueError as error:
        yield str(error)
        return
    for text, entry in zip(texts, entries, strict=True):
        if entry.lr and entry.min_lr > entry.lr:
            yield f"--parameter-groups {text!r}: min_lr must not be above lr."
    if texts and config.peft.peft == "none":  # adapters have other names
        shapes = family.tensor_shapes(config.model, vocab_size, config.experts)
        yield from find_idle_entries(texts, shapes)


def idle_gradient_sums(config: TrainConfig, counts: Sequence[int]) -> Iterator[str]:
    """Refuse --moe-wgrad-micro-batches if every step has one micro-batch."""
    number = config.experts.num_wgrads_together
    if number > 1 and max(counts) == 1:
        yield (
            f"--moe-wgrad-micro-batches {number} has no effect with one micro-batch a step: "
            "leave it out, or lower --micro-batch-size."
        )


def _empty_ranks(stages: Sequence[Stage], config: TrainConfig) -> Iterator[str]:
    """Refuse a pipeline rank that would hold no parameter, and so have nothing to train."""
    pp, layout = config.parallelism.pipeline_model_parallel_size, config.pipeline
    split = (
        f"--pipeline-model-parallel-layout {layout.pipeline_model_parallel_layout}"
        if layout.pipeline_model_parallel_layout
        else f"--decoder-first-pipeline-num-layers {layout.decoder_first_pipeline_num_layers} "
        f"and --decoder-last-pipeline-num-layers {layout.decoder_last_pipeline_num_layers}"
    )
    for rank in range(pp):
        rank_stages = stages_of_rank(stages, rank)
        if rank_stages and not any(
            s.layers or s.has_embedding or s.has_loss or s.num_mtp_layers for s in rank_stages
        ):
            yield (
                f"pipeline rank {rank} of {pp} has no layer, embedding or loss under {split}: "
                "move a layer there, or lower --pipeline-model-parallel-size."
            )


def _offload_conflicts(config: TrainConfig, stages: Sequence[Stage]) -> Iterator[str]:
    """Refuse to offload the last layer of a stage, whose backward comes at once."""
    number = config.offloading.cpu_offloading_num_layers
    fewest = min((len(stage.layers) for stage in stages), default=0)
    if config.offloading.cpu_offloading and number >= fewest > 0:
        yield (
            f"--cpu-offloading-num-layers {number} must be less than the {fewest} layers of "
            "the smallest pipeline stage: the activations of its last layer are needed at once."
        )


def _misplaced_predictions(stages: Sequence[Stage], config: TrainConfig) -> Iterator[str]:
    """Return the faults of the prediction layers (m) of a pipeline layout."""
    depths = config.model.mtp_num_layers
    placed = sum(stage.num_mtp_layers for stage in stages)
    if not placed:
        return
    if placed != depths:
        yield (
            f"--pipeline-model-parallel-layout places {placed} layers m, but "
            f"--mtp-num-layers is {depths}: place as many, or none."
        )
    stage = next(stage for stage in stages if stage.num_mtp_layers)
    # Prediction layers embed tokens, as the first stage and a tied head on the last stage do.
    is_tied = not config.model.untie_embeddings_and_output_weights
    others = [s for s in stages if s.has_embedding or (s.has_loss and is_tied)]
    is_shared = config.pipeline.v_shaped and stage.has_loss
    if not is_shared and any(s.rank == stage.rank for s in others if s is not stage):
        yield (
            "--pipeline-model-parallel-layout places the layers m on another stage of a rank "
            "that holds the embedding already: move them to that stage, or to another rank."
        )


def _empty_stages(targets: Sequence[str], stages: Sequence[Stage]) -> Iterator[str]:
    """Refuse a pipeline stage with nothing to train."""
    if not all(name.startswith("blocks.") for name in targets):
        return
    layers = {int(name.split(".")[1]) for name in targets}
    for number, stage in enumerate(stages):
        if not layers & set(stage.layers):
            yield (
                f"--lora-target-modules matches no linear of pipeline stage {number}, which "
                "would have nothing to train: name linears of its layers too, or use fewer "
                "stages."
            )
