"""Blocks one after the other, recomputed in groups as ``--recompute-*`` says."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from mcore_models.config import RecomputeConfig
from mcore_models.layers.residual import Residual
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.autograd.recomputing import recompute
from mcore_parallel.rng import RngStreams


def block_groups(
    blocks: Sequence[nn.Module], recomputing: RecomputeConfig
) -> Iterator[tuple[Sequence[nn.Module], bool]]:
    """Cut a stage's blocks into runs, and say which are recomputed as one."""
    if recomputing.recompute_granularity != "full":
        yield blocks, False
        return
    count = recomputing.recompute_num_layers
    if recomputing.recompute_method == "block":
        for block in blocks[:count]:
            yield [block], True
        yield blocks[count:], False
        return
    for begin in range(0, len(blocks), count):
        yield blocks[begin : begin + count], True


def run_blocks(
    blocks: Sequence[nn.Module],
    stream: Residual,
    call: Callable[[nn.Module, Residual], Residual],
    recomputing: RecomputeConfig,
    *,
    streams: RngStreams,
    saved_by: Axis = SINGLE,
) -> Residual:
    """Run blocks on the residual stream; communicates as they do.

    Args:
        blocks: in order.
        stream: before the first.
        call: runs one block.
        recomputing: which are computed again in backward; pass ``RecomputeConfig()`` where
            there is none.
        streams: that the blocks draw from.
        saved_by: ranks that each keep a piece of what a recomputed run begins from.
    """

    def again(x: Tensor, aux: Tensor, group: Sequence[nn.Module]) -> Residual:
        found = Residual(x, None, aux)
        for block in group:
            found = call(block, found)
        return found

    for group, is_recomputed in block_groups(blocks, recomputing):
        if is_recomputed:
            begin = stream.total()  # so that one tensor is kept, not two
            stream = recompute(
                again, begin, stream.aux, group, streams=streams, shared_by=saved_by
            )
            continue
        for block in group:
            stream = call(block, stream)
    return stream
