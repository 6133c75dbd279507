"""Options of the model that a command runs, and the context that loads the model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mcore_data.tokenizers.protocol import Tokenizer
    from mcore_infer.loading import LoadedModel

_TIMEOUT_MINUTES = 10.0
_NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Folder, device and rank grid of the model that a command runs."""

    load: str
    """Run folder, a step folder of one, a Hugging Face or a Megatron folder."""

    ckpt_step: int = 0
    """Step of a run folder; 0: the latest."""

    tokenizer: str = ""
    """Folder or file of the tokenizer; empty: the one in the checkpoint."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: cuda if the machine has it."""

    tensor_model_parallel_size: int = 0
    """Ranks that split each matrix; 0: the number of started ranks over the pipeline-parallel
    size. Ranks beyond those of one model are replicas."""

    pipeline_model_parallel_size: int = 1
    """Ranks that split the layers; each step runs through them in turn."""

    expert_model_parallel_size: int = 1
    """Ranks that split the experts: the tensor-parallel ranks first, then replicas, which then
    compute their steps together."""

    expert_tensor_parallel_size: int = 0
    """Ranks that split each expert's matrices; 0: the tensor-parallel size over the
    expert-parallel one, at least 1."""


def refuse_ranks(command: str) -> None:
    """Raise ValueError if a command that runs in one process was started on several ranks."""
    from mcore_parallel.launch.launcher import read_environment

    if read_environment().world_size > 1:
        raise ValueError(
            f"mcore-infer {command} runs in one process: start it without torchrun."
        )


@contextmanager
def opened(
    options: ModelOptions,
    *,
    draft: str = "",
    adapters: Mapping[str, str] = _NO_ADAPTERS,
    takes_t5: bool = False,
    on_fault: Callable[[str], None] = lambda _fault: None,
) -> Iterator[tuple["LoadedModel", "Tokenizer", bool]]:
    """Join the world and load the model; yield model, tokenizer and whether this is rank 0.

    Within the context, a rank that fails or dies ends all ranks (see ``Watch``), except for bad
    input, for which every rank raises ValueError.

    Args:
        options: the model, its device and ranks.
        draft: folder of the draft model; empty: no draft model.
        adapters: folders of adapters by name, see ``load_model``.
        takes_t5: see ``load_model``.
        on_fault: see ``Watch``.
    """
    from torch import distributed as dist

    from mcore_ckpt.storage.paths import resolve_folder
    from mcore_data.tokenizers.building import load_tokenizer
    from mcore_infer.loading import load_model
    from mcore_parallel.config import ParallelConfig
    from mcore_parallel.launch.launcher import (
        initialize,
        read_environment,
        shut_down,
        wait_for_all,
    )
    from mcore_parallel.launch.watchdog import Watch
    from mcore_parallel.mesh import ParallelContext

    # Resolve all folders before the first collective, so that a wrong path fails on every rank.
    folder = resolve_folder(options.load, options.ckpt_step, takes_any=True)
    draft_folder = resolve_folder(draft, takes_any=True) if draft else None
    adapter_folders = {
        name: resolve_folder(path, takes_any=True) for name, path in adapters.items()
    }
    environment = read_environment()
    pp = options.pipeline_model_parallel_size
    tp = options.tensor_model_parallel_size or max(1, environment.world_size // max(1, pp))
    ep = options.expert_model_parallel_size
    config = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=options.expert_tensor_parallel_size
        or max(1, tp // max(1, ep)),
    )
    joins = not dist.is_initialized()  # a world that the caller initialized stays open
    input_error = None
    try:
        device = initialize(options.device, _TIMEOUT_MINUTES)
        ctx = ParallelContext.build(config, device)
        needs_experts = ep > 1 or options.expert_tensor_parallel_size > 0
        loaded = load_model(
            folder,
            ctx,
            takes_t5=takes_t5,
            needs_experts=needs_experts,
            adapters=adapter_folders,
        )
        if draft_folder is not None:
            loaded = replace(loaded, draft=load_model(draft_folder, ctx).model)
        if options.tokenizer:
            loaded = replace(loaded, tokenizer=load_tokenizer(options.tokenizer))
        if loaded.tokenizer is None:
            raise ValueError(f"{folder} has no tokenizer: give its folder with --tokenizer.")
        watched = environment.world_size if joins else 1
        with Watch.of_world(environment.rank, watched, _TIMEOUT_MINUTES, on_fault):
            try:
                yield loaded, loaded.tokenizer, environment.rank == 0
                if watched > 1:  # rank 0 may host the store that other ranks still watch
                    wait_for_all()
            except ValueError as error:
                input_error = error
        # Raised outside of Watch, which would report any exception as the failure of a rank.
        if input_error is not None:
            raise input_error
    finally:
        if joins:
            shut_down()
