import os
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from warm_ranks import run_ranks

from mcore_moe import (
    AllToAllDispatcher,
    MoEConfig,
    Routing,
    build_dispatcher,
    limit_to_capacity,
)
from mcore_moe.dispatch.permutation import permute, permute_probs, unpermute
from mcore_moe.dispatch.protocol import DispatchOptions
from mcore_moe.dispatch.symmetric import Places
from mcore_moe.dispatch.uneven_collectives import gather_uneven, reduce_scatter_uneven
from mcore_moe.kernels import deepep
from mcore_moe.kernels.deepep import DeepEPDispatcher
from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch.launcher import initialize, launch_local, shut_down
from mcore_parallel.mesh import SINGLE, ParallelContext

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


def routed_tokens(rank, kind, dtype=torch.float64, width=D):
    """Tokens, weights and choices of a rank: 4 tokens, none, 6, 1; or 4 on each."""
    number = 4 if kind == "equal" else (4, 0, 6, 1)[rank]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(number, width, generator=generator, dtype=torch.float64, requires_grad=True)
    scores = torch.rand(number, E, generator=generator, dtype=torch.float64)
    if kind == "skewed":
        scores = scores * 0.01 + torch.tensor([0, 0, 1, 2.0])
    probs, ids = scores.topk(K)
    return x, Routing(ids, probs.to(dtype).requires_grad_())


def through(config, dispatcher, x, routing, first_expert=0, equal_tokens=False):
    """Expert e multiplies by its weight and by e + 1; tokens come home summed."""
    in_flight = dispatcher.begin(x, equal_tokens=equal_tokens)
    sent = dispatcher.dispatch(
        x, limit_to_capacity(routing, config), DispatchOptions(equal_tokens, in_flight)
    )
    counts = sent.plan.counts
    rows, probs = permute(sent.x, sent.plan), permute_probs(sent.probs, sent.plan)
    assert int(counts.sum()) <= rows.shape[0] == probs.shape[0]
    factors = first_expert + torch.arange(counts.numel(), device=x.device) + 1
    factor = factors.repeat_interleave(counts)
    behind = rows.shape[0] - factor.numel()  # rows of no expert
    assert not behind or isinstance(sent.handle, Places)
    factor = torch.nn.functional.pad(factor, (0, behind), value=10**6)
    sums = unpermute((rows * (factor * probs)[:, None]).to(rows.dtype), sent.plan)
    y = dispatcher.combine(sums, sent.handle)
    y.square().sum().backward()
    return y.detach(), x.grad, routing.probs.grad, counts


def check_against_local(kind, dispatcher_type, etp):
    ctx = ParallelContext.build(
        ParallelConfig(expert_model_parallel_size=2, expert_tensor_parallel_size=etp)
    )
    left_out = {
        "allgather": {"moe_pad_expert_input_to_capacity"},
        "deepep": {"moe_pad_expert_input_to_capacity", "moe_dispatch_dtype"},
        "symmetric": {"moe_pad_expert_input_to_capacity", "moe_dispatch_dtype"},
    }
    for fields in CASES.values():
        if left_out.get(dispatcher_type, set()) & set(fields):
            continue
        config = MoEConfig(num_experts=E, moe_token_dispatcher_type=dispatcher_type, **fields)
        if dispatcher_type == "deepep":
            dispatcher = DeepEPDispatcher(config, ctx.ep, lambda ep, _: DeepEPBuffer(ep))
        else:
            dispatcher = build_dispatcher(config, ctx.ep, ctx.expert_tp)
        local = build_dispatcher(config, SINGLE, SINGLE)
        # DeepEP's weights are float32.
        dtype = torch.float32 if dispatcher_type == "deepep" else torch.float64
        result = through(
            config,
            _summed_over_expert_tp(dispatcher, etp),
            *routed_tokens(ctx.global_rank, kind, dtype),
            first_expert=ctx.ep.rank * E // 2,
            equal_tokens=kind == "equal",
        )
        expected = through(config, local, *routed_tokens(ctx.global_rank, kind))
        for a, b in zip(result[:3], expected[:3], strict=True):
            tolerance = 1e-12 if dtype == torch.float64 else 1e-6
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
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


class DeepEPBuffer:
    """What DeepEP publishes of its ``Buffer``, by objects over gloo.

    Signatures and types are those of its first version, whose tokens are bfloat16.
    """

    def __init__(self, ep):
        self.ep = ep

    def everyones(self, found):
        all_found = [None] * self.ep.size
        torch.distributed.all_gather_object(all_found, found.detach(), group=self.ep.group)
        return all_found

    def get_dispatch_layout(
        self,
        topk_idx,
        num_experts,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert topk_idx.dtype == torch.int64
        owner = (topk_idx // (num_experts // self.ep.size)).where(topk_idx >= 0, self.ep.size)
        is_sent = torch.zeros(len(topk_idx), self.ep.size + 1, dtype=torch.bool)
        is_sent = is_sent.scatter(1, owner, True)[:, :-1]
        per_expert = topk_idx[topk_idx >= 0].bincount(minlength=num_experts)
        return is_sent.sum(0), None, per_expert, is_sent, None

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        is_first, rank = handle is None, self.ep.rank
        assert x.dim() == 2
        assert x.is_contiguous()
        if is_first:
            assert topk_idx.dtype == torch.int64
            assert topk_weights.dtype == torch.float32
        else:
            assert topk_idx is topk_weights is None
        handle = self.everyones(is_token_in_rank) if is_first else handle

        def sent(found):
            pairs = zip(self.everyones(found), handle, strict=True)
            return torch.cat([own[is_sent[:, rank]] for own, is_sent in pairs])

        if not is_first:
            return sent(x), None, None, None, None, None
        assert torch.equal(num_tokens_per_rank, is_token_in_rank.sum(0))
        num_local = num_tokens_per_expert.numel() // self.ep.size
        ids = sent(topk_idx) - rank * num_local
        is_here = (ids >= 0) & (ids < num_local)
        counts = ids[is_here].bincount(minlength=num_local).tolist()
        own, weights = ids.where(is_here, -1), sent(topk_weights).where(is_here, 0)
        return sent(x), own, weights, counts, handle, None

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert x.is_contiguous()
        assert topk_weights is None or topk_weights.dtype == torch.float32

        def summed(found):
            sizes = [int(is_sent[:, self.ep.rank].sum()) for is_sent in handle]
            is_own = handle[self.ep.rank]
            total = found.new_zeros(len(is_own), found.shape[1])
            blocks = [None] * self.ep.size
            split = [part.clone() for part in found.detach().split(sizes)]
            torch.distributed.all_gather_object(blocks, split, group=self.ep.group)
            for rank, parts in enumerate(blocks):
                total[is_own[:, rank]] += parts[self.ep.rank]
            return total

        return summed(x), None if topk_weights is None else summed(topk_weights), None


@pytest.mark.parametrize("kind", ["even", "skewed", "equal"])
def test_rows_read_from_the_ranks_of_their_tokens_are_as_if_they_had_stayed(kind):
    run_ranks(check_against_local, 4, kind, "symmetric", 1)


@pytest.mark.parametrize("kind", ["even", "skewed"])
def test_tokens_that_travel_by_deepeps_interface_do_so_too(kind):
    run_ranks(check_against_local, 4, kind, "deepep", 1)


def by_way_of(ctx, way, kind, name):
    config = MoEConfig(
        num_experts=E, moe_router_topk=K, moe_token_dispatcher_type=way, **CASES[name]
    )
    x, routing = routed_tokens(ctx.global_rank, kind, torch.float32, width=512)
    x = x.detach().to(ctx.device, torch.bfloat16).requires_grad_()
    probs = routing.probs.detach().to(ctx.device).requires_grad_()
    routing = Routing(routing.ids.to(ctx.device), probs)
    dispatcher = build_dispatcher(config, ctx.ep, ctx.expert_tp)
    return through(config, dispatcher, x, routing, ctx.ep.rank * E // ctx.ep.size)


def check_by_deepeps_kernels():
    device = initialize("cuda")
    for ep in sorted({2, torch.distributed.get_world_size()}):
        ctx = ParallelContext.build(ParallelConfig(expert_model_parallel_size=ep), device)
        for kind, name in product(["even", "skewed"], ["all", "dropped"]):
            results = [by_way_of(ctx, way, kind, name) for way in ("deepep", "alltoall")]
            for a, b in zip(*results, strict=True):  # sums of bfloat16 in another order
                torch.testing.assert_close(a, b, rtol=1.6e-2, atol=1.6e-2)
            print(f"ep {ep}, {kind}, {name}: equal", flush=True)
        deepep._buffer.cache_clear()  # ranks end their buffers together
        ctx.destroy()
    shut_down()


@pytest.mark.gpu
def test_deepeps_kernels_bring_what_an_all_to_all_brings():
    pytest.importorskip("deep_ep")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    world = 4 if torch.cuda.device_count() >= 4 else 2
    assert launch_local([sys.executable, str(Path(__file__))], world) == 0


class DeepEPConfig:
    def get_nvl_buffer_size_hint(self, row_bytes, ranks):
        return row_bytes * ranks

    def get_rdma_buffer_size_hint(self, row_bytes, ranks):
        raise RuntimeError("built without NVSHMEM")


class OneNodeBuffer:
    """What a build for one node does where it is asked for what it lacks."""

    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        self.sizes = num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def get_dispatch_config(ranks):
        assert ranks in (2, 4, 8)
        return DeepEPConfig()

    get_combine_config = get_dispatch_config


def test_deepep_of_one_node_gives_buffers_and_refuses_other_numbers_of_ranks(monkeypatch):
    library = SimpleNamespace(Buffer=OneNodeBuffer)
    monkeypatch.setattr(deepep, "_library", lambda: library)
    config = MoEConfig(num_experts=E, moe_token_dispatcher_type="deepep")
    build_dispatcher(config, replace(SINGLE, size=4), SINGLE)
    with pytest.raises(ValueError, match="no kernels for 3 ranks"):
        build_dispatcher(config, replace(SINGLE, size=3), SINGLE)
    group = SimpleNamespace(size=lambda: 4)
    assert deepep._buffer.__wrapped__(group, 1024).sizes == (4096, 0)
    tokens = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True, shape=(5, 8192))
    with pytest.raises(ValueError, match="at most 8176, not 8192"):
        deepep._shared_buffer(SINGLE, tokens)


def test_deepep_is_refused_by_name_where_it_is_missing_or_cannot_serve():
    config = MoEConfig(num_experts=E, moe_token_dispatcher_type="deepep")
    two = replace(SINGLE, size=2)
    with pytest.raises(ValueError, match="deepep needs the package deep_ep, built for torch 2"):
        build_dispatcher(config, two, SINGLE)
    with pytest.raises(ValueError, match="--expert-tensor-parallel-size 1, not 2"):
        build_dispatcher(config, two, two)
    symmetric = replace(config, moe_token_dispatcher_type="symmetric")
    with pytest.raises(ValueError, match="symmetric requires complete experts"):
        build_dispatcher(symmetric, two, two)
    with pytest.raises(ValueError, match="--moe-dispatch-dtype fp8 has no effect"):
        replace(symmetric, moe_dispatch_dtype="fp8")
    with pytest.raises(ValueError, match=r"--moe-expert-rows-limit 2\.0 has no effect"):
        replace(config, moe_expert_rows_limit=2.0)
    with pytest.raises(ValueError, match="deepep sends weights in float32"):
        replace(config, moe_router_dtype="fp64")


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


def check_turns(numbers, equal_tokens):
    ctx = ParallelContext.build(
        ParallelConfig(expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    )
    config = MoEConfig(num_experts=E, moe_token_dispatcher_type="allgather")
    dispatcher, turns = build_dispatcher(config, ctx.ep, ctx.expert_tp), []
    dispatcher.set_overlap_callback(lambda: turns.append(1))
    x = torch.ones(numbers[ctx.global_rank], D, requires_grad=True)
    ids = torch.arange(E)[:K].expand(len(x), K)
    routing = Routing(ids, torch.ones(ids.shape, requires_grad=True))
    through(config, dispatcher, x, routing, ctx.ep.rank * E // 2, equal_tokens)
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


if __name__ == "__main__" and "RANK" in os.environ:
    check_by_deepeps_kernels()
