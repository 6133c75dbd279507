"""Predicts the bytes of the fullest rank of a layout, by kind.

Weights, gradients, optimizer and activations are ``flops.rank_bytes`` of mcore-models, which
``mcore-models count`` prints too; exchange buffers, workspaces and an allowance for
fragmentation are added.
"""

from collections import defaultdict
from dataclasses import dataclass

from mcore_models.families import Family
from mcore_models.flops import RankBytes, kept_widths, stack_mixers
from mcore_models.logical_tensors import head_dim, num_kv_heads
from mcore_train.composition import TrainConfig
from mcore_train.pipeline_choice import estimate_memory
from mcore_train.planning.system import System

FRAGMENTATION = 0.03
"""Share of the allocated bytes that the allocator cannot use. The measured ratio of reserved to
allocated memory (``graphs-of-layers-h200``), without the graphs' own pools, is up to 1.02."""
CONTEXT_GIB = 1.5
"""CUDA's context, NCCL's channels and loaded kernels, outside the allocator."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of a rank."""

    parts: dict[str, float]
    """weights, gradients, optimizer, activations by kind, buffers."""
    fragmentation: float
    """Allowance for fragmentation."""
    host: float = 0.0
    """Offloaded bytes, in host memory or on a drive."""

    @property
    def allocated(self) -> float:
        """The allocator's peak, which ``torch.cuda.max_memory_allocated`` measures."""
        return sum(self.parts.values())

    @property
    def total(self) -> float:
        """Bytes that the device must have, without CUDA's context."""
        return self.allocated + self.fragmentation


def predict_memory(
    config: TrainConfig, family: Family, world_size: int, vocab_size: int, system: System
) -> RankMemory:
    """Predict the memory of the fullest rank.

    Args:
        config: all options; its layout must be possible.
        family: of the model.
        world_size: ranks.
        vocab_size: tokens of the model.
        system: its workspaces are counted.
    """
    parallel, batch = config.parallelism, config.batch
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    dp = world_size // (ranks * parallel.context_parallel_size)
    micro = batch.micro_batch_size * dp
    num_microbatches = max(1, (batch.global_batch_size or micro) // micro)
    estimate = estimate_memory(config, family, world_size, vocab_size, num_microbatches)
    parts: dict[str, float] = {
        "weights": estimate.weights,
        "gradients": estimate.gradients,
        "optimizer": estimate.optimizer,
        **{f"activations: {k}": v for k, v in _activations(estimate, config).items()},
        "buffers": _buffers(config, system),
    }
    allocated = sum(parts.values())
    return RankMemory(
        parts=parts, fragmentation=FRAGMENTATION * allocated, host=estimate.host + estimate.disk
    )


def _buffers(config: TrainConfig, system: System) -> float:
    """Return the bytes of workspaces, and of exchanges of whole heads between context ranks."""
    size = system.workspace_gib * GIB
    parallel, model, batch = config.parallelism, config.model, config.batch
    if "a2a" in parallel.cp_comm_type:
        tokens = batch.micro_batch_size * batch.seq_length // parallel.context_parallel_size
        width = 2 * (model.num_attention_heads + num_kv_heads(model)) * head_dim(model)
        size += 3 * 2 * tokens * width / parallel.tensor_model_parallel_size
    return size


def _activations(estimate: RankBytes, config: TrainConfig) -> dict[str, float]:
    """Divide the bytes of activations among the kinds of layers."""
    if config.recomputation.recompute_granularity == "full":
        return {"layer inputs": float(estimate.activations)}
    widths = kept_widths(config.model, config.experts)
    tp = config.parallelism.tensor_model_parallel_size
    stream = tp if config.parallelism.sequence_parallel else 1
    elements: dict[str, float] = defaultdict(float)
    for names in stack_mixers(config.model, config.experts):
        for name in names:
            elements[name] += widths[name] / tp
            elements["norms and residuals"] += 2 * config.model.hidden_size / stream
    total = sum(elements.values())
    return {name: estimate.activations * n / total for name, n in elements.items()}
