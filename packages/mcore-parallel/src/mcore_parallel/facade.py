"""The plain front known as ``parallel_state``: one rank grid for a whole program.

``from mcore_parallel import parallel_state`` gives this module. A program that calls
``initialize_model_parallel`` once does not need to pass a context around: the facades of the
packages above call ``current_context``. Only the functions here set that context, and no other
code reads it, so contexts built by hand are independent of it.
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
    """Join the world that a launcher describes, if not done yet, and build its rank grid.

    All ranks call it together. A plain ``python`` start is a world of one rank.

    Args:
        tensor_model_parallel_size: ranks that split each weight matrix.
        pipeline_model_parallel_size: ranks that split the layers.
        context_parallel_size: ranks that split each sequence.
        expert_model_parallel_size: ranks that split the experts.
        expert_tensor_parallel_size: ranks that split each expert; 0: as the tensor ranks.
        order: of the axes over the ranks, the first varying fastest; empty: tp-cp-ep-dp-pp.
        device_type: ``cuda``, ``cpu``, or ``auto``: CUDA where it is present.

    Raises:
        RuntimeError: if a rank grid is set already.
        ValueError: if the degrees do not divide the world.
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
    """Forget the rank grid and destroy its groups; all ranks call it together.

    The process stays in the world: another rank grid may follow.
    """
    ctx = _CONTEXT.get()
    if ctx is not None:
        ctx.destroy()
        _CONTEXT.set(None)


def model_parallel_is_initialized() -> bool:
    """Whether ``initialize_model_parallel`` has set a rank grid."""
    return _CONTEXT.get() is not None


def set_fp8_training_enabled(
    enabled: bool, *, fp8_recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
) -> None:
    """Let models that the facades build from now on multiply in fp8, or no more.

    Inputs and weights become e4m3, gradients e5m2, where GEMMs are: see ``Fp8Gemm``. No
    communication. Recipes that remember steps, or need other formats, are the trainer's.
    """
    _FP8.set(Fp8Config(fp8_format="hybrid", fp8_recipe=fp8_recipe) if enabled else None)


def current_fp8() -> Fp8Config:
    """Return what ``set_fp8_training_enabled`` has set, for the facades of other packages."""
    return _FP8.get() or Fp8Config()


def current_context() -> ParallelContext:
    """Return the context of this program, for the facades of other packages.

    If none is set and the world has one rank, returns a context of that rank. In a larger world
    each rank would build a separate model that nothing keeps equal, so the call is refused.

    Raises:
        RuntimeError: if the world has several ranks and no rank grid is set.
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
    """Place of this rank among those that split each weight matrix."""
    return _axis("tp").rank


def get_tensor_model_parallel_group() -> dist.ProcessGroup | None:
    """Process group of the tensor ranks; None if there is one."""
    return _axis("tp").group


def get_pipeline_model_parallel_world_size() -> int:
    """Ranks that split the layers."""
    return _axis("pp").size


def get_pipeline_model_parallel_rank() -> int:
    """Place of this rank among those that split the layers."""
    return _axis("pp").rank


def get_pipeline_model_parallel_group() -> dist.ProcessGroup | None:
    """Process group of the pipeline ranks; None if there is one."""
    return _axis("pp").group


def is_pipeline_first_stage() -> bool:
    """Whether this rank holds the embedding."""
    return _axis("pp").rank == 0


def is_pipeline_last_stage() -> bool:
    """Whether this rank computes the loss."""
    return _axis("pp").rank == _axis("pp").size - 1


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Ranks that see different sequences; with context ranks, different tokens."""
    return _axis("dp_cp" if with_context_parallel else "dp").size


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """Place of this rank among those that see different sequences (or tokens)."""
    return _axis("dp_cp" if with_context_parallel else "dp").rank


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup | None:
    """Process group of the data ranks; None if there is one."""
    return _axis("dp_cp" if with_context_parallel else "dp").group


def get_context_parallel_world_size() -> int:
    """Ranks that split each sequence."""
    return _axis("cp").size


def get_context_parallel_rank() -> int:
    """Place of this rank among those that split each sequence."""
    return _axis("cp").rank


def get_context_parallel_group() -> dist.ProcessGroup | None:
    """Process group of the context ranks; None if there is one."""
    return _axis("cp").group


def get_expert_model_parallel_world_size() -> int:
    """Ranks that split the experts."""
    return _axis("ep").size


def get_expert_model_parallel_rank() -> int:
    """Place of this rank among those that split the experts."""
    return _axis("ep").rank


def get_expert_model_parallel_group() -> dist.ProcessGroup | None:
    """Process group of the expert ranks; None if there is one."""
    return _axis("ep").group


def _axis(name: str) -> Axis:
    ctx = _CONTEXT.get()
    if ctx is None:
        raise RuntimeError(
            "model parallelism is not initialised: call initialize_model_parallel(...) first."
        )
    return getattr(ctx, name)
