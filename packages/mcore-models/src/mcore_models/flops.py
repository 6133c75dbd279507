"""Size and cost of a model: parameters, FLOPs and bytes, from configs alone.

FLOPs are those of the model, not of the machine: forward and backward (three times the
forward), the causal half of attention, nothing for recomputation, embedding lookup, norms or
the router. MFU is tokens per second times ``flops_per_token`` divided by the GPU's peak.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from mcore_models.config import RecomputeConfig, TransformerConfig, chunk, window
from mcore_models.encoder_config import (
    BertConfig,
    T5Config,
    decoder_layers,
    encoder_layers,
    feed_forward,
)
from mcore_models.logical_tensors import (
    delta_sizes,
    expert_size,
    ffn_size,
    further_mixers,
    head_dim,
    is_gated,
    layer_config,
    layer_mixers,
    mamba_sizes,
    num_kv_heads,
    tensor_shapes,
    value_dim,
)
from mcore_models.memory_changes import (
    CODE_BYTES,
    OptimizerChoice,
    exchange_elements,
    fp8_bytes,
    fuller,
    optimizer_bytes,
    waiting_elements,
)
from mcore_models.parameter_kinds import tensor_kind
from mcore_moe.config import MoEConfig
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.offloading.config import OffloadConfig
from mcore_parallel.optimizers.config import MainWeightsConfig
from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_parallel.pipeline_parallel.stages import Stage, build_stages, stages_of_rank
from mcore_parallel.precision.config import Fp8Config

ShapesOf = Callable[..., Mapping[str, tuple[int, ...]]]
"""Lists the logical tensors of a model from its config, its vocabulary and its experts."""

_NO_EXPERTS = MoEConfig()
_KEEP_ALL = RecomputeConfig()
_WHOLE_OPTIMIZER = DataParallelConfig()
_ADAM = OptimizerChoice()
_MAIN_WEIGHTS = MainWeightsConfig()
_NO_OFFLOAD = OffloadConfig()
_EVEN_STAGES = PipelineConfig()
_NO_FP8 = Fp8Config()
_FIRST = ("embedding.", "position_embedding.", "per_layer_embedding.", "altup_projections.")
_DELTA_CHUNK = 64  # ``kernels.delta.CHUNK``; that module needs torch
_LAYER = re.compile(r"(?:(encoder|decoder)\.)?blocks\.(\d+)\.|mtp\.\d+\.")


def num_parameters(
    config: TransformerConfig,
    vocab_size: int,
    moe: MoEConfig = _NO_EXPERTS,
    shapes_of: ShapesOf = tensor_shapes,
) -> int:
    """Count the elements of all logical tensors: unpadded vocabulary, tied tables once."""
    return sum(count_elements(shapes_of(config, vocab_size, moe)).values())


def num_active_parameters(
    config: TransformerConfig,
    vocab_size: int,
    moe: MoEConfig = _NO_EXPERTS,
    shapes_of: ShapesOf = tensor_shapes,
) -> int:
    """Count the elements used for one token: all dense tensors and k experts of each layer."""
    counts = count_elements(shapes_of(config, vocab_size, moe))
    expert = counts["experts"] // max(1, moe.num_experts)  # one expert in all layers
    return sum(counts.values()) - expert * max(0, moe.num_experts - moe.moe_router_topk)


def flops_per_token(
    config: TransformerConfig,
    padded_vocab_size: int,
    seq_length: int,
    moe: MoEConfig = _NO_EXPERTS,
) -> float:
    """Return ``model_flops`` of one full sequence divided by its tokens."""
    return model_flops(config, padded_vocab_size, [seq_length], moe) / seq_length


def model_flops(
    config: TransformerConfig,
    padded_vocab_size: int,
    seq_lengths: Sequence[int],
    moe: MoEConfig = _NO_EXPERTS,
) -> int:
    """Return the floating-point operations of forward and backward over some sequences.

    Args:
        config: of the model.
        padded_vocab_size: columns that the head computes.
        seq_lengths: tokens of each sequence; packed sequences count separately.
        moe: experts of the model.

    Returns:
        Multiplications and additions, each counted as one.

    Reference:
        Narayanan et al. 2021, arXiv:2104.04473, appendix; with the causal half of attention
        and grouped key/value heads. Megatron counts the same, except for windows. Recurrent
        layers count as their recurrence, not as what chunks compute.
    """
    N = config.num_attention_heads
    matrices = {
        name: prod(shape)
        for name, shape in tensor_shapes(config, 0, moe).items()
        if tensor_kind(name, shape) == "matrix"
    }
    routed = sum(size for name, size in matrices.items() if ".experts." in name)
    active = routed * moe.moe_router_topk // max(1, moe.num_experts)
    weights = (1 + config.mtp_num_layers) * config.hidden_size * padded_vocab_size
    weights += sum(matrices.values()) - routed + active
    mixers, last = layer_mixers(config, moe), config.num_layers - 1
    mixers += (further_mixers(config, moe),) * config.mtp_num_layers
    # Twice the pairs of query and key (S * S in a causal layer of S tokens), times channels.
    # Layers of multi-token prediction count like the last layer.
    configs = [layer_config(config, layer) for layer in range(config.num_layers)]
    channels = [head_dim(layer) + value_dim(layer) for layer in configs]
    pairs = sum(
        channels[min(layer, last)]
        * _doubled_pairs(
            length,
            config.dsa_indexer_topk - 1 if name == "mla" else window(config, min(layer, last)),
            chunk(config, min(layer, last)),
        )
        for length in seq_lengths
        for layer, names in enumerate(mixers)
        for name in names
        if name in ("attention", "mla")
    )
    # A token writes and reads each element of the state of Mamba and of lightning attention
    # once; lightning attention has H x H elements for each head.
    num_states = sum("mamba" in names for names in mixers)
    states = num_states and num_states * mamba_sizes(config).inner * config.mamba_state_dim
    states += sum("lightning" in names for names in mixers) * N * head_dim(config) ** 2
    # A token reads by key, writes, and reads by query each element of a delta net's state.
    num_nets = sum(bool({"delta_net", "kda"} & {*names}) for names in mixers)
    memories = num_nets * delta_sizes(config).values * config.linear_key_head_dim
    # 3 passes x 2 operations for each weight and token; scores and their mix for each pair.
    tokens = sum(seq_lengths)
    recurrent = tokens * (12 * states + 18 * memories)
    return 6 * tokens * weights + 3 * N * pairs + recurrent


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """Estimated memory of the rank that needs most, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    host: int = 0
    """Optimizer state and activations in host memory (``OffloadConfig``); not in ``total``."""
    disk: int = 0
    """State in a file, read and written once a step; not in ``total``."""

    @property
    def total(self) -> int:
        """Bytes on the device, without temporary buffers and fragmentation."""
        return self.weights + self.gradients + self.optimizer + self.activations


def rank_bytes(
    config: TransformerConfig,
    vocab_size: int,
    parallel: ParallelConfig,
    *,
    world_size: int,
    seq_length: int,
    micro_batch_size: int = 1,
    num_microbatches: int = 0,
    moe: MoEConfig = _NO_EXPERTS,
    recomputing: RecomputeConfig = _KEEP_ALL,
    data_parallel: DataParallelConfig = _WHOLE_OPTIMIZER,
    optimizer: OptimizerChoice = _ADAM,
    main_weights: MainWeightsConfig = _MAIN_WEIGHTS,
    offload: OffloadConfig = _NO_OFFLOAD,
    pipeline: PipelineConfig = _EVEN_STAGES,
    fp8: Fp8Config = _NO_FP8,
    weight_bytes: int = 2,
    decoder_seq_length: int = 0,
    widened_bytes: int = 0,
    shapes_of: ShapesOf = tensor_shapes,
) -> RankBytes:
    """Estimate the training memory of the rank that needs most.

    Estimates two pipeline ranks with the layers and tables of their stages, and returns the
    larger estimate: the rank with the most weights, and the rank that stores activations of the
    most layers, counted for each micro-batch in flight. Measured peaks on GPUs
    (``benchmarks/results``) are 1 % to 6 % higher because of temporary buffers.

    Args:
        config: of the model.
        vocab_size: true number of tokens.
        parallel: the parallel sizes.
        world_size: ranks.
        seq_length: tokens of a sequence.
        micro_batch_size: sequences of a forward pass.
        num_microbatches: micro-batches of a rank in a step; 0: enough to fill the pipeline.
        moe: experts of the model.
        recomputing: activations that backward recomputes.
        data_parallel: state sharded over data ranks (ZeRO-1, 2 or 3), and dtype of gradients.
        optimizer: determines the state of weights and matrices.
        main_weights: whether 16-bit weights have float32 main weights.
        offload: which state is in host memory.
        pipeline: stages on each rank.
        fp8: GEMMs that keep casts of weights and inputs.
        weight_bytes: bytes of a parameter or activation: 2 for bf16, 4 for float32.
        decoder_seq_length: tokens of a T5's decoder; 0: as many as in the encoder.
        widened_bytes: bytes of a layer's dequantized weights while the layer computes.
        shapes_of: lists the tensors, ``Family.tensor_shapes``.

    Raises:
        ValueError: if the layers cannot be split over the pipeline ranks.
    """
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    expert_tp = parallel.expert_tensor_parallel_size or tp
    expert_ranks = expert_tp * parallel.expert_model_parallel_size
    shapes = shapes_of(config, vocab_size, moe)
    matrices = optimizer.matrices(shapes)
    stages = rank_stages(config, moe, parallel, pipeline)
    elements = rank_elements(config, shapes, stages)
    in_matrices = rank_elements(config, matrices, stages)
    num_layers = [
        sum(len(stage.layers) + stage.has_mtp * config.mtp_num_layers for stage in held_stages)
        for held_stages in stages
    ]
    passes = [
        _passes_held(rank, pp, pipeline, num_microbatches, max(1, num))
        for rank, num in enumerate(num_layers)
    ]
    dense_ranks, data_ranks = 1, 1
    if data_parallel.sharding != "no_shard":
        instances = parallel.num_distributed_optimizer_instances
        dense_ranks = world_size // (tp * pp) // instances
        data_ranks = world_size // (expert_ranks * pp) // instances
    gradient_bytes = weight_bytes if data_parallel.has_narrow_grads else 4
    casts, change = fp8_bytes(fp8, config, shapes, parallel, moe, weight_bytes)
    tokens = seq_length * micro_batch_size // parallel.context_parallel_size
    waiting, copied = waiting_elements(config, parallel, moe, tokens, num_microbatches or pp)
    # The head computes one chunk of logits at a time, if this rank has the loss.
    logits = float(min(tokens, 4096))
    if isinstance(config, (BertConfig, T5Config)):  # all logits, twice in float32 too
        scored_length = decoder_seq_length or seq_length
        logits = tokens * scored_length / seq_length * (weight_bytes + 8) / weight_bytes
    passing = _passing_bytes(config, moe, fp8, tokens // tp, weight_bytes)
    passing = max(passing, weight_bytes * _expert_rows_elements(config, parallel, moe, tokens))
    passing += widened_bytes
    # State by matrix: the ranks of a stage divide the stage's matrices among them, each matrix
    # complete on one rank, also if weights are sharded.
    by_matrix = [optimizer.matrix_bytes(shape) for shape in matrices.values()]
    by_matrix_bytes = max(sum(by_matrix) // world_size, max(by_matrix, default=0))

    def estimate_rank(rank: int) -> RankBytes:
        """Estimate the memory of one pipeline rank."""
        counts = elements[rank]
        has_loss = any(stage.has_loss for stage in stages[rank])
        experts = counts["experts"] // expert_ranks
        ends, layers = (counts["embedding"] + counts["head"]) // tp, counts["layers"] // tp
        dense = ends + layers
        weights, gradients = dense + experts, dense + experts
        # Weights whose optimizer state is on this rank.
        updated = dense // dense_ranks + experts // data_ranks
        kept = _kept_elements(
            config,
            parallel,
            tokens,
            moe,
            recomputing,
            num_layers[rank],
            has_loss,
            change / weight_bytes,
            decoder_seq_length / seq_length or 1.0,
        )
        # Temporary tensors, of which only the larger is live at the peak: logits or copies, and
        # the widest gradient within a layer.
        brief = weight_bytes * max(copied, int(has_loss * logits * vocab_size // tp))
        live, sharded_bytes, kept_casts, bytes_each = passing, 0, casts // pp, gradient_bytes
        stage_layers = max(1, num_layers[rank])
        if data_parallel.is_fully_sharded:
            # Gathered weights: embedding and head, and all layers or the layer in use and the
            # next one. float32 rows are main weights, which are counted as state.
            layer = (layers + experts) // stage_layers
            is_whole = data_parallel.sharding == "optim_grads"
            weights = ends + (layers + experts if is_whole else 2 * layer)
            kept_casts, bytes_each = 0, 4  # casts are not kept
            if data_parallel.main_grads_dtype == "bf16":
                bytes_each, weights = 2, weights + updated
            # Before the reduce-scatter a gradient is whole: of the head, or of one layer.
            head_peak, layer_peak = (brief, counts["head"] // tp), (passing, layer)
            live, gradients = fuller(head_peak, layer_peak, bytes_each)
            sharded_bytes, brief = bytes_each * updated, 0
        # The layer in use and the layer being copied stay on the GPU.
        offloaded_share = max(0, offload.cpu_offloading_num_layers - 1) / stage_layers
        offloaded = int(offloaded_share * kept * passes[rank]) if offload.cpu_offloading else 0
        updated_in_matrices = in_matrices[rank]["layers"] // tp // dense_ranks
        updated_in_matrices += in_matrices[rank]["experts"] // expert_ranks // data_ranks
        state, offloaded_state = optimizer_bytes(
            updated,
            updated_in_matrices,
            optimizer,
            main_weights,
            data_parallel,
            offload,
            weight_bytes,
        )
        on_disk = bool(offload.optimizer_offload_dir)
        return RankBytes(
            weights=weight_bytes * weights + kept_casts,
            gradients=sharded_bytes + bytes_each * gradients,
            optimizer=state + by_matrix_bytes,
            activations=weight_bytes * (int(kept * passes[rank]) - offloaded + waiting)
            + max(brief, live),
            host=(not on_disk) * offloaded_state + weight_bytes * offloaded,
            disk=on_disk * offloaded_state,
        )

    sizes = [local_elements(counts, parallel) for counts in elements]
    stored_layers = [num * held for num, held in zip(num_layers, passes, strict=True)]
    # ``index`` returns the first of equal ranks.
    candidates = sizes.index(max(sizes)), stored_layers.index(max(stored_layers))
    return max(map(estimate_rank, candidates), key=lambda estimate: estimate.total)


def rank_stages(
    config: TransformerConfig,
    moe: MoEConfig,
    parallel: ParallelConfig,
    pipeline: PipelineConfig,
) -> tuple[tuple[Stage, ...], ...]:
    """Return the pipeline stages of each pipeline rank."""
    pp = parallel.pipeline_model_parallel_size
    return _rank_stages(pipeline, len(stack_mixers(config, moe)), pp)


@lru_cache(maxsize=64)
def _rank_stages(
    pipeline: PipelineConfig, num_layers: int, pp: int
) -> tuple[tuple[Stage, ...], ...]:
    stages = build_stages(pipeline, num_layers, pp)
    return tuple(tuple(stages_of_rank(stages, rank)) for rank in range(pp))


def rank_elements(
    config: TransformerConfig,
    shapes: Mapping[str, tuple[int, ...]],
    stages: tuple[tuple[Stage, ...], ...],
) -> tuple[Counter[str], ...]:
    """Count the elements that each pipeline rank holds, by the kinds of ``count_elements``.

    Tensor and expert ranks are counted together (``local_elements`` divides). A rank with a
    tied head or with layers of multi-token prediction has a copy of the embedding.

    Args:
        config: of the model.
        shapes: of the logical tensors, or their sums by ``sum_by_layer``.
        stages: of each pipeline rank.
    """
    num_encoder_layers = encoder_layers(config) if isinstance(config, T5Config) else 0
    is_tied = not config.untie_embeddings_and_output_weights
    return _rank_elements(
        tuple(shapes.items()), stages, num_encoder_layers, is_tied, config.mtp_num_layers
    )


@lru_cache(maxsize=64)
def _rank_elements(
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    stages: tuple[tuple[Stage, ...], ...],
    num_encoder_layers: int,
    is_tied: bool,
    num_mtp_layers: int,
) -> tuple[Counter[str], ...]:
    # Elements by layer, counted over encoder and decoder, and of "mtp", "embedding" and "loss".
    counts_of: defaultdict[int | str, Counter[str]] = defaultdict(Counter)
    for name, shape in shapes:
        if match := _LAYER.match(name):
            first = num_encoder_layers * (match[1] == "decoder")
            part = first + int(match[2]) if match[2] else "mtp"
        else:
            is_first = "embedding" in name.partition(".")[0] or name.startswith(_FIRST)
            part = "embedding" if is_first else "loss"
        counts_of[part][_element_kind(name)] += prod(shape)
    table = prod(dict(shapes).get("embedding.weight", (0,)))
    ranks = []
    for held_stages in stages:
        counts: Counter[str] = Counter()
        for stage in held_stages:
            for layer in stage.layers:
                counts.update(counts_of[layer])
        has_loss = any(stage.has_loss for stage in held_stages)
        has_mtp = num_mtp_layers > 0 and any(stage.has_mtp for stage in held_stages)
        if any(stage.has_embedding for stage in held_stages):
            counts.update(counts_of["embedding"])
        elif (has_loss and is_tied) or has_mtp:
            counts["embedding"] += table
        if has_loss:
            counts.update(counts_of["loss"])
        if has_mtp:
            counts.update(counts_of["mtp"])
        ranks.append(counts)
    return tuple(ranks)


def local_elements(counts: Mapping[str, int], parallel: ParallelConfig) -> int:
    """Return the elements that one tensor and expert rank holds of a pipeline rank's."""
    tp = parallel.tensor_model_parallel_size
    expert_tp = parallel.expert_tensor_parallel_size or tp
    experts = counts["experts"] // (expert_tp * parallel.expert_model_parallel_size)
    return (sum(counts.values()) - counts["experts"]) // tp + experts


def sum_by_layer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return one flat shape for each layer, each layer's experts and each module outside.

    The names are those of tensors, so that ``rank_elements`` takes the result for shapes.
    """
    totals: Counter[str] = Counter()
    for name, shape in shapes.items():
        match = _LAYER.match(name)
        prefix = match[0] if match else f"{name.partition('.')[0]}."
        experts = "moe.experts.0." if ".experts." in name else ""
        totals[f"{prefix}{experts}weight"] += prod(shape)
    return {name: (total,) for name, total in totals.items()}


def _passing_bytes(
    config: TransformerConfig, moe: MoEConfig, fp8: Fp8Config, tokens: int, weight_bytes: int
) -> int:
    """Return the bytes of the widest gradient in a layer: of the output of an MLP's fc1.

    In fp8 the gradient's cast is added. The gradient exists after the head's logits are freed,
    and is larger than the logits from about 20 000 tokens on.
    """
    if not any("mlp" in names for names in stack_mixers(config, moe)):
        return 0
    width = (1 + is_gated(config)) * ffn_size(config)
    codes = CODE_BYTES.get(fp8.fp8_recipe, 1.0) if fp8.fp8_format else 0
    return int(tokens * width * (weight_bytes + codes))


def _expert_rows_elements(
    config: TransformerConfig, parallel: ParallelConfig, moe: MoEConfig, tokens: int
) -> int:
    """Count the elements of the gradient of experts' fc1 output, if rows are fixed; else 0."""
    ep = parallel.expert_model_parallel_size
    if not exchange_elements(config, parallel, moe):
        return 0
    rows = tokens * ep * min(moe.moe_router_topk, moe.num_experts // ep)
    return rows * (1 + is_gated(config)) * expert_size(config, moe)


def _passes_held(
    rank: int, pp: int, pipeline: PipelineConfig, num_microbatches: int, num_layers: int
) -> float:
    """Return the largest number of micro-batches whose activations a pipeline rank holds.

    Equal to the simulator's ``simulate(...).peak_activations`` (in chunks), except for paired
    passes, whose forward stores a layer while their backward frees one.
    """
    vpp = pipeline.num_chunks
    held = float(pp)
    if pipeline.v_shaped:
        held += 0.5 * (pipeline.pipeline_schedule == "dualpipev")
    elif vpp > 1 or pipeline.overlap_moe_expert_parallel_comm:
        group = pipeline.microbatch_group_size_per_virtual_pipeline_stage or pp
        running = 1 + pipeline.overlap_moe_expert_parallel_comm * vpp / num_layers
        held = (2 * (pp - 1 - rank) + (vpp - 1) * group + running) / vpp
    elif not pipeline.splits_backward:
        held -= rank
    return min(held, float(num_microbatches or held))


def _doubled_pairs(length: int, seen: int, chunk_tokens: int = 0) -> int:
    """Return twice the pairs of query and key in a causal layer, the diagonal counted half."""
    if chunk_tokens:
        whole, rest = divmod(length, chunk_tokens)
        return whole * chunk_tokens**2 + rest**2
    width = length if seen < 0 else min(length, seen + 1)
    return width * (2 * length - width)


def count_elements(shapes: Mapping[str, tuple[int, ...]]) -> Counter[str]:
    """Count elements by kind: ``embedding``, ``head``, ``experts``, other ``layers``."""
    counts: Counter[str] = Counter()
    for name, shape in shapes.items():
        counts[_element_kind(name)] += prod(shape)
    return counts


def _element_kind(name: str) -> str:
    if name.startswith(_FIRST):
        return "embedding"
    if name.startswith("head."):
        return "head"
    return "experts" if ".experts." in name else "layers"


def _kept_elements(
    config: TransformerConfig, parallel: ParallelConfig, tokens: int, moe: MoEConfig,
    recomputing: RecomputeConfig, layers: int, has_loss: bool, fp8_change: float,
    decoder_share: float,
) -> int:  # fmt: skip
    """Count the elements of a micro-batch that a pipeline rank stores for backward.

    Counted are the tensors that our layers save, as in Korthikanti et al. 2022,
    arXiv:2205.05198, with fused attention (no scores) and fused activations (no intermediate).

    ``layers``: of the rank. ``has_loss``: the rank has the last stage. ``fp8_change``: elements
    of a token that fp8 adds in all layers, below 0 if fp8 saves. ``decoder_share``: tokens of a
    T5's decoder divided by the encoder's tokens.
    """
    D, tp = config.hidden_size, parallel.tensor_model_parallel_size
    stream = tp if parallel.sequence_parallel else 1
    widths = kept_widths(config, moe)
    mixers = stack_mixers(config, moe)
    if has_loss:
        mixers += (further_mixers(config, moe),) * config.mtp_num_layers
    names = [name for names in mixers for name in names]
    widths["moe"] += exchange_elements(config, parallel, moe)
    # In addition to a mixer's own tensors: its input and the sum that its norm read, in
    # post-norm also the norm's output, and one byte for each element that dropout may drop.
    around = 2.0 * D + 0.5 * D * bool(config.hidden_dropout)
    around += D * (isinstance(config, BertConfig) and config.post_layer_norm)
    if recomputing.recompute_granularity == "selective":
        around -= _forget(widths, set(recomputing.recompute_modules), config)
    latent = config.q_lora_rank + config.kv_lora_rank + config.qk_pos_emb_head_dim
    inner = sum(widths[name] // tp + around / stream for name in names)
    if isinstance(config, T5Config):
        decoder = names[2 * encoder_layers(config) :]
        of_decoder = sum(widths[name] // tp + around / stream for name in decoder)
        # Keys and values of cross-attention are as many as the encoder's tokens.
        cross_kv = num_kv_heads(config) * (head_dim(config) + value_dim(config))
        of_decoder -= decoder_layers(config) * cross_kv // tp
        inner -= (1 - decoder_share) * of_decoder
    inner += names.count("mla") * 2 * latent // stream
    layer = int(tokens * (inner + fp8_change) / len(mixers))
    kept = layers * layer
    if recomputing.recompute_granularity == "full":
        count = recomputing.recompute_num_layers
        saved = max(1, config.altup_num_inputs) * tokens * D // stream
        if recomputing.recompute_method == "block":
            kept = min(count, layers) * saved + max(0, layers - count) * layer
        else:
            kept = -(-layers // count) * saved + count * layer
    return kept


def _forget(widths: dict[str, int], modules: set[str], config: TransformerConfig) -> int:
    """Reduce ``widths`` in place by selectively recomputed tensors; return a norm's width.

    The width is 0 unless norms are recomputed.
    """
    parts = 2 if is_gated(config) else 1
    if "mlp_act" in modules:
        widths["mlp"] -= ffn_size(config)
    if "moe_act" in modules:
        widths["moe"] -= widths["moe"] // (parts + 1)
    for name in {"mlp", "moe"} & modules:
        widths[name] = 0
    return config.hidden_size * ("layernorm" in modules)


def stack_mixers(config: TransformerConfig, moe: MoEConfig) -> tuple[tuple[str, ...], ...]:
    """Return the mixers of every layer; in a T5 the encoder's layers, then the decoder's."""
    if not isinstance(config, T5Config):
        return layer_mixers(config, moe)
    encoder, decoder = ("attention", "mlp"), ("attention", "attention", "mlp")
    return (encoder,) * encoder_layers(config) + (decoder,) * decoder_layers(config)


def kept_widths(config: TransformerConfig, moe: MoEConfig) -> dict[str, int]:
    """Return the elements that each mixer stores of a token, over all tensor ranks."""
    N, G = config.num_attention_heads, num_kv_heads(config)
    channels = head_dim(config) + value_dim(config)
    gated = feed_forward(config)[0] if isinstance(config, T5Config) else is_gated(config)
    parts = 3 if gated else 2
    chosen = expert_size(config, moe) * moe.moe_router_topk
    sizes, delta = mamba_sizes(config), delta_sizes(config)
    mixed = sizes.inner + 2 * sizes.states
    gate = N * head_dim(config) * config.attention_output_gate
    streams = 3 * config.altup_num_inputs + 6 if config.altup_num_inputs else 0
    # Attention with a padding mask copies its inputs.
    copies = (N + G) * channels * isinstance(config, BertConfig)
    return {
        "attention": (N + G) * channels + 2 * gate + copies,
        # Values and the unrotated channels of keys are views of the up-projection's output.
        "mla": (N + G) * channels + N * config.qk_head_dim,
        "mlp": parts * ffn_size(config),
        "moe": parts * (chosen + moe.moe_shared_expert_intermediate_size),
        # Input and output of the convolution, the gate, the scan's and the norm's output.
        "mamba": 2 * mixed + 3 * sizes.inner,
        # Input and output of the convolution, and in float32 keys of every value head, gate,
        # corrections, output and the matrices within chunks.
        "delta_net": 2 * (2 * delta.keys + delta.values)
        + 2 * delta.value_heads * (4 * config.linear_key_head_dim + 3 * _DELTA_CHUNK)
        + 10 * delta.values,
        # As a delta net, with a decay for each channel of the keys; the matrices within chunks
        # are recomputed.
        "kda": 2 * (2 * delta.keys + delta.values)
        + 2 * delta.value_heads * 9 * config.linear_key_head_dim
        + 10 * delta.values,
        # B, C and x, the gated input, and the convolution's output before and after the gate.
        "short_conv": 6 * config.hidden_size,
        # Queries, keys, values and gate; queries, keys and values before SiLU; the state's
        # output; the normed output in float32 (2) and rounded.
        "lightning": 11 * N * head_dim(config),
        # With AltUp also all streams before and after prediction and after correction, and 6
        # tensors of one stream: the layer's output, the error of the prediction, the input of
        # the gate, and the norms of router (twice) and LAuReL.
        "layer_input": 3 * config.per_layer_embedding_size + streams * config.hidden_size,
    }
