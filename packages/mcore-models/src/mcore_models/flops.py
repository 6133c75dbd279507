"""How large a model is and what it costs: parameters, FLOPs and bytes, from configs alone.

FLOPs are those of the model, not of the machine: forward and backward (three times the
forward), the causal half of attention, nothing for recomputation, embedding lookup, norms
or the router. Tokens per second times ``flops_per_token`` over a GPU's peak is its MFU.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mcore_models.config import RecomputeConfig, TransformerConfig, window
from mcore_moe.config import MoEConfig
from mcore_parallel.config import ParallelConfig
from mcore_parallel.logical_tensors import (
    expert_size,
    ffn_size,
    head_dim,
    is_gated,
    moe_layers,
    num_kv_heads,
    tensor_shapes,
)

_NO_EXPERTS = MoEConfig()
_KEEP_ALL = RecomputeConfig()


def num_parameters(
    config: TransformerConfig, vocab_size: int, moe: MoEConfig = _NO_EXPERTS
) -> int:
    """Count the elements of all logical tensors: vocabulary unpadded, tied tables once."""
    return sum(_counts(config, vocab_size, moe).values())


def num_active_parameters(
    config: TransformerConfig, vocab_size: int, moe: MoEConfig = _NO_EXPERTS
) -> int:
    """Count the elements that take part in one token: of the experts only the chosen."""
    counts = _counts(config, vocab_size, moe)
    idle = counts["experts"] // max(1, moe.num_experts)
    return sum(counts.values()) - idle * max(0, moe.num_experts - moe.moe_router_topk)


def flops_per_token(
    config: TransformerConfig,
    padded_vocab_size: int,
    seq_length: int,
    moe: MoEConfig = _NO_EXPERTS,
) -> float:
    """Divide ``model_flops`` of one full sequence by its tokens."""
    return model_flops(config, padded_vocab_size, [seq_length], moe) / seq_length


def model_flops(
    config: TransformerConfig,
    padded_vocab_size: int,
    seq_lengths: Sequence[int],
    moe: MoEConfig = _NO_EXPERTS,
) -> int:
    """Floating-point operations of forward and backward over some sequences.

    Args:
        config: of the model.
        padded_vocab_size: columns that the head really computes.
        seq_lengths: tokens of each sequence; packed ones count on their own.
        moe: of its experts.

    Returns:
        Multiplications and additions each as one.

    Reference:
        Narayanan et al. 2021, arXiv:2104.04473, appendix; with the causal half of attention
        and grouped key/value heads. Megatron counts the same, but for windows.
    """
    N, H = config.num_attention_heads, head_dim(config)
    matrices = {
        name: prod(shape)
        for name, shape in tensor_shapes(config, 0, moe).items()
        if len(shape) == 2 and ".router." not in name and ".token_gate." not in name
    }
    routed = sum(size for name, size in matrices.items() if ".experts." in name)
    active = routed * moe.moe_router_topk // max(1, moe.num_experts)
    lookup = matrices.get("position_embedding.weight", 0)
    weights = config.hidden_size * padded_vocab_size
    weights += sum(matrices.values()) - lookup - routed + active
    # Pairs of query and key, doubled: L * L in a causal layer of L tokens.
    pairs = sum(
        _doubled_pairs(length, window(config, layer))
        for length in seq_lengths
        for layer in range(config.num_layers)
    )
    # 3 passes x 2 operations for each weight and token; scores and their mix for each pair.
    return 6 * sum(seq_lengths) * weights + 6 * N * H * pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """Estimated memory of the fullest rank, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all; temporary buffers and fragmentation come on top."""
        return self.weights + self.gradients + self.optimizer + self.activations


def rank_bytes(
    config: TransformerConfig,
    vocab_size: int,
    parallel: ParallelConfig,
    *,
    world_size: int,
    seq_length: int,
    micro_batch_size: int = 1,
    moe: MoEConfig = _NO_EXPERTS,
    recomputing: RecomputeConfig = _KEEP_ALL,
    weight_bytes: int = 2,
    shards_optimizer: bool = True,
) -> RankBytes:
    """Estimate what training with Adam holds on the rank that holds most.

    Main weights, moments and gradients are 4 bytes each; the first pipeline stage, which
    keeps most micro-batches, is taken to hold the embedding and the most layers.

    Args:
        config: of the model.
        vocab_size: true number of tokens.
        parallel: the degrees.
        world_size: ranks.
        seq_length: tokens of a sequence.
        micro_batch_size: sequences of a forward pass.
        moe: of its experts.
        recomputing: what backward computes again.
        weight_bytes: of a parameter or activation: 2 for bf16, 4 for float32.
        shards_optimizer: whether data ranks share the optimizer's state (ZeRO-1).
    """
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    expert_tp = parallel.expert_tensor_parallel_size or tp
    expert_ranks = expert_tp * parallel.expert_model_parallel_size
    counts = _counts(config, vocab_size, moe)
    experts = counts["experts"] // pp // expert_ranks
    ends = max(counts["embedding"], counts["head"])
    if pp == 1:
        ends = counts["embedding"] + counts["head"]
    dense = (ends + counts["layers"] // pp) // tp
    # Bytes of float32 state for each parameter: moments, and main weights under 16 bits.
    state = 8 if weight_bytes == 4 else 12
    dense_ranks = world_size // (tp * pp) if shards_optimizer else 1
    data_ranks = world_size // (expert_ranks * pp) if shards_optimizer else 1
    return RankBytes(
        weights=weight_bytes * (dense + experts),
        gradients=4 * (dense + experts),
        optimizer=state * (dense // dense_ranks + experts // data_ranks),
        activations=_kept_elements(
            config, vocab_size, parallel, seq_length * micro_batch_size, moe, recomputing
        )
        * weight_bytes,
    )


def _sizes(config: TransformerConfig) -> tuple[int, int, int, int]:
    return (
        config.hidden_size,
        config.num_attention_heads,
        num_kv_heads(config),
        head_dim(config),
    )


def _doubled_pairs(length: int, seen: int) -> int:
    """Twice the pairs of query and key in a causal layer, the diagonal counted by half."""
    width = length if seen < 0 else min(length, seen + 1)
    return width * (2 * length - width)


def _counts(config: TransformerConfig, vocab_size: int, moe: MoEConfig) -> Counter[str]:
    """Count the elements by kind: ``embedding``, ``head``, ``experts``, other ``layers``."""
    counts: Counter[str] = Counter()
    for name, shape in tensor_shapes(config, vocab_size, moe).items():
        kind = "experts" if ".experts." in name else "layers"
        if name.partition(".")[0] in ("embedding", "position_embedding", "head"):
            kind = "head" if name.startswith("head") else "embedding"
        counts[kind] += prod(shape)
    return counts


def _kept_elements(
    config: TransformerConfig,
    vocab_size: int,
    parallel: ParallelConfig,
    num_tokens: int,
    moe: MoEConfig,
    recomputing: RecomputeConfig,
) -> int:
    """Count what the first stage keeps for backward, its pipeline full.

    The tensors that our layers save, as in Korthikanti et al. 2022, arXiv:2205.05198, with
    attention that keeps no scores and an activation that keeps no intermediate.
    """
    D, N, G, H = _sizes(config)
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    tokens = num_tokens // parallel.context_parallel_size
    stream = tp if parallel.sequence_parallel else 1
    width = ffn_size(config)
    if any(moe_layers(moe, config.num_layers)):
        width = expert_size(config, moe) * moe.moe_router_topk
        width += moe.moe_shared_expert_intermediate_size
    inner = ((2 * N + 2 * G) * H + (3 if is_gated(config) else 2) * width) // tp
    layer = tokens * (4 * D // stream + inner)
    layers = -(-config.num_layers // pp)
    kept = layers * layer
    if recomputing.recompute_granularity == "full":
        count = recomputing.recompute_num_layers
        if recomputing.recompute_method == "block":
            kept = min(count, layers) * tokens * D // stream + max(0, layers - count) * layer
        else:
            kept = -(-layers // count) * tokens * D // stream + count * layer
    # The first of pp stages holds pp micro-batches; the head's chunk of logits comes once.
    return kept * pp + min(tokens, 4096) * vocab_size // tp * (pp == 1)
