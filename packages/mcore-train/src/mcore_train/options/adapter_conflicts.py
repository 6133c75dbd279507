"""What keeps ``--peft`` from working, or from doing anything."""

from collections.abc import Iterator, Sequence

from mcore_models.families import Family
from mcore_models.peft.config import linears, without_target
from mcore_parallel.pipeline_parallel.stages import Stage
from mcore_train.composition import TrainConfig


def find_adapter_conflicts(
    config: TrainConfig, family: Family, vocab_size: int, stages: Sequence[Stage]
) -> Iterator[str]:
    """Name what contradicts the adapters, one line each."""
    peft, experts = config.peft, config.experts
    if peft.peft == "none":
        return
    names = linears(family.tensor_shapes(config.model, vocab_size, experts))
    if strange := without_target(peft, names):
        known = sorted({name.rpartition(".")[2] for name in names})
        yield (
            f"--lora-target-modules {' '.join(strange)} means no linear of this model: use "
            f"all-linear, words of a name such as {names[0]}, or {', '.join(known)}."
        )
        return
    targets = [name for name in names if peft.is_target(name)]
    if peft.peft == "dora" and any(".experts." in name for name in targets):
        yield "--peft dora has no routed experts: use --peft lora, or other targets."
    if peft.peft_base_bits:
        yield from _base_conflicts(config)
    if config.saving.save_hf:
        yield (
            "--save-hf writes whole models, and --peft saves adapters: leave it out, and "
            "convert a checkpoint instead (mcore-ckpt convert)."
        )
    if experts.num_experts and experts.moe_router_enable_expert_bias:
        rate = experts.moe_router_bias_update_rate
        if rate:
            yield (
                f"--moe-router-bias-update-rate {rate} would change routers that --peft "
                "freezes: set it to 0."
            )
    yield from _empty_stages(targets, stages)


def _base_conflicts(config: TrainConfig) -> Iterator[str]:
    """Name what reads frozen weights past the modules that widen them."""
    name = f"--peft-base-bits {config.peft.peft_base_bits}"
    if config.data_parallelism.is_fully_sharded:
        yield f"{name} leaves no rows to gather by layers: use --use-distributed-optimizer."
    if config.fp8.fp8_format:
        yield f"{name} has no weights that --fp8-format could keep cast: leave one out."
    if config.run.cuda_graph_impl != "none":
        yield f"{name} moves weights in memory, which no CUDA graph follows: leave one out."
    if config.samples.sample_interval:
        yield f"{name} has no weights that --sample-interval could copy: leave one out."


def _empty_stages(targets: Sequence[str], stages: Sequence[Stage]) -> Iterator[str]:
    """Refuse a pipeline stage with nothing to train."""
    if not all(name.startswith("blocks.") for name in targets):
        return
    layers = {int(name.split(".")[1]) for name in targets}
    for number, stage in enumerate(stages):
        if not layers & set(stage.layers):
            yield (
                f"--lora-target-modules means no linear of pipeline stage {number}, which "
                "would have nothing to train: name linears of its layers too, or use fewer "
                "stages."
            )
