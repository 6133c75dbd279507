"""mcore-parallel alone: a collective with its gradient; a program held to one rank on two."""

import torch

from mcore_parallel import ParallelConfig, ParallelContext, __version__, compare_layouts
from mcore_parallel.collectives import all_reduce, copy_to, gather_from


def sum_of_halves(ctx):
    """Add what each tensor rank has of a vector."""
    own = torch.arange(4.0).chunk(ctx.tp.size)[ctx.tp.rank]
    return {"sum": all_reduce(own.sum(), ctx.tp)}


if __name__ == "__main__":
    assert __version__[0].isdigit(), __version__
    ctx = ParallelContext.single()
    x = torch.ones(4, 2, requires_grad=True)
    gather_from(copy_to(x, ctx.tp), ctx.tp).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 2))
    two = ParallelConfig(tensor_model_parallel_size=2)
    assert compare_layouts(sum_of_halves, [(2, two)]) == {"sum": 0.0}
