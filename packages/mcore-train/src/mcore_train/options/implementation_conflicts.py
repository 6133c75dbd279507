"""What keeps ``--transformer-impl transformer_engine`` from computing a run."""

from collections.abc import Iterator

from mcore_models.building.layouts import cp_comm_type
from mcore_models.families import Family
from mcore_train.composition import TrainConfig


def find_implementation_conflicts(config: TrainConfig, family: Family) -> Iterator[str]:
    """Name what Transformer Engine is not used for, one line each."""
    name, model = "--transformer-impl transformer_engine", config.model
    own, experts = "leave one of the two out", config.experts
    if not (config.precision.bf16 or config.precision.fp16):
        yield f"{name} computes in 16 bits: give --bf16 or --fp16."
    if family.name != "gpt":
        yield f"{name} computes mcore-train gpt, not {family.name}: leave it out."
    if model.hybrid_override_pattern:
        yield f"{name} has no layers of --hybrid-override-pattern: {own}."
    if config.fp8.fp8_recipe == "rowwise":
        yield f"{name} has no --fp8-recipe rowwise: use tensorwise, delayed or blockwise."
    for is_on, flag in (
        (experts.num_experts and experts.moe_experts_dtype, "--moe-experts-dtype"),
        (config.data_parallelism.fp8_param_gather, "--fp8-param-gather"),
        (config.run.cuda_graph_impl != "none", "--cuda-graph-impl"),
        (config.run.deterministic_mode, "--deterministic-mode"),
        (config.offloading.cpu_offloading, "--cpu-offloading"),
        (config.peft.peft != "none", "--peft"),
    ):
        if is_on:
            yield f"{name} was not tried with {flag}: {own}."
    if config.kernels.attention_backend == "auto":
        yield from _attention_conflicts(config)


def _attention_conflicts(config: TrainConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallelism
    name = "attention by --transformer-impl transformer_engine"
    instead = "name an --attention-backend, which is then this package's"
    if model.attention_chunk_size:
        yield f"{name} has no --attention-chunk-size: {instead}."
    if model.softmax_type != "vanilla":
        yield f"{name} is not given --softmax-type {model.softmax_type}: {instead}."
    if model.position_embedding_type == "alibi":
        yield f"{name} is not given the slopes of --position-embedding-type alibi: {instead}."
    if parallel.context_parallel_size > 1:
        kinds = {cp_comm_type(model, parallel, layer) for layer in range(model.num_layers)}
        if kinds - {"a2a"}:
            yield f"{name} needs --cp-comm-type a2a over context ranks: give it, or {instead}."
