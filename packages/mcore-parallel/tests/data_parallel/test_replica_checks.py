"""What ranks should hold in common and do not is told by the first step, on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from warm_ranks import run_ranks

from mcore_parallel.collectives import own_slice
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.data_parallel.replica_checks import UnlikeWeightsError
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.sharding import replicated
from mcore_parallel.tensor_parallel.embedding import VocabParallelEmbedding
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

SHARDED = DataParallelConfig(use_distributed_optimizer=True)
TENSOR = ParallelConfig(tensor_model_parallel_size=2)
CUT = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
STAGES = ParallelConfig(pipeline_model_parallel_size=2)


class Layer(nn.Module):
    """A norm, a column and a row; ``partial`` is what the norm says of itself."""

    def __init__(self, ctx, partial):
        super().__init__()
        sequence_parallel = ctx.config.sequence_parallel
        self.norm = replicated(nn.LayerNorm(4), ctx.tp, partial=partial)
        self.up = ColumnParallelLinear(4, 8, axis=ctx.tp, sequence_parallel=sequence_parallel)
        self.down = RowParallelLinear(8, 4, axis=ctx.tp, sequence_parallel=sequence_parallel)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def first_step(ctx, model, x):
    """Say what the first step of a model refuses."""
    data_parallel = DataParallel([model], ctx, SHARDED)
    data_parallel.zero_grad()
    model(x).square().sum().backward()
    try:
        data_parallel.finish()
    except ValueError as error:
        return str(error)
    data_parallel.zero_grad()
    data_parallel.finish()  # later steps do not look
    return "nothing"


def seeded(rank):
    torch.manual_seed(rank)
    return nn.Linear(4, 4)


def data_ranks_seeded_apart(rank):
    return first_step(ParallelContext.build(ParallelConfig()), seeded(rank), torch.ones(2, 4))


def weights_in_another_order(rank, dim):
    layer = seeded(0)
    if rank:
        layer.weight.data = layer.weight.data.flip(dim)
    return first_step(ParallelContext.build(ParallelConfig()), layer, torch.ones(2, 4))


def tensor_ranks_seeded_apart(ctx):
    layer = replicated(seeded(ctx.tp.rank), ctx.tp)
    return first_step(ctx, layer, torch.ones(2, 4))


def norm_of_all_tokens(ctx):
    torch.manual_seed(0)
    return first_step(ctx, Layer(ctx, partial=False), torch.randn(6, 2, 4))


def norm_of_own_tokens(ctx, partial):
    torch.manual_seed(0)
    return first_step(ctx, Layer(ctx, partial), own_slice(torch.randn(6, 2, 4), ctx.tp))


def layers_named(ctx, name):
    torch.manual_seed(0)
    stage = nn.Sequential()
    stage.add_module(name, nn.Linear(4, 4))
    return first_step(ctx, stage, torch.ones(2, 4))


def tied_copies(ctx, seed):
    torch.manual_seed(seed)
    tied = VocabParallelEmbedding(4, 4, tied=ctx.embedding_ends)
    return first_step(ctx, tied, torch.tensor([[0, 1]]))


def first_steps():
    rank = dist.get_rank()
    tensor, cut, stages = (ParallelContext.build(config) for config in (TENSOR, CUT, STAGES))
    return {
        "data ranks seeded apart": data_ranks_seeded_apart(rank),
        "rows in another order": weights_in_another_order(rank, 0),
        "columns in another order": weights_in_another_order(rank, 1),
        "tensor ranks seeded apart": tensor_ranks_seeded_apart(tensor),
        "a norm of all tokens": norm_of_all_tokens(tensor),
        "a norm of own tokens, said to be whole": norm_of_own_tokens(cut, partial=False),
        "a norm of own tokens": norm_of_own_tokens(cut, partial=True),
        "layers with one name": layers_named(stages, "0"),
        "layers with their numbers": layers_named(stages, str(rank)),
        "tied copies seeded apart": tied_copies(stages, rank),
        "tied copies": tied_copies(stages, 0),
    }


TOLD = {
    "data ranks seeded apart": "weight: ranks [0, 1] of axis cp_dp, which share it, began",
    "rows in another order": "weight: ranks [0, 1] of axis cp_dp, which share it, began",
    "columns in another order": "weight: ranks [0, 1] of axis cp_dp, which share it, began",
    "tensor ranks seeded apart": "weight: ranks [0, 1] of axis tp, which share it, began",
    "a norm of own tokens, said to be whole": "norm.weight: ranks [0, 1] of axis tp hold it "
    "whole, but compute different gradients",
    "a norm of own tokens": "nothing",
    "a norm of all tokens": "nothing",
    "layers with one name": "0.weight is a parameter of two pipeline stages",
    "layers with their numbers": "nothing",
    "tied copies seeded apart": "weight: ranks [0, 1] of axis embedding_ends, which share it,",
    "tied copies": "nothing",
}


def test_the_first_step_tells_every_rank_what_is_not_the_same_on_all():
    for found in run_ranks(first_steps, 2):
        for what, told in found.items():
            assert TOLD[what] in told, (what, told)


def test_chunks_of_one_rank_with_one_name_are_refused():
    chunks = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    data_parallel = DataParallel(chunks, ParallelContext.single(), SHARDED)
    with pytest.raises(ValueError, match=r"0\.weight is a parameter of two pipeline stages"):
        data_parallel.finish()


def one_rank_of_four_is_off():
    ctx = ParallelContext.build(TENSOR)
    torch.manual_seed(0)
    column = ColumnParallelLinear(4, 8, axis=ctx.tp)
    if (ctx.tp.rank, ctx.dp.rank) == (0, 1):
        column.weight.data.add_(1.0)
    return first_step(ctx, column, torch.ones(2, 1, 4))


def test_ranks_that_hold_nothing_unlike_end_too():
    told = run_ranks(one_rank_of_four_is_off, 4)
    for rank, other in ((0, 1), (2, 3)):
        assert told[rank].startswith(
            "weight: ranks [0, 2] of axis cp_dp, which share it, began"
        )
        assert told[other] == "replicas differ on other ranks, whose errors name them"


def weights_after_a_step(is_sharded):
    """Check before and after one of three data ranks changes a weight by its last bit."""
    ctx = ParallelContext.build(ParallelConfig())
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options = DataParallelConfig(
        use_distributed_optimizer=is_sharded,
        overlap_param_gather=is_sharded,
        overlap_grad_reduce=is_sharded,
    )
    data_parallel = DataParallel([layers], ctx, options)
    optimizer = DistributedOptimizer(data_parallel, AdamW(AdamConfig()))
    data_parallel.zero_grad()
    layers(torch.full((2, 4), 1.0 + ctx.dp.rank)).square().sum().backward()
    data_parallel.finish()
    optimizer.step(1e-2, 0.0)
    data_parallel.check_weights()
    if ctx.dp.rank == 2:
        layers[1].weight.data.view(torch.int32)[3, 1] ^= 1
    with pytest.raises(UnlikeWeightsError) as told:
        data_parallel.check_weights()
    return str(told.value)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_bit_that_one_of_three_copies_has_otherwise_is_found_and_the_rank_named(is_sharded):
    for told in run_ranks(weights_after_a_step, 3, is_sharded):
        assert told.startswith(
            "1.weight: ranks [0, 1, 2] of axis cp_dp, which share it, do not have the same "
            "weights any more (unlike the others: [2])"
        )


def copies_after_one_stage_changed(does_tie):
    ctx = ParallelContext.build(STAGES)
    torch.manual_seed(0)
    stage = (
        VocabParallelEmbedding(4, 4, tied=ctx.embedding_ends) if does_tie else nn.Linear(4, 4)
    )
    data_parallel = DataParallel([stage], ctx, SHARDED)
    data_parallel.check_weights()
    if ctx.pp.rank:
        stage.weight.data.add_(1.0)
    try:
        data_parallel.check_weights()
    except UnlikeWeightsError as error:
        return str(error)
    return "nothing"


def test_tied_copies_are_compared_again_and_two_cannot_say_which_is_wrong():
    for told in run_ranks(copies_after_one_stage_changed, 2, True):
        assert "of axis embedding_ends, which share it, do not have the same weights" in told
        assert "unlike" not in told
    assert run_ranks(copies_after_one_stage_changed, 2, False) == ["nothing", "nothing"]


def copies_of_one_pair_of_four():
    ctx = ParallelContext.build(TENSOR)
    torch.manual_seed(0)
    column = ColumnParallelLinear(4, 8, axis=ctx.tp)
    data_parallel = DataParallel([column], ctx, SHARDED)
    if (ctx.tp.rank, ctx.dp.rank) == (0, 1):
        column.weight.data.add_(1.0)
    with pytest.raises(UnlikeWeightsError) as told:
        data_parallel.check_weights()
    return str(told.value)


def test_ranks_whose_own_copies_are_equal_end_with_those_whose_are_not():
    told = run_ranks(copies_of_one_pair_of_four, 4)
    for rank, other in ((0, 1), (2, 3)):
        assert told[rank].startswith("weight: ranks [0, 2] of axis cp_dp, which share it,")
        assert told[other] == "copies of a weight differ on other ranks, whose errors name it."
