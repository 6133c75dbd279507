"""Parallelism for PyTorch as explicit parts: rank grids, parallel layers, gradient reduction.

The front is lazy (PEP 562): importing it imports no module of the package, so a command that
only needs help text never loads torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

_EXPORTS: dict[str, str] = {
    "Action": "pipeline_parallel.actions",
    "AdamConfig": "optimizers.config",
    "Axis": "mesh",
    "Block": "context_parallel.block_attention",
    "BlockAttention": "context_parallel.block_attention",
    "ColumnParallelLinear": "tensor_parallel.linear",
    "DataParallel": "data_parallel.ddp",
    "DataParallelConfig": "config",
    "Documents": "context_parallel.packed_sequences",
    "Fp8Config": "precision.config",
    "DisagreementError": "launch.call_checks",
    "FullyShardedDataParallel": "data_parallel.fully_sharded",
    "GradientSync": "data_parallel.gradient_sync",
    "Layout": "sharding",
    "Output": "tensor_parallel.linear",
    "PLAIN_BLOCKS": "context_parallel.block_attention",
    "ParallelConfig": "config",
    "ParallelContext": "mesh",
    "Part": "sharding",
    "Piece": "sharding",
    "Pieces": "context_parallel.packed_sequences",
    "PipelineConfig": "config",
    "RngStreams": "rng",
    "RowParallelLinear": "tensor_parallel.linear",
    "SINGLE": "mesh",
    "Shard": "sharding",
    "ShardedAdamW": "data_parallel.distributed_optimizer",
    "Stage": "pipeline_parallel.stages",
    "StageOutput": "pipeline_parallel.runner",
    "StreamDropout": "rng",
    "VocabParallelEmbedding": "tensor_parallel.embedding",
    "VocabParallelHead": "tensor_parallel.embedding",
    "Watch": "launch.watchdog",
    "WeightQueue": "pipeline_parallel.weight_queue",
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "all_to_all": "collectives",
    "build_schedule": "pipeline_parallel.schedule",
    "build_stages": "pipeline_parallel.stages",
    "clip_coefficient": "data_parallel.grads",
    "compare_layouts": "testing.layout_comparison",
    "context_attention": "context_parallel.zigzag",
    "copy_to": "collectives",
    "fill_normal_": "rng",
    "fill_parameter_": "rng",
    "dualpipe_v": "pipeline_parallel.schedule",
    "forward_only": "pipeline_parallel.schedule",
    "gather_from": "collectives",
    "gather_logical": "testing.ranks",
    "gather_partial_from": "collectives",
    "gathered_attention": "context_parallel.all_gather_attention",
    "head_loss": "tensor_parallel.linear_cross_entropy",
    "initialize": "launch.launcher",
    "interleaved": "pipeline_parallel.schedule",
    "named_parameters": "sharding",
    "named_shards": "sharding",
    "one_f_one_b": "pipeline_parallel.schedule",
    "padded_vocab": "tensor_parallel.embedding",
    "recompute": "recomputing",
    "recompute_between": "recomputing",
    "reduce_from": "collectives",
    "reduce_scatter": "collectives",
    "reduce_scatter_to": "collectives",
    "replicated": "sharding",
    "ring_attention": "context_parallel.ring_attention",
    "run_command": "testing.ranks",
    "run_ranks": "testing.ranks",
    "run_schedule": "pipeline_parallel.runner",
    "search_schedules": "pipeline_parallel.search",
    "simulate": "pipeline_parallel.simulator",
    "sliced": "sharding",
    "split_layers": "pipeline_parallel.stages",
    "split_to": "collectives",
    "start_all_gather": "collectives",
    "start_all_reduce": "collectives",
    "start_reduce_scatter": "collectives",
    "start_shift": "collectives",
    "timeline_svg": "pipeline_parallel.timeline",
    "timeline_text": "pipeline_parallel.timeline",
    "ulysses_attention": "context_parallel.zigzag",
    "vocab_parallel_cross_entropy": "tensor_parallel.cross_entropy",
    "wait": "collectives",
    "whole": "sharding",
    "zero_bubble_h1": "pipeline_parallel.schedule",
    "zero_bubble_v": "pipeline_parallel.schedule",
    "zigzag_join": "context_parallel.zigzag",
    "zigzag_positions": "context_parallel.zigzag",
    "zigzag_split": "context_parallel.zigzag",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    """Import the module that owns ``name`` and return the attribute."""
    if name == "__version__":
        try:
            return version("mcore-parallel")
        except PackageNotFoundError:
            return "0+source"
    if name == "parallel_state":  # the facade module itself, by the name that users know
        return import_module(f"{__name__}.facade")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    """List the public names without importing them."""
    return sorted([*__all__, "__version__", "parallel_state"])
