"""Parallelism for PyTorch as explicit parts: who am I, who do I talk to, how gradients go.

The front is lazy (PEP 562): importing it imports no room, so a command that only
needs help text never loads torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

_ROOMS: dict[str, str] = {
    "Action": "schedule",
    "AdamConfig": "config",
    "Axis": "mesh",
    "Block": "block_attention",
    "BlockAttention": "block_attention",
    "ColumnParallelLinear": "linear",
    "DataParallel": "data_parallel",
    "DataParallelConfig": "config",
    "Documents": "documents",
    "DisagreementError": "agreeing",
    "Layout": "sharding",
    "Output": "linear",
    "PLAIN_BLOCKS": "block_attention",
    "ParallelConfig": "config",
    "ParallelContext": "mesh",
    "Part": "sharding",
    "Piece": "sharding",
    "Pieces": "documents",
    "PipelineConfig": "config",
    "RngStreams": "rng",
    "RowParallelLinear": "linear",
    "SINGLE": "mesh",
    "Shard": "sharding",
    "ShardedAdamW": "zero",
    "Stage": "stages",
    "StageOutput": "pipeline",
    "StreamDropout": "rng",
    "VocabParallelEmbedding": "embedding",
    "VocabParallelHead": "embedding",
    "Watch": "watching",
    "WeightQueue": "pipeline",
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "all_to_all": "collectives",
    "build_schedule": "schedule",
    "build_stages": "stages",
    "clip_coefficient": "grads",
    "compare_layouts": "layout_comparison",
    "context_attention": "context_parallel",
    "copy_to": "collectives",
    "fill_normal_": "rng",
    "fill_parameter_": "rng",
    "forward_only": "schedule",
    "gather_from": "collectives",
    "gather_logical": "testing",
    "gather_partial_from": "collectives",
    "gathered_attention": "key_gathering",
    "head_loss": "fused_head",
    "interleaved": "schedule",
    "named_parameters": "sharding",
    "named_shards": "sharding",
    "one_f_one_b": "schedule",
    "padded_vocab": "embedding",
    "recompute": "recomputing",
    "recompute_between": "recomputing",
    "reduce_from": "collectives",
    "reduce_scatter": "collectives",
    "reduce_scatter_to": "collectives",
    "replicated": "sharding",
    "ring_attention": "ring",
    "run_command": "testing",
    "run_ranks": "testing",
    "run_schedule": "pipeline",
    "simulate": "simulator",
    "sliced": "sharding",
    "split_layers": "stages",
    "split_to": "collectives",
    "start_all_gather": "collectives",
    "start_all_reduce": "collectives",
    "start_reduce_scatter": "collectives",
    "start_shift": "collectives",
    "timeline_svg": "timeline",
    "timeline_text": "timeline",
    "ulysses_attention": "context_parallel",
    "vocab_parallel_cross_entropy": "vocab_loss",
    "wait": "collectives",
    "whole": "sharding",
    "zero_bubble_h1": "schedule",
    "zigzag_join": "context_parallel",
    "zigzag_positions": "context_parallel",
    "zigzag_split": "context_parallel",
}

__all__ = list(_ROOMS)


def __getattr__(name: str) -> object:
    """Import the room that owns ``name`` and return the attribute."""
    if name == "__version__":
        try:
            return version("mcore-parallel")
        except PackageNotFoundError:
            return "0+source"
    if name == "parallel_state":  # the facade's room itself, by the name that users know
        return import_module(f"{__name__}.facade")
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    """List the public names without importing them."""
    return sorted([*__all__, "__version__", "parallel_state"])
