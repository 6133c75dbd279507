"""Gradients and weights of many layouts against one rank, in float64.

The toy model has one parameter of every class: replicated with partial gradients, column
and row slices, key/value rows that a block of tensor ranks repeats, a padded table, experts
(one never sees a token), a bias, and a weight that nothing uses.
"""

import gc
import weakref
import zlib
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import nn
from warm_ranks import run_ranks

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.collectives import (
    all_gather,
    all_reduce,
    gather_partial_from,
    own_slice,
    reduce_scatter_to,
)
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.data_parallel.grads import clip_coefficient
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.sharding import (
    ParamLayout,
    Part,
    named_shards,
    replicated,
    sliced_layout,
    whole_layout,
)
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear
from mcore_parallel.testing.ranks import gather_logical

TOKENS, HIDDEN, FFN, HEADS, HEAD, VOCAB, EXPERTS = 12, 5, 12, 2, 3, 7, 4
MICROBATCHES, DATA = 3, 6  # data ranks of the batch; a layout's dp divides them
EXACT = 1e-10


class Experts(nn.Module):
    """Expert ``e`` maps the tokens whose id is ``e``; ids never reach the last expert."""

    def __init__(self, ctx):
        super().__init__()
        self.ep = ctx.ep
        mine = range(EXPERTS // ctx.ep.size)
        self.first = ctx.ep.rank * len(mine)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(HIDDEN, HIDDEN, dtype=torch.float64)) for _ in mine
        )
        self.weights.layouts = lambda: {
            str(i): replace(whole_layout(f"{self.first + i}", (HIDDEN, HIDDEN)), data="expert")
            for i in mine
        }

    def forward(self, x, ids):
        x, ids = gather_partial_from(x, self.ep), all_gather(ids, self.ep)
        out = x.new_zeros(x.shape)
        for i, weight in enumerate(self.weights):
            rows = (ids == self.first + i).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, torch.tanh(x[rows] @ weight))
        return reduce_scatter_to(out, self.ep)


class Toy(nn.Module):
    def __init__(self, ctx):
        super().__init__()
        tp = self.tp = ctx.tp
        self.heads = max(1, HEADS // tp.size)
        self.block = ctx.tp_block(max(1, tp.size // HEADS)) if tp.size > HEADS else SINGLE
        self.rows = -(-VOCAB // tp.size)
        # First here is last in backward order: what gets no gradient must not hold the rest.
        self.unused = parameter(3)
        self.experts = Experts(ctx)
        self.table = parameter(self.rows, HIDDEN)
        self.norm = parameter(HIDDEN)
        self.column = parameter(FFN // tp.size, HIDDEN)
        self.column_bias = parameter(FFN // tp.size)
        self.keys = parameter(self.heads * HEAD, HIDDEN)
        self.row = parameter(HIDDEN, FFN // tp.size)

    def layouts(self):
        tp = self.tp
        first = (tp.rank * HEADS // tp.size) * HEAD
        return {
            "table": sliced_layout("table", (VOCAB, HIDDEN), 0, tp, (self.rows, HIDDEN)),
            "norm": whole_layout("norm", (HIDDEN,), tp, tp),
            "column": sliced_layout("column", (FFN, HIDDEN), 0, tp),
            "column_bias": sliced_layout("column.bias", (FFN,), 0, tp),
            "keys": ParamLayout(
                (
                    Part(
                        "keys",
                        (HEADS * HEAD, HIDDEN),
                        (first, 0),
                        (0, 0),
                        (self.heads * HEAD, HIDDEN),
                        self.block,
                        self.block,
                    ),
                )
            ),
            "row": sliced_layout("row", (HIDDEN, FFN), 1, tp),
            "unused": whole_layout("unused", (3,), tp),
        }

    def forward(self, x, ids, mask):
        """Sum of losses over this tensor rank's tokens; x [T, D]."""
        tp = self.tp
        local = ids - tp.rank * self.rows
        held = (local >= 0) & (local < self.rows)
        looked_up = self.table[local.clamp(0, self.rows - 1)] * held[:, None]
        h = own_slice(x, tp) + reduce_scatter_to(looked_up, tp)
        g = gather_partial_from(h * self.norm, tp)
        a = torch.tanh(g @ self.column.T + self.column_bias)
        k = (g @ self.keys.T).view(len(g), self.heads, HEAD).sum(-1)
        a = (a.view(len(g), self.heads, -1) * k[..., None]).flatten(1)
        h = h + reduce_scatter_to(a @ self.row.T, tp)
        h = h + self.experts(h, own_slice(ids, tp) % EXPERTS % (EXPERTS - 1))
        return (h.square().sum(-1) * own_slice(mask, tp)).sum()


def parameter(*shape):
    return nn.Parameter(torch.zeros(shape, dtype=torch.float64))


def fill(model):
    for name, shard in named_shards(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        logical = torch.randn(shard.shape, dtype=torch.float64, generator=generator) * 0.5
        for piece in shard.pieces:
            place = tuple(
                slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True)
            )
            piece.data.copy_(logical[place])


def batch(step, microbatch, data_rank):
    """Tokens of one micro-batch of one data rank, with its own count of valid ones."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * microbatch + data_rank)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator)
    ids = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    valid = (
        0 if (microbatch, data_rank) == (1, 0) else (7 * microbatch + 3 * data_rank) % 12 + 1
    )
    return x, ids, (torch.arange(TOKENS) < valid).double()


PLAIN, ADAM = DataParallelConfig(), AdamConfig()


@dataclass(frozen=True)
class Case:
    world: int
    parallel: ParallelConfig
    data: DataParallelConfig = PLAIN
    adam: AdamConfig = ADAM
    lr: float = 0.05
    poison: bool = False


def train(case, num_steps):
    """Logical gradients of the first step, its norm, and weights and moments at the end."""
    ctx = ParallelContext.build(case.parallel)
    model = Toy(ctx)
    fill(model)
    data_parallel = DataParallel([model], ctx, case.data)
    optimizer = DistributedOptimizer(data_parallel, AdamW(case.adam))
    share = range(DATA // ctx.dp.size * ctx.dp.rank, DATA // ctx.dp.size * (ctx.dp.rank + 1))
    for step in range(num_steps):
        data_parallel.zero_grad()
        if case.poison:
            fill_padding(data_parallel, float("nan"))
        batches = [batch(step, m, d) for m in range(MICROBATCHES) for d in share]
        count = all_reduce(sum(mask.sum() for _, _, mask in batches), ctx.dp_cp)
        with data_parallel.no_sync():
            for x, ids, mask in batches[:-1]:
                (model(x, ids, mask) / count).backward()
        x, ids, mask = batches[-1]
        (model(x, ids, mask) / count).backward()
        data_parallel.finish()
        norm = optimizer.grad_norm()
        if step == 0:
            first_norm = norm.item()
            grads = gather_logical(data_parallel.grad_shards(), ctx.world)
        optimizer.step(case.lr, 0.1, clip_coefficient(norm, 0.7))
    weights = gather_logical(named_shards(model, ctx.data_axes()), ctx.world)
    state = gather_logical(optimizer.named_shards(), ctx.world)
    padding = model.table[max(0, min(VOCAB - ctx.tp.rank * model.rows, model.rows)) :]
    assert not padding.any(), "padding rows stay zero"
    return grads, first_norm, weights, state


def fill_padding(data_parallel, value):
    for bucket in data_parallel.buckets:
        used = torch.zeros(bucket.size, dtype=torch.bool)
        for slot in bucket.slots:
            used[slot.start : slot.stop] = True
        bucket.params[~used] = value
        bucket.grads[~used] = value


@cache
def on_one_rank(case, num_steps):
    """``case`` is a layout of one rank: layouts that train alike share the result."""
    return train(case, num_steps)


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(tensor.abs().max().item() for tensor in expected.values())
    for name, tensor in expected.items():
        scale = max(tensor.abs().max().item(), floor)
        error = (found[name] - tensor).abs().max().item() / scale
        assert error <= tolerance, f"{name}: {error:.3g}"


def compare(case, num_steps=3):
    alone = replace(case, world=1, parallel=ParallelConfig(), data=PLAIN, poison=False)
    expected_grads, expected_norm, expected_weights, expected_state = on_one_rank(
        alone, num_steps
    )
    for grads, norm, weights, state in run_ranks(train, case.world, case, num_steps):
        assert_close(grads, expected_grads, EXACT)
        assert norm == pytest.approx(expected_norm, rel=1e-12)
        gathered = sum(g.square().sum() for g in grads.values()).sqrt().item()
        assert norm == pytest.approx(gathered, rel=1e-12)
        assert_close(weights, expected_weights, EXACT)
        assert_close(state, expected_state, EXACT)


SMALL_BUCKETS = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=60)
ZERO = replace(SMALL_BUCKETS, use_distributed_optimizer=True)
# With these constants an update is -lr * gradient / 1e6 to 1e-6: plain gradient descent,
# which, unlike Adam, sees a constant factor on a gradient.
LIKE_SGD = AdamConfig(adam_beta1=0.0, adam_beta2=0.0, adam_eps=1e6)


def layout(**sizes):
    return ParallelConfig(
        tensor_model_parallel_size=sizes.get("tp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=1,
        num_distributed_optimizer_instances=sizes.get("instances", 1),
    )


CASES = {
    "dp2": Case(2, layout()),
    "dp3 small overlapped buckets": Case(3, layout(), SMALL_BUCKETS),
    "zero dp2": Case(2, layout(), replace(ZERO, overlap_grad_reduce=False)),
    "zero dp3 poisoned padding": Case(3, layout(), ZERO, poison=True),
    "zero dp3 gradient descent": Case(3, layout(), ZERO, LIKE_SGD, lr=2e4),
    "tp4 two key heads": Case(4, layout(tp=4)),
    "tp2 experts whole on each": Case(2, layout(tp=2), adam=LIKE_SGD, lr=2e4),
    "tp2 ep2 folded": Case(2, layout(tp=2, ep=2), SMALL_BUCKETS),
    "tp2 dp3 zero": Case(6, layout(tp=2), ZERO, poison=True),
    "ep2 dp2 zero": Case(2, layout(ep=2), ZERO),
    "ep2 dp6 zero in 3 instances": Case(6, layout(ep=2, instances=3), ZERO),
    "ep2 dp6": Case(6, layout(ep=2), SMALL_BUCKETS, LIKE_SGD, lr=2e4),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.parity_long] * (name == "ep2 dp6"))
        for name, case in CASES.items()
    ],
)
def test_data_parallel_layouts_equal_one_rank(case):
    compare(case)


class Branches(nn.Module):
    """Four weights in four buckets; the second counted from the end is used by rank 0 only."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(parameter(4) for _ in range(4))

    def forward(self, x, rank):
        used = [w for i, w in enumerate(self.weights) if i != 2 or rank == 0]
        return sum(((i + 1) * x * w).sum() for i, w in enumerate(used))


def start_unequally(config):
    """Which buckets a rank starts within backward, and the gradients in the end."""
    ctx = ParallelContext.build(ParallelConfig())
    model = Branches()
    data_parallel = DataParallel([model], ctx, config)
    for _ in range(2):
        data_parallel.zero_grad()
        x = torch.full((4,), 1.0 + ctx.dp.rank, dtype=torch.float64)
        model(x, ctx.dp.rank).backward()
        started = [bucket.is_reducing for bucket in data_parallel.buckets]
        data_parallel.finish()
    grads = gather_logical(data_parallel.grad_shards(), ctx.world)
    return started, [grads[f"weights.{i}"][0].item() for i in range(4)]


@pytest.mark.parametrize("use_distributed_optimizer", [False, True])
def test_a_gradient_missing_on_one_rank_keeps_the_order_of_sums(use_distributed_optimizer):
    config = DataParallelConfig(
        overlap_grad_reduce=True,
        ddp_bucket_size=4,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    (all_started, grads), (some_started, same) = run_ranks(start_unequally, 2, config)
    assert all_started == [True, True, True, True]
    assert some_started == [True, False, False, False]
    # Rank 0 adds 1, 2, 3, 4 times 1; rank 1 adds 1, 2, -, 3 times 2.
    assert grads == same == [3.0, 6.0, 3.0, 10.0]


def test_nothing_starts_within_backward_unless_asked():
    started = run_ranks(start_unequally, 2, DataParallelConfig(ddp_bucket_size=4))
    assert [flags for flags, _ in started] == [[False] * 4] * 2


def wrap(model, config=PLAIN):
    return DataParallel([model], ParallelContext.single(), config)


def test_gradients_accumulate_over_microbatches_and_grad_is_freed():
    model = nn.Linear(3, 1, bias=False)
    data_parallel = wrap(model)
    for length in (1, 4, 2):  # a group of one rank must neither double nor drop a sum
        with data_parallel.no_sync():
            model(torch.ones(length, 3)).sum().backward()
        assert model.weight.grad is None
    data_parallel.finish()
    assert grad_slot(model.weight).main.tolist() == [[7.0] * 3]
    data_parallel.zero_grad()
    assert not grad_slot(model.weight).main.any()


def test_an_operation_may_add_to_the_main_gradient_itself():
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            grad_slot(weight).main.add_(grad * x)
            return grad * weight, None

    weights = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
    data_parallel = wrap(weights, SMALL_BUCKETS)
    Fused.apply(torch.tensor([2.0, 3.0], requires_grad=True), weights[1]).sum().backward()
    assert [b.is_reducing for b in data_parallel.buckets] == [False]
    (weights[0] * 2.0).sum().backward()
    assert [b.is_reducing for b in data_parallel.buckets] == [True]
    data_parallel.finish()
    assert grad_slot(weights[1]).main.tolist() == [2.0, 3.0]


class TwoLinears(nn.Module):
    """Linears that overwrite their main gradients; the second may be left out."""

    def __init__(self):
        super().__init__()
        self.first = ColumnParallelLinear(3, 2, bias=True)
        self.second = ColumnParallelLinear(2, 2)

    def forward(self, x, with_second=True):
        y = self.first(x)
        return self.second(y) if with_second else y


@pytest.mark.parametrize("config", [PLAIN, SMALL_BUCKETS])
def test_the_first_product_of_a_step_overwrites_the_main_gradient(config):
    torch.manual_seed(0)
    model = TwoLinears()
    data_parallel = wrap(model, config)
    for step in range(2):
        data_parallel.zero_grad()
        assert not grad_slot(model.first.bias).main.any()
        for weight in (model.first.weight, model.second.weight):
            grad_slot(weight).main.fill_(torch.nan)  # whatever is there is not to be read
        inputs = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(step))
        with data_parallel.no_sync():
            for x in inputs[:2]:
                model(x).square().sum().backward()
        model(inputs[2]).square().sum().backward()
        data_parallel.finish()
        found = {name: grad_slot(p).main.clone() for name, p in model.named_parameters()}
        twin = TwoLinears()
        twin.load_state_dict(model.state_dict())
        sum(twin(x).square().sum() for x in inputs).backward()
        for name, parameter in twin.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_the_main_gradient_of_a_weight_that_no_batch_came_through_is_zero():
    model = TwoLinears()
    data_parallel = wrap(model)
    for with_second in (True, False):
        data_parallel.zero_grad()
        model(torch.ones(1, 3), with_second).sum().backward()
        data_parallel.finish()
        assert grad_slot(model.first.weight).main.any()
        assert grad_slot(model.second.weight).main.any() == with_second


def test_a_gradient_from_autograd_overwrites_too():
    model = TwoLinears()
    data_parallel = wrap(model)
    data_parallel.zero_grad()
    grad_slot(model.first.weight).main.fill_(torch.nan)
    (model.first.weight * 2.0).sum().backward()
    assert grad_slot(model.first.weight).main.eq(2.0).all()


def test_a_gradient_that_is_set_by_hand_is_refused_and_one_that_backward_brings_is_taken():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[1].bias.requires_grad_(False)
    data_parallel = wrap(model)
    weights = [*model[0].parameters(), model[1].weight]
    gradients = torch.autograd.grad(model(torch.ones(1, 3)).sum(), weights)
    model[0].weight.grad, model[1].weight.grad = gradients[0], gradients[2]
    with pytest.raises(RuntimeError, match=r"1.weight and 1 more: .grad was assigned"):
        data_parallel.finish()
    model.zero_grad()
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.backward(gradient)
    data_parallel.finish()
    assert all(
        grad_slot(weight).main.equal(gradient)
        for weight, gradient in zip(weights, gradients, strict=True)
    )


def test_a_gradient_after_its_sum_began_is_refused():
    model = nn.Linear(3, 1)
    data_parallel = wrap(model, SMALL_BUCKETS)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"received a gradient after .* under no_sync\(\)"):
        model(torch.ones(1, 3)).sum().backward()
    data_parallel.finish()
    with pytest.raises(RuntimeError, match="received a gradient after"):
        model(torch.ones(1, 3)).sum().backward()


def test_summing_twice_is_refused():
    data_parallel = wrap(nn.Linear(3, 1))
    data_parallel.finish()
    with pytest.raises(RuntimeError, match="call zero_grad"):
        data_parallel.finish()
    data_parallel.zero_grad()
    data_parallel.finish()


def test_models_that_cannot_be_wrapped_are_refused():
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        wrap(nn.Linear(2, 2).requires_grad_(False))
    model = nn.Linear(2, 2)
    data_parallel = wrap(model)
    with pytest.raises(ValueError, match="weight already has a main gradient"):
        wrap(model)
    data_parallel.remove_hooks()
    wrap(model).remove_hooks()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    with pytest.raises(ValueError, match="weight already has a gradient, which"):
        wrap(model)
    model.zero_grad()
    wrap(model)


def test_a_model_and_what_wraps_it_are_freed_together():
    model = nn.Linear(2, 2)
    data_parallel = wrap(model)
    model(torch.ones(1, 2)).sum().backward()
    data_parallel.finish()
    known = [weakref.ref(thing) for thing in (data_parallel, model, model.weight)]
    del data_parallel, model
    gc.collect()
    assert [reference() for reference in known] == [None] * 3


def test_a_model_whose_data_parallel_is_gone_says_so():
    model = nn.Linear(2, 2, bias=False)
    wrap(model)
    gc.collect()
    with pytest.raises(
        RuntimeError, match="weight received a gradient, but its DataParallel was deleted"
    ):
        model(torch.ones(1, 2)).sum().backward()


def wrap_plain_modules():
    """What is refused under two tensor ranks, and the gradient norms of what is declared."""
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    refused, norms = "", []
    try:
        DataParallel([nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))], ctx, PLAIN)
    except ValueError as error:
        refused = str(error)
    tokens = torch.ones(4, 2)
    for partial in (False, True):
        model = replicated(nn.Sequential(nn.Linear(2, 3)), ctx.tp, partial=partial)
        model = deepcopy(model)
        data_parallel = DataParallel([model], ctx, PLAIN)
        optimizer = DistributedOptimizer(data_parallel, AdamW(AdamConfig()))
        model(own_slice(tokens, ctx.tp) if partial else tokens).sum().backward()
        data_parallel.finish()
        norms.append(optimizer.grad_norm().item())
    ctx.destroy()
    return refused, norms


def test_plain_modules_under_tensor_ranks_say_who_holds_them_and_count_once():
    model = nn.Linear(2, 3)
    model(torch.ones(4, 2)).sum().backward()
    alone = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
    for refused, norms in run_ranks(wrap_plain_modules, 2):
        assert refused.startswith(
            "0.weight and 3 more: no layout declares how 2 tensor ranks share"
        )
        assert "mcore_parallel.replicated(module, ctx.tp)" in refused
        assert norms == pytest.approx([alone, alone])


def test_frozen_parameters_stay_out_of_the_buckets():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    data_parallel = wrap(model)
    model(torch.ones(1, 2)).sum().backward()
    data_parallel.finish()
    assert data_parallel.grad_shards().keys() == {"weight"}
