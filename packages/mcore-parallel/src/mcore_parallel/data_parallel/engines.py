"""The data-parallel engines, by what they shard: one entry and one file each."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import nn

from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.fully_sharded import FullyShardedDataParallel
from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.mesh import ParallelContext

Engine = Callable[[Sequence[nn.Module], ParallelContext, DataParallelConfig], GradientSync]
"""Wraps the model chunks of a rank, in forward order."""

ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "no_shard": DataParallel,
        "optim": DataParallel,
        "optim_grads": FullyShardedDataParallel,
        "optim_grads_params": FullyShardedDataParallel,
    }
)
"""By ``DataParallelConfig.sharding``."""
