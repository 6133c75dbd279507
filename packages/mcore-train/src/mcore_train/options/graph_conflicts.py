"""What CUDA graphs of a step, or of its layers, cannot be combined with."""

from collections.abc import Iterator

from mcore_models.config import TransformerConfig
from mcore_train.composition import TrainConfig
from mcore_train.options.expert_conflicts import expert_graph_conflicts

_DRAW_NOTHING = frozenset({"layernorm", "mlp_act", "moe_act"})
"""Of ``--recompute-modules``: made again by elementwise operations alone."""


def find_graph_conflicts(config: TrainConfig) -> Iterator[str]:
    """Name what a recorded step or layer cannot hold, one line each: see ``graphs``."""
    name = f"--cuda-graph-impl {config.run.cuda_graph_impl}"
    if config.run.cuda_graph_impl == "local":
        yield from _layer_graph_conflicts(config, name)
    else:
        if config.experts.num_experts:
            yield from expert_graph_conflicts(config, name)
        if config.parallelism.pipeline_model_parallel_size > 1:
            yield (
                f"{name} cannot record pipeline stages, whose hosts wait for messages: use "
                "local, or --pipeline-model-parallel-size 1."
            )
    yield from _recompute_conflicts(config, name)
    if config.experts.moe_router_load_balancing_type == "sinkhorn":
        yield (
            f"{name} cannot record --moe-router-load-balancing-type sinkhorn, for whose rounds "
            "the host waits: leave out one of the two."
        )
    if config.data.reset_attention_mask or config.data.dataloader_inter_document_masking:
        yield (
            f"{name} cannot record packed documents, whose borders change from step to step: "
            "leave it out."
        )


def _layer_graph_conflicts(config: TrainConfig, name: str) -> Iterator[str]:
    """What graphs of single layers cannot hold."""
    model, recomputation, parallel = config.model, config.recomputation, config.parallelism
    for option, size in (
        ("--tensor-model-parallel-size", parallel.tensor_model_parallel_size),
        ("--context-parallel-size", parallel.context_parallel_size),
    ):
        if size > 1:
            yield (
                f"{name} was not tried on GPUs with {option} {size}, whose messages would be "
                "in the graphs: leave out one of the two."
            )
    if type(model) is not TransformerConfig:
        yield f"{name} records layers of mcore-train gpt alone: leave it out."
    if config.experts.num_experts and model.parallel_residual != "off":
        for problem in expert_graph_conflicts(config, name):
            yield f"{problem} Beside attention (--parallel-residual) they cannot be left out."
    if config.pipeline.splits_backward or config.pipeline.overlap_moe_expert_parallel_comm:
        yield (
            f"{name} cannot cut a layer's backward: use --pipeline-schedule 1f1b or "
            "interleaved, without --overlap-moe-expert-parallel-comm."
        )
    if recomputation.recompute_method != "block" and recomputation.recompute_num_layers > 1:
        yield (
            f"{name} recomputes layers one by one: use --recompute-num-layers 1, or "
            "--recompute-method block."
        )


def _recompute_conflicts(config: TrainConfig, name: str) -> Iterator[str]:
    """What is recomputed draws no random numbers, whose state the host would read."""
    granularity = config.recomputation.recompute_granularity
    modules = set(config.recomputation.recompute_modules)
    if not granularity or (granularity == "selective" and modules <= _DRAW_NOTHING):
        return
    model, experts = config.model, config.experts
    for option, value in (
        ("--attention-dropout", model.attention_dropout),
        ("--hidden-dropout", model.hidden_dropout),
        ("--moe-input-jitter-eps", experts.moe_input_jitter_eps),
    ):
        if value:
            yield (
                f"{name} cannot record recomputation that draws {option} {value} again, for "
                "which the host reads a random state: use 0, or --recompute-granularity "
                f"selective with --recompute-modules {', '.join(sorted(_DRAW_NOTHING))}."
            )
