"""Bytes of the fullest rank of a layout, by what holds them.

Weights, gradients, optimizer and activations are ``flops.rank_bytes`` of mcore-models, which
``mcore-models count`` prints too; buffers of exchanges and workspaces and an allowance for
fragmentation come on top.
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
"""Share of the allocated bytes that the allocator cannot use: reserved over allocated memory in
``graphs-of-layers-h200``, without the graphs' own pools, is up to 1.02."""
CONTEXT_GIB = 1.5
"""CUDA's context, NCCL's channels and loaded kernels, outside the allocator."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of a rank."""

    parts: dict[str, float]
    """weights, gradients, optimizer, activations by kind, buffers."""
    fragmentation: float
    """Allowance, not allocated."""
    host: float = 0.0
    """Offloaded."""

    @property
    def allocated(self) -> float:
        """The allocator's peak, which ``torch.cuda.max_memory_allocated`` measures."""
        return sum(self.parts.values())

    @property
    def total(self) -> float:
        """What the device must have."""
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
        system: of which the workspaces count.
    """
    parallel, batch = config.parallelism, config.batch
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    dp = world_size // (ranks * parallel.context_parallel_size)
    micro = batch.micro_batch_size * dp
    num_microbatches = max(1, (batch.global_batch_size or micro) // micro)
    found = estimate_memory(config, family, world_size, vocab_size, num_microbatches)
    parts: dict[str, float] = {
        "weights": found.weights,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        **{f"activations: {k}": v for k, v in _activations(found, config).items()},
        "buffers": _buffers(config, system),
    }
    allocated = sum(parts.values())
    return RankMemory(
        parts=parts, fragmentation=FRAGMENTATION * allocated, host=found.host + found.disk
    )


def _buffers(config: TrainConfig, system: System) -> float:
    """Count workspaces, and what context ranks exchange whole heads through."""
    size = system.workspace_gib * GIB
    parallel, model, batch = config.parallelism, config.model, config.batch
    if "a2a" in parallel.cp_comm_type:
        tokens = batch.micro_batch_size * batch.seq_length // parallel.context_parallel_size
        width = 2 * (model.num_attention_heads + num_kv_heads(model)) * head_dim(model)
        size += 3 * 2 * tokens * width / parallel.tensor_model_parallel_size
    return size


def _activations(found: RankBytes, config: TrainConfig) -> dict[str, float]:
    """Share activations out over the kinds of layers that keep them."""
    if config.recomputation.recompute_granularity == "full":
        return {"layer inputs": float(found.activations)}
    widths = kept_widths(config.model, config.experts)
    tp = config.parallelism.tensor_model_parallel_size
    stream = tp if config.parallelism.sequence_parallel else 1
    elements: dict[str, float] = defaultdict(float)
    for names in stack_mixers(config.model, config.experts):
        for name in names:
            elements[name] += widths[name] / tp
            elements["norms and residuals"] += 2 * config.model.hidden_size / stream
    total = sum(elements.values())
    return {name: found.activations * n / total for name, n in elements.items()}
