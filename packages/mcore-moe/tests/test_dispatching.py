from itertools import product

import pytest
import torch

from mcore_moe import AllToAllDispatcher, MoEConfig, Routing, build_dispatcher, limited
from mcore_moe.permutation import permute, permute_probs, unpermute
from mcore_moe.uneven import gather_uneven, reduce_scatter_uneven
from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.testing.ranks import run_ranks

E, K, D = 4, 2, 3
CASES = {
    "all": {},
    "dropped": {"moe_expert_capacity_factor": 0.5},
    "dropped by position": {
        "moe_expert_capacity_factor": 0.5,
        "moe_token_drop_policy": "position",
    },
    "padded": {
        "moe_expert_capacity_factor": 1.5,
        "moe_pad_expert_input_to_capacity": True,
    },
    "in fp8": {"moe_dispatch_dtype": "fp8"},
}


def routed_tokens(rank, kind):
    """Tokens, weights and choices of a rank: 4 tokens, none, 6, 1; or 4 on each."""
    number = 4 if kind == "equal" else (4, 0, 6, 1)[rank]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(number, D, generator=generator, dtype=torch.float64, requires_grad=True)
    scores = torch.rand(number, E, generator=generator, dtype=torch.float64)
    if kind == "skewed":
        scores = scores * 0.01 + torch.tensor([0, 0, 1, 2.0])
    probs, ids = scores.topk(K)
    return x, Routing(ids, probs.detach().requires_grad_())


def through(config, dispatcher, x, routing, first_expert=0, is_even=False):
    """Expert e multiplies by its weight and by e + 1; tokens come home summed."""
    begun = dispatcher.begin(x, is_even=is_even)
    sent = dispatcher.dispatch(x, limited(routing, config), is_even=is_even, begun=begun)
    counts = sent.plan.counts
    rows, probs = permute(sent.x, sent.plan), permute_probs(sent.probs, sent.plan)
    assert int(counts.sum()) == rows.shape[0] == probs.shape[0]
    factor = (first_expert + torch.arange(counts.numel()) + 1).repeat_interleave(counts)
    sums = unpermute(rows * (factor * probs)[:, None], sent.plan)
    y = dispatcher.combine(sums, sent.handle)
    y.square().sum().backward()
    return y.detach(), x.grad, routing.probs.grad, counts


def check_against_local(kind, dispatcher_type, etp):
    ctx = ParallelContext.build(
        ParallelConfig(expert_model_parallel_size=2, expert_tensor_parallel_size=etp)
    )
    for fields in CASES.values():
        if dispatcher_type == "allgather" and "moe_pad_expert_input_to_capacity" in fields:
            continue
        config = MoEConfig(num_experts=E, moe_token_dispatcher_type=dispatcher_type, **fields)
        dispatcher = build_dispatcher(config, ctx.ep, ctx.expert_tp)
        local = build_dispatcher(config, SINGLE, SINGLE)
        result = through(
            config,
            _summed_over_expert_tp(dispatcher, etp),
            *routed_tokens(ctx.global_rank, kind),
            first_expert=ctx.ep.rank * E // 2,
            is_even=kind == "equal",
        )
        expected = through(config, local, *routed_tokens(ctx.global_rank, kind))
        for a, b in zip(result[:3], expected[:3], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        whole = all_reduce(expected[3], ctx.axis("expert_tp", "ep"))
        assert torch.equal(result[3], whole.view(2, -1)[ctx.ep.rank])
    ctx.destroy()


class _summed_over_expert_tp:  # noqa: N801
    """Each rank of expert_tp gives 1/etp of the result, as a split matrix would."""

    def __init__(self, dispatcher, etp):
        self.begin, self.dispatch = dispatcher.begin, dispatcher.dispatch
        self.inner, self.etp = dispatcher, etp

    def combine(self, rows, handle):
        return self.inner.combine(rows / self.etp, handle)


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize(
    ("kind", "dispatcher_type"),
    [*product(["even", "skewed"], ["alltoall", "allgather"]), ("equal", "allgather")],
)
def test_tokens_that_travel_come_back_as_if_they_had_stayed(kind, dispatcher_type, etp):
    run_ranks(check_against_local, 4, kind, dispatcher_type, etp)


def check_same_bits(repeats):
    ctx = ParallelContext.build(ParallelConfig(expert_model_parallel_size=4))
    config = MoEConfig(num_experts=E)
    dispatcher = AllToAllDispatcher(config, ctx.ep)
    runs = [
        through(
            config,
            dispatcher,
            *routed_tokens(ctx.global_rank, "even"),
            first_expert=ctx.ep.rank,
        )
        for _ in range(repeats)
    ]
    ctx.destroy()
    return all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


def test_every_run_gives_the_same_bits():
    assert all(run_ranks(check_same_bits, 4, 3))


def check_turns(numbers, is_even):
    ctx = ParallelContext.build(
        ParallelConfig(expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    )
    config = MoEConfig(num_experts=E, moe_token_dispatcher_type="allgather")
    dispatcher, turns = build_dispatcher(config, ctx.ep, ctx.expert_tp), []
    dispatcher.meanwhile = lambda: turns.append(1)
    x = torch.ones(numbers[ctx.global_rank], D, requires_grad=True)
    ids = torch.arange(E)[:K].expand(len(x), K)
    routing = Routing(ids, torch.ones(ids.shape, requires_grad=True))
    through(config, dispatcher, x, routing, ctx.ep.rank * E // 2, is_even)
    ctx.destroy()
    return len(turns)


def test_all_ranks_take_the_same_turns_though_some_groups_are_even():
    # Seven tokens cut over four tensor ranks: the second and the fourth bring equally many.
    assert run_ranks(check_turns, 4, (1, 2, 2, 2), False) == [0] * 4
    assert run_ranks(check_turns, 4, (2, 2, 2, 2), True) == [2] * 4


def check_uneven_pair():
    ctx = ParallelContext.build(ParallelConfig())
    sizes = [2, 0, 3]
    x = torch.full((sizes[ctx.global_rank], 2), float(ctx.global_rank), requires_grad=True)
    y = gather_uneven(x, ctx.world, sizes)
    (y * (ctx.global_rank + 1)).sum().backward()
    summed = reduce_scatter_uneven(y.detach(), ctx.world, sizes)
    ctx.destroy()
    return y.detach(), x.grad, summed


def test_uneven_gather_sums_gradients_and_its_pair_sums_rows():
    for rank, (y, grad, summed) in enumerate(run_ranks(check_uneven_pair, 3)):
        assert y[:, 0].tolist() == [0, 0, 2, 2, 2]
        assert (grad == 1 + 2 + 3).all()
        assert (summed == 3 * rank).all()
