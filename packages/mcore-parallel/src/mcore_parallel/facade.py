"""Functions in the style of Megatron's ``parallel_state``: one rank grid for a program.

``from mcore_parallel import parallel_state`` gives this module. A program that calls
``initialize_model_parallel`` once need not pass a ``ParallelContext`` around: the facades of
the packages above call ``current_context``. Layers never read this context, so a context that a
program builds itself is independent of it.
"""

from contextvars import ContextVar
from typing import Literal

import torch.distributed as dist

from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch import launcher
from mcore_parallel.mesh import Axis, ParallelContext
from mcore_parallel.precision.config import Fp8Config

_CONTEXT: ContextVar[ParallelContext | None] = ContextVar("mcore_context", default=None)
_FP8: ContextVar[Fp8Config | None] = ContextVar("mcore_fp8", default=None)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int = 0,
    order: str = "",
    device_type: str = "auto",
) -> None:
    """Join the launcher's world if this process has not, and build the program's rank grid.

    All ranks must call this function together. A program started by plain ``python`` has a
    world of one rank.

    Args:
        tensor_model_parallel_size: ranks that split each weight matrix.
        pipeline_model_parallel_size: ranks that split the layers.
        context_parallel_size: ranks that split each sequence.
        expert_model_parallel_size: ranks that split the experts.
        expert_tensor_parallel_size: ranks that split each expert; 0: the tensor-parallel size.
        order: order of the axes over the ranks, fastest-varying first; empty: tp-cp-ep-dp-pp.
        device_type: ``cuda``, ``cpu``, or ``auto``: CUDA if present, else the CPU.

    Raises:
        RuntimeError: if the program has a rank grid already.
        ValueError: if the degrees do not divide the world size.
    """
    if _CONTEXT.get() is not None:
        raise RuntimeError(
            "model parallelism is initialised already: call destroy_model_parallel() first."
        )
    config = ParallelConfig(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        rank_order=order,
    )
    device = launcher.initialize(device_type)
    _CONTEXT.set(ParallelContext.build(config, device))


def destroy_model_parallel() -> None:
    """Destroy the program's rank grid and its process groups; all ranks call it together.

    The process stays in the world, so ``initialize_model_parallel`` may be called again.
    """
    ctx = _CONTEXT.get()
    if ctx is not None:
        ctx.destroy()
        _CONTEXT.set(None)


def model_parallel_is_initialized() -> bool:
    """Whether the program has a rank grid (``initialize_model_parallel`` was called)."""
    return _CONTEXT.get() is not None


def set_fp8_training_enabled(
    enabled: bool, *, fp8_recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
) -> None:
    """Enable or disable fp8 GEMMs in the models that the facades build later.

    GEMMs cast inputs and weights to e4m3 and gradients to e5m2 (``Fp8Gemm``); nothing is
    communicated. Recipes with a state of their own (delayed scaling) need mcore-train.
    """
    _FP8.set(Fp8Config(fp8_format="hybrid", fp8_recipe=fp8_recipe) if enabled else None)


def current_fp8() -> Fp8Config:
    """Return the fp8 config of ``set_fp8_training_enabled``, for facades of other packages."""
    return _FP8.get() or Fp8Config()


def current_context() -> ParallelContext:
    """Return the program's context, for the facades of other packages.

    Without ``initialize_model_parallel``, a world of one rank gets a context of that rank. In a
    larger world each rank would train a model of its own, without any synchronisation.

    Raises:
        RuntimeError: if the world has several ranks and the program has no rank grid.
    """
    ctx = _CONTEXT.get()
    if ctx is not None:
        return ctx
    size = launcher.world_size()
    if size > 1:
        raise RuntimeError(
            f"this world has {size} ranks but no layout: call "
            "parallel_state.initialize_model_parallel(...) before building a model."
        )
    return ParallelContext.single(launcher.initialize())


def get_tensor_model_parallel_world_size() -> int:
    """Ranks that split each weight matrix."""
    return _axis("tp").size


def get_tensor_model_parallel_rank() -> int:
    """Index of this rank among the tensor ranks."""
    return _axis("tp").rank


def get_tensor_model_parallel_group() -> dist.ProcessGroup | None:
    """Process group of the tensor ranks; None for a single tensor rank."""
    return _axis("tp").group


def get_pipeline_model_parallel_world_size() -> int:
    """Ranks that split the layers."""
    return _axis("pp").size


def get_pipeline_model_parallel_rank() -> int:
    """Index of this rank among the pipeline ranks."""
    return _axis("pp").rank


def get_pipeline_model_parallel_group() -> dist.ProcessGroup | None:
    """Process group of the pipeline ranks; None for a single pipeline rank."""
    return _axis("pp").group


def is_pipeline_first_stage() -> bool:
    """Whether this rank holds the embedding."""
    return _axis("pp").rank == 0


def is_pipeline_last_stage() -> bool:
    """Whether this rank computes the loss."""
    return _axis("pp").rank == _axis("pp").size - 1


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Ranks with different sequences, or, with context parallelism, different tokens."""
    return _axis("dp_cp" if with_context_parallel else "dp").size


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """Index of this rank among the data ranks, or the data and context ranks."""
    return _axis("dp_cp" if with_context_parallel else "dp").rank


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup | None:
    """Process group of the data ranks, or the data and context ranks; None for one rank."""
    return _axis("dp_cp" if with_context_parallel else "dp").group


def get_context_parallel_world_size() -> int:
    """Ranks that split each sequence."""
    return _axis("cp").size


def get_context_parallel_rank() -> int:
    """Index of this rank among the context ranks."""
    return _axis("cp").rank


def get_context_parallel_group() -> dist.ProcessGroup | None:
    """Process group of the context ranks; None for a single context rank."""
    return _axis("cp").group


def get_expert_model_parallel_world_size() -> int:
    """Ranks that split the experts."""
    return _axis("ep").size


def get_expert_model_parallel_rank() -> int:
    """Index of this rank among the expert-parallel ranks."""
    return _axis("ep").rank


def get_expert_model_parallel_group() -> dist.ProcessGroup | None:
    """Process group of the expert-parallel ranks; None for a single expert-parallel rank."""
    return _axis("ep").group


def _axis(name: str) -> Axis:
    ctx = _CONTEXT.get()
    if ctx is None:
        raise RuntimeError(
            "model parallelism is not initialised: call initialize_model_parallel(...) first."
        )
    return getattr(ctx, name)
