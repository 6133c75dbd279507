"""What CUDA graphs of a step, or of its layers, cannot be combined with."""

from collections.abc import Iterator

from mcore_models.config import TransformerConfig
from mcore_train.composition import TrainConfig
from mcore_train.options.expert_conflicts import expert_graph_conflicts


def find_graph_conflicts(config: TrainConfig) -> Iterator[str]:
    """Name what a recorded step or layer cannot hold, one line each: see ``graphs``."""
    name = f"--cuda-graph-impl {config.run.cuda_graph_impl}"
    is_local = config.run.cuda_graph_impl == "local"
    if config.experts.num_experts and not is_local:
        yield from expert_graph_conflicts(config, name)
    if is_local:
        yield from _layer_graph_conflicts(config, name)
    elif config.parallelism.pipeline_model_parallel_size > 1:
        yield (
            f"{name} cannot record pipeline stages, whose hosts wait for messages: leave it "
            "out, or use --pipeline-model-parallel-size 1."
        )
    if not is_local and config.recomputation.recompute_granularity:
        yield (
            f"{name} cannot record recomputation, which reads random states on the host: leave "
            "out one of the two. Graphs pay for small models, which need no recomputation."
        )
    if config.data.reset_attention_mask or config.data.dataloader_inter_document_masking:
        yield (
            f"{name} cannot record packed documents, whose borders change from step to step: "
            "leave it out."
        )


def _layer_graph_conflicts(config: TrainConfig, name: str) -> Iterator[str]:
    """What graphs of single layers cannot hold."""
    model, parallel = config.model, config.parallelism
    if type(model) is not TransformerConfig:
        yield f"{name} records layers of mcore-train gpt alone: leave it out."
    for option, is_on in (
        ("--num-experts", config.experts.num_experts),
        ("--tensor-model-parallel-size above 1", parallel.tensor_model_parallel_size > 1),
        ("--context-parallel-size above 1", parallel.context_parallel_size > 1),
        ("--mtp-num-layers", model.mtp_num_layers),
        ("--multi-latent-attention", model.multi_latent_attention),
        ("--hybrid-override-pattern", model.hybrid_override_pattern),
        ("--qk-clip", config.qk_clipping.qk_clip),
    ):
        if is_on:
            yield f"{name} was not tried with {option} on a GPU: leave out one of the two."
    if config.pipeline.splits_backward or config.pipeline.overlap_moe_expert_parallel_comm:
        yield (
            f"{name} cannot cut a layer's backward: use --pipeline-schedule 1f1b or "
            "interleaved, without --overlap-moe-expert-parallel-comm."
        )
    modules = config.recomputation.recompute_modules
    cheap = {"layernorm", "mlp_act", "moe_act"}
    granularity = config.recomputation.recompute_granularity
    if granularity == "full" or (granularity and not set(modules) <= cheap):
        yield (
            f"{name} cannot record recomputation that reads random states on the host: use "
            "--recompute-granularity selective with --recompute-modules layernorm, mlp_act or "
            "moe_act."
        )
