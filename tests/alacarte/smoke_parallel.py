"""mcore-parallel alone: a collective over an axis, with its gradient, on a world of one."""

import torch
import torch.distributed as dist

from mcore_parallel import ParallelConfig, ParallelContext, __version__
from mcore_parallel.collectives import copy_to, gather_from
from mcore_parallel.launching import free_port

assert __version__[0].isdigit(), __version__

ctx = ParallelContext.single()
x = torch.ones(4, 2, requires_grad=True)
gather_from(copy_to(x, ctx.tp), ctx.tp).sum().backward()
assert torch.equal(x.grad, torch.ones(4, 2))

dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
)
built = ParallelContext.build(ParallelConfig())
assert built.axis("tp", "cp").size == 1
dist.destroy_process_group()
