"""Table of the data-parallel engines by ``--data-parallel-sharding-strategy``."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import nn

from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.mesh import ParallelContext

Engine = Callable[[Sequence[nn.Module], ParallelContext, DataParallelConfig], GradientSync]
"""Builds an engine for the model chunks of a rank, given in forward order."""


def _fully_sharded(
    chunks: Sequence[nn.Module], ctx: ParallelContext, config: DataParallelConfig
) -> GradientSync:
    """Build the engine of FSDP2; imports ``fully_shard`` here, since that takes a second."""
    from mcore_parallel.data_parallel.fully_sharded import FullyShardedDataParallel

    return FullyShardedDataParallel(chunks, ctx, config)


ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "no_shard": DataParallel,
        "optim": DataParallel,
        "optim_grads": _fully_sharded,
        "optim_grads_params": _fully_sharded,
    }
)
"""Engines by ``DataParallelConfig.sharding``."""
