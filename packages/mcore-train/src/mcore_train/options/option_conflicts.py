"""Options that contradict each other, or have no effect, in a world of any size.

Schedules and recomputation, kernels and deterministic bits, reports and files. Pure,
like ``resolution``, which adds these lines to its own.
"""

from collections.abc import Iterator, Sequence
from math import isfinite

from mcore_base.field_checks import flag
from mcore_data.config import DataConfig
from mcore_models.config import TransformerConfig
from mcore_parallel.pipeline_parallel.stages import Stage
from mcore_parallel.precision.config import Fp8Config
from mcore_train.composition import TrainConfig, flat
from mcore_train.config import SampleConfig
from mcore_train.options.expert_conflicts import find_expert_conflicts
from mcore_train.options.graph_conflicts import find_graph_conflicts
from mcore_train.options.idle_options import find_idle_options


def endless_numbers(config: TrainConfig) -> list[str]:
    """Name the options that are nan or infinite, which no comparison finds, one line each."""
    return [
        f"{flag(name)} {value} is no finite number: give one."
        for name, value in flat(config).items()
        if isinstance(value, float) and not isfinite(value)
    ]


def find_option_conflicts(config: TrainConfig) -> Iterator[str]:
    """Name the options that contradict each other or have no effect, one line each."""
    yield from find_idle_options(config)
    if config.precision.precision == "auto":
        yield "--precision auto is chosen where a run trains: give --bf16 or --fp16 here."
    pipeline = config.pipeline
    if pipeline.splits_backward and config.recomputation.recompute_granularity == "full":
        yield (
            "--recompute-granularity full avoids keeping what --pipeline-schedule "
            f"{pipeline.pipeline_schedule} keeps until weight gradients are computed: use "
            "1f1b, or selective recomputation."
        )
    if config.parallelism.pipeline_model_parallel_size == 1:
        if pipeline.pipeline_schedule == "auto":
            yield (
                "--pipeline-schedule auto has no effect with --pipeline-model-parallel-size 1: "
                "leave it out."
            )
        for is_on, name in (
            (pipeline.overlap_p2p_communication, "--no-overlap-p2p-communication"),
            (pipeline.batch_p2p_communication, "--no-batch-p2p-communication"),
        ):
            if not is_on:
                yield (
                    f"{name} has no effect with --pipeline-model-parallel-size 1: leave it out."
                )
    is_packed = config.data.reset_attention_mask or (
        config.data.dataloader_inter_document_masking
    )
    if is_packed and config.kernels.attention_backend == "flash4":
        yield (
            "--attention-backend flash4 takes no packed documents (--reset-attention-mask, "
            "--dataloader-inter-document-masking): use auto."
        )
    yield from _optimizer_conflicts(config)
    yield from _state_conflicts(config)
    if config.data_parallelism.is_fully_sharded:
        yield from _sharding_conflicts(config)
    if config.offloading.cpu_offloading:
        yield from _offload_conflicts(config)
    yield from _clip_conflicts(config)
    yield from _recompute_conflicts(config)
    yield from _determinism_conflicts(config)
    yield from find_expert_conflicts(config)
    if config.run.cuda_graph_impl != "none":
        yield from find_graph_conflicts(config)
    if config.logging.tensorboard and "://" in config.saving.save:
        yield f"--tensorboard cannot write to {config.saving.save}: give --save a folder."


def find_data_conflicts(data: DataConfig, *, evaluates: bool) -> Iterator[str]:
    """Say what is wrong with the sources of a run, one line each."""
    sources = (
        data.mock_data,
        data.data_path,
        data.train_data_path,
        data.data_args_path,
        data.per_split_data_args_path,
        data.data_mixture_path,
    )
    is_external = data.dataloader_type == "external"
    if is_external and any(sources):
        yield (
            "--dataloader-type external takes its batches from the caller: leave --data-path "
            "and the other sources out."
        )
    if is_external and data.full_validation:
        yield "--full-validation needs the length of the data: external data have none."
    if not is_external and not any(sources):
        yield "what to train on? Give --data-path PREFIX, or --mock-data for made-up tokens."
    if data.create_attention_mask_in_dataloader:
        yield (
            "--create-attention-mask-in-dataloader makes masks that training has no use for: "
            "leave it out (--reset-attention-mask works by the borders of documents)."
        )
    if data.reset_attention_mask and data.dataloader_inter_document_masking:
        yield (
            "--reset-attention-mask (borders at end-of-document tokens) and "
            "--dataloader-inter-document-masking (borders of the stored documents) contradict: "
            "leave one out."
        )
    if data.full_validation and not evaluates:
        yield "--full-validation has no effect without --eval-interval and --eval-iters."


def find_sample_conflicts(config: TrainConfig, dataset: str) -> Iterator[str]:
    """Say which options of plain text have no effect on samples of sentences."""
    if dataset == "gpt":
        return
    for name in (
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
        "dataloader_inter_document_masking",
        "sft",
        "multiple_validation_sets",
        "data_mixture_path",
        "data_cache_path",
    ):
        if getattr(config.data, name):
            flag = "--" + name.replace("_", "-")
            yield f"{flag} has no effect on {dataset} samples: leave it out."
    parallel, decoder = config.parallelism, getattr(config.batch, "decoder_seq_length", 0)
    cp = parallel.context_parallel_size
    cuts = cp * (2 if cp > 1 else 1)
    cuts *= parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    if decoder % cuts:
        yield (
            f"--decoder-seq-length {decoder} cannot be cut by context and tensor ranks: use a "
            f"multiple of {cuts}, such as {-(-decoder // cuts) * cuts}."
        )
    limit = config.model.max_position_embeddings
    if limit and decoder > limit:
        yield (
            f"--decoder-seq-length {decoder} is longer than --max-position-embeddings {limit}: "
            "use as many or fewer."
        )
    if config.fim.fim_data:
        yield f"--fim-data rewrites plain text, not {dataset} samples: leave it out."


def _optimizer_conflicts(config: TrainConfig) -> Iterator[str]:
    if config.model.use_mup and config.optimizer.optimizer != "adam":
        yield "--use-mup sets rates for Adam only: use --optimizer adam."
    if config.model.use_mup and config.peft.peft != "none":
        yield "--use-mup sets no rates for adapters: leave it out, or --peft."
    if config.model.use_mup and config.model.softmax_scale:
        yield "--use-mup sets the scale of scores: leave out --softmax-scale."


def misplaced_predictions(stages: Sequence[Stage], config: TrainConfig) -> Iterator[str]:
    """Name what is wrong with the layers m of a pipeline layout."""
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
    # They embed tokens, as the first stage does, and a tied head on the last.
    is_tied = not config.model.untie_embeddings_and_output_weights
    others = [s for s in stages if s.has_embedding or (s.has_loss and is_tied)]
    is_shared = config.pipeline.v_shaped and stage.has_loss
    if not is_shared and any(s.rank == stage.rank for s in others if s is not stage):
        yield (
            "--pipeline-model-parallel-layout places the layers m on another stage of a rank "
            "that holds the embedding already: move them to that stage, or to another rank."
        )


def _state_conflicts(config: TrainConfig) -> Iterator[str]:
    """What formats of main weights and gradients need."""
    if config.main_weights.main_params_dtype == "bf16":
        if not config.precision.bf16:
            yield "--main-params-dtype bf16 has no effect without --bf16."
        engine = config.data_parallelism
        if engine.is_fully_sharded and engine.main_grads_dtype == "fp32":
            yield (
                f"--main-params-dtype bf16: {engine.sharding} keeps rows of float32, which are "
                "the main weights: add --main-grads-dtype bf16, with which rows are bf16 too."
            )
    is_cast = config.fp8.fp8_format and config.fp8.fp8_recipe == "tensorwise"
    has_main = config.precision.bf16 and config.main_weights.main_params_dtype == "fp32"
    if config.data_parallelism.fp8_param_gather and not (is_cast and has_main):
        yield (
            "--fp8-param-gather needs --bf16 with main weights in float32, and --fp8-format "
            "with --fp8-recipe tensorwise, whose casts it sends."
        )
    if config.data_parallelism.main_grads_dtype == "bf16" and not config.precision.bf16:
        yield "--main-grads-dtype bf16 has no effect without --bf16."
    is_wide = not (config.precision.bf16 or config.precision.fp16 or config.precision.precision)
    if config.data_parallelism.grad_reduce_in_bf16 and is_wide:
        yield "--grad-reduce-in-bf16 has no effect without --bf16 or --fp16: leave it out."


def find_fp8_conflicts(config: Fp8Config, num_layers: int) -> Iterator[str]:
    """Say that fp8 has no layers, where all are kept out of it."""
    first, last = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
    if config.first_last_layers_bf16 and first + last >= num_layers:
        yield (
            f"--num-layers-at-start-in-bf16 {first} and --num-layers-at-end-in-bf16 {last} "
            f"keep all {num_layers} layers out of fp8: lower them, or leave --fp8-format out."
        )


def _offload_conflicts(config: TrainConfig) -> Iterator[str]:
    """What activations in host memory cannot be combined with."""
    if config.recomputation.recompute_granularity:
        yield (
            "--cpu-offloading keeps what --recompute-granularity makes again: leave one out. "
            "Offload where copies hide under computation, recompute elsewhere."
        )
    if config.run.cuda_graph_impl != "none":
        yield (
            f"--cuda-graph-impl {config.run.cuda_graph_impl} cannot record --cpu-offloading, "
            "whose copies the host orders: leave one out."
        )


def find_offload_conflicts(config: TrainConfig, stages: Sequence[Stage]) -> Iterator[str]:
    """Refuse to offload the last layer of a stage, whose backward comes at once."""
    number = config.offloading.cpu_offloading_num_layers
    fewest = min((len(stage.layers) for stage in stages), default=0)
    if config.offloading.cpu_offloading and number >= fewest > 0:
        yield (
            f"--cpu-offloading-num-layers {number} must be less than the {fewest} layers of "
            "the smallest pipeline stage: the last one's activations are needed at once."
        )


def _sharding_conflicts(config: TrainConfig) -> Iterator[str]:
    """What weights that are gathered layer by layer cannot be combined with."""
    name = f"--data-parallel-sharding-strategy {config.data_parallelism.sharding}"
    if config.pipeline.splits_backward:
        yield (
            f"{name} sums a layer's gradients in its backward, and --pipeline-schedule "
            f"{config.pipeline.pipeline_schedule} makes those of weights later: use 1f1b or "
            "interleaved, or optim."
        )
    if config.run.cuda_graph_impl != "none":
        yield (
            f"--cuda-graph-impl {config.run.cuda_graph_impl} cannot record {name}, whose "
            "weights move in memory: leave out one of the two."
        )


def _clip_conflicts(config: TrainConfig) -> Iterator[str]:
    """Say where QK-clip does nothing, or not what it is for."""
    model = config.model
    if not config.qk_clipping.qk_clip:
        return
    has_norms = model.qk_layernorm and not model.multi_latent_attention
    if has_norms or model.qk_l2_norm:
        yield (
            "--qk-clip scales what --qk-layernorm or --qk-l2-norm norms again, without effect: "
            "leave it out."
        )
    if model.attn_logit_softcapping > 0:
        yield "--qk-clip bounds scores that --attn-logit-softcapping bounds: leave out one."
    if type(model) is not TransformerConfig:
        yield "--qk-clip scales causal models alone, not BERT or T5: leave it out."
    if model.hybrid_override_pattern and "*" not in model.hybrid_override_pattern:
        yield "--qk-clip has no effect without attention layers: leave it out."
    if config.peft.peft != "none":
        yield "--qk-clip scales weights that --peft freezes: leave it out."


def _recompute_conflicts(config: TrainConfig) -> Iterator[str]:
    options, parallel = config.recomputation, config.parallelism
    if options.distribute_saved_activations and (
        parallel.tensor_model_parallel_size == 1 or parallel.sequence_parallel
    ):
        yield (
            "--distribute-saved-activations has no effect with --tensor-model-parallel-size 1, "
            "nor with --sequence-parallel, which cuts them already: leave it out."
        )
    if options.recompute_granularity != "selective":
        return
    for module in options.recompute_modules:
        if module in ("moe", "moe_act", "shared_experts") and not config.experts.num_experts:
            yield f"--recompute-modules {module} has no effect without --num-experts."
        if module == "mla_up_proj" and not config.model.multi_latent_attention:
            flag = "--multi-latent-attention"
            yield f"--recompute-modules {module} has no effect without {flag}."


def _determinism_conflicts(config: TrainConfig) -> Iterator[str]:
    if config.run.deterministic_mode and config.kernels.attention_backend == "fused":
        yield (
            "--deterministic-mode cannot use --attention-backend fused, whose backward adds in "
            "any order: leave it out, or use flash4, flash or unfused."
        )


def find_text_conflicts(
    samples: SampleConfig, dataset: str, tokenizer_vocab_size: int
) -> Iterator[str]:
    """Name what keeps a run from writing texts.

    Args:
        samples: the options.
        dataset: kind of samples that the family trains on.
        tokenizer_vocab_size: tokens of the tokenizer; 0 where there is none.
    """
    if not samples.sample_interval:
        return
    if dataset != "gpt":
        yield "--sample-interval needs a model that predicts next tokens: leave it out."
    elif not tokenizer_vocab_size:
        yield "--sample-interval writes text: give --tokenizer-model."
