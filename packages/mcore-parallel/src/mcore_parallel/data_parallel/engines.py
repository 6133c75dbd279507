"""The data-parallel engines, by what they shard: one entry and one file each."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import nn

from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.mesh import ParallelContext

Engine = Callable[[Sequence[nn.Module], ParallelContext, DataParallelConfig], GradientSync]
"""Wraps the model chunks of a rank, in forward order."""


def _fully_sharded(
    chunks: Sequence[nn.Module], ctx: ParallelContext, config: DataParallelConfig
) -> GradientSync:
    """Import ``fully_shard``, which takes a second that other runs do not pay, and call it."""
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
"""By ``DataParallelConfig.sharding``."""
