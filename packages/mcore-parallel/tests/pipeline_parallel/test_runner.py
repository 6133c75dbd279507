"""The runner: pipelines of two and four ranks against one rank, in float64.

Every stage adds an auxiliary root, the embedding is tied to the head on the last stage,
micro-batches have their own counts of valid tokens, and one has none.
"""

import weakref
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn
from warm_ranks import run_ranks

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.pipeline_parallel.config import V_SHAPED, PipelineConfig
from mcore_parallel.pipeline_parallel.runner import StageOutput, run_schedule
from mcore_parallel.pipeline_parallel.schedule import (
    build_schedule,
    forward_only,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
)
from mcore_parallel.pipeline_parallel.stages import split_layers, stages_of_rank
from mcore_parallel.pipeline_parallel.weight_queue import WeightQueue
from mcore_parallel.sharding import ParamLayout, named_shards, whole_layout
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear
from mcore_parallel.testing.ranks import gather_logical

LAYERS, SEQUENCE, BATCH, HIDDEN, VOCAB = 4, 3, 2, 4, 6
MICROBATCHES, DATA = 2, 6  # data ranks of the batch; a layout's dp divides them
EXACT = 1e-10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = ColumnParallelLinear(HIDDEN, HIDDEN, init_std=0.0, dtype=torch.float64)
        self.scale = nn.Parameter(torch.zeros(HIDDEN, dtype=torch.float64))

    def forward(self, x):
        return x + torch.tanh(self.linear(x * self.scale))


class Chunk(nn.Module):
    """One stage of a toy model with a tied embedding."""

    def __init__(self, stage, ctx):
        super().__init__()
        self.stage, self.ends = stage, ctx.embedding_ends
        if stage.has_embedding or stage.has_loss:
            self.embedding = nn.Parameter(torch.zeros(VOCAB, HIDDEN, dtype=torch.float64))
        self.blocks = nn.ModuleDict({str(i): Block() for i in stage.layers})

    def layouts(self):
        return {
            "embedding": ParamLayout(
                whole_layout("embedding", (VOCAB, HIDDEN)).parts, tied=self.ends
            )
        }

    def forward(self, x, ids):
        if self.stage.has_embedding:
            x = self.embedding[ids]
        aux = x.new_zeros(())
        for block in self.blocks.values():
            x = block(x)
            aux = aux + x.pow(4).mean()
        return x, aux

    def loss(self, x, ids, mask):
        logits = x @ self.embedding.T
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), ids.flatten().roll(1), reduction="none"
        )
        return (losses * mask.flatten()).sum()


def fake_axis(size, rank):
    return Axis("pp", size, rank, None, tuple(range(size)))


def fill(model):
    for name, shard in named_shards(model).items():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        logical = torch.randn(shard.shape, dtype=torch.float64, generator=generator)
        for piece in shard.pieces:
            piece.data.copy_(logical)


def batch(step, microbatch, data_rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_rank)
    ids = torch.randint(0, VOCAB, (SEQUENCE, BATCH), generator=generator)
    valid = 0 if (microbatch, data_rank) == (1, 0) else (2 * microbatch + 3 * data_rank) % 6 + 1
    return ids, (torch.arange(SEQUENCE * BATCH) < valid).double().view(SEQUENCE, BATCH)


@dataclass(frozen=True)
class Case:
    world: int
    pp: int
    schedule: str = "1f1b"
    vpp: int = 1
    data: DataParallelConfig | None = None
    overlap: bool = True
    batched: bool = True


def schedule_of(case, num_microbatches):
    if case.schedule == "interleaved":
        return interleaved(case.pp, num_microbatches, case.vpp)
    config = PipelineConfig(pipeline_schedule=case.schedule)
    return build_schedule(config, case.pp, num_microbatches)


def stage_function(chunk, batches, count, num_shares, total):
    """The stage of one step; adds what it contributes to the loss to ``total``."""

    def function(x, microbatch):
        ids, mask = batches[microbatch]
        hidden, aux = chunk(x, ids)
        extra = aux / num_shares
        total.add_(extra.detach())
        if not chunk.stage.has_loss:
            return StageOutput(hidden, extra)
        loss = chunk.loss(hidden, ids, mask) / count
        total.add_(loss.detach())
        return StageOutput(loss, extra)

    return function


def train(case):
    """Losses and norms of three steps, gradients of the first, weights at the end."""
    v_shaped = case.schedule in V_SHAPED
    ctx = ParallelContext.build(
        ParallelConfig(pipeline_model_parallel_size=case.pp),
        embedding_stages=(0,) if v_shaped else (),
    )
    queue = None if case.schedule in ("1f1b", "interleaved") else WeightQueue()
    stages = split_layers(LAYERS, case.pp, vpp=case.vpp, v_shaped=v_shaped)
    chunks = [Chunk(stage, ctx) for stage in stages_of_rank(stages, ctx.pp.rank)]
    if v_shaped and ctx.pp.rank == 0:
        chunks[1].embedding = chunks[0].embedding
    for chunk in chunks:
        fill(chunk)
    if queue is not None:
        queue.attach(*chunks)
    data_parallel = DataParallel(chunks, ctx, case.data or DataParallelConfig())
    optimizer = DistributedOptimizer(data_parallel, AdamW(AdamConfig()))
    share = DATA // ctx.dp.size
    mine = [(m, ctx.dp.rank * share + d) for m in range(MICROBATCHES) for d in range(share)]
    actions = schedule_of(case, len(mine))[ctx.pp.rank]
    losses, norms, grads = [], [], {}
    for step in range(3):
        data_parallel.zero_grad()
        batches = [batch(step, m, d) for m, d in mine]
        count = all_reduce(sum(mask.sum() for _, mask in batches), ctx.dp_cp)
        total = torch.zeros((), dtype=torch.float64)
        with data_parallel.no_sync():
            run_schedule(
                actions,
                {
                    i: stage_function(chunk, batches, count, MICROBATCHES * DATA, total)
                    for i, chunk in enumerate(chunks)
                },
                ctx.pp,
                back=ctx.pp_back,
                shape=(SEQUENCE, BATCH, HIDDEN),
                dtype=torch.float64,
                before_last_backward=data_parallel.start_sync,
                before_last_weights=data_parallel.start_weight_sync,
                weight_queue=queue,
                v_shaped=v_shaped,
                overlap=case.overlap,
                batched=case.batched,
            )
        data_parallel.finish()
        losses.append(all_reduce(total, ctx.world).item())
        norms.append(optimizer.grad_norm().item())
        grads = grads or gather_logical(data_parallel.grad_shards(), ctx.world)
        optimizer.step(0.01, 0.1)
    shards = {}
    for chunk in chunks:
        shards.update(named_shards(chunk, ctx.data_axes()))
    return losses, norms, grads, gather_logical(shards, ctx.world)


@cache
def one_rank():
    return train(Case(1, 1))


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(tensor.abs().max().item() for tensor in expected.values())
    for name, tensor in expected.items():
        scale = max(tensor.abs().max().item(), floor)
        error = (found[name] - tensor).abs().max().item() / scale
        assert error <= EXACT, f"{name}: {error:.3g}"


OVERLAPPED = DataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, ddp_bucket_size=20
)
CASES = {
    "pp2": Case(2, 2),
    "pp4": Case(4, 4),
    "pp2 two chunks": Case(2, 2, "interleaved", 2),
    "pp2 zb-h1": Case(2, 2, "zb-h1"),
    "pp4 zb-h1": Case(4, 4, "zb-h1"),
    "pp2 dp2": Case(4, 2),
    "pp2 dp3 zero overlapped": Case(6, 2, data=OVERLAPPED),
    "pp2 two chunks, one by one": Case(2, 2, "interleaved", 2, batched=False),
    "pp4, one by one": Case(4, 4, batched=False),
    "pp4, one by one, waited for": Case(4, 4, overlap=False, batched=False),
    "pp2 zb-h1, waited for": Case(2, 2, "zb-h1", overlap=False),
    "pp2 dp2 zb-h1 zero overlapped": Case(4, 2, "zb-h1", data=OVERLAPPED),
    "pp2 dp2 zero two chunks overlapped": Case(4, 2, "interleaved", 2, OVERLAPPED),
    "pp2 zb-v": Case(2, 2, "zb-v", 2),
    "pp2 dp2 dualpipev zero overlapped": Case(4, 2, "dualpipev", 2, OVERLAPPED),
}


LONG = {"pp4 zb-h1", "pp4, one by one", "pp2 zb-h1, waited for"}
"""What others nearly hold: in the long suite."""


def marked(name):
    marks = pytest.mark.parity_long if name in LONG else ()
    return pytest.param(CASES[name], marks=marks, id=name)


@pytest.mark.parametrize("case", [marked(name) for name in CASES])
def test_pipelines_equal_one_rank(case):
    losses, norms, grads, weights = one_rank()
    for found_losses, found_norms, found_grads, found_weights in run_ranks(
        train, case.world, case
    ):
        assert found_losses == pytest.approx(losses, rel=1e-12)
        assert found_norms == pytest.approx(norms, rel=1e-12)
        assert_close(found_grads, grads)
        assert_close(found_weights, weights)


def shapes_and_memory():
    """Hidden states of different lengths; how many outputs are alive at each forward."""
    ctx = ParallelContext.build(ParallelConfig(pipeline_model_parallel_size=2))
    weight = nn.Parameter(torch.full((2,), 1.0 + ctx.pp.rank))
    outputs, alive = [], []

    def stage(x, microbatch):
        alive.append(sum(output() is not None for output in outputs))
        if x is None:
            x = torch.arange(1.0, microbatch + 2.0)[:, None].expand(-1, 2)
        out = x * weight
        outputs.append(weakref.ref(out))
        return StageOutput(out.sum() if ctx.pp.rank else out)

    schedule = one_f_one_b(2, 6)
    run_schedule(
        schedule[ctx.pp.rank],
        {0: stage},
        ctx.pp,
        shape=lambda microbatch, sender: (microbatch + 1, 2),
    )
    return weight.grad, alive


def test_hidden_states_may_differ_in_shape_and_are_freed_once_sent():
    (first, alive), (last, _) = run_ranks(shapes_and_memory, 2)
    total = sum(sum(range(1, m + 2)) for m in range(6))
    assert first.tolist() == [2.0 * total] * 2
    assert last.tolist() == [1.0 * total] * 2
    assert max(alive) == 0


def forward_without_gradient():
    ctx = ParallelContext.build(ParallelConfig(pipeline_model_parallel_size=2))
    weight = nn.Parameter(torch.tensor(3.0))
    seen = []

    def stage(x, microbatch):
        out = weight * (torch.full((2,), float(microbatch)) if x is None else x)
        seen.append((out.requires_grad, out.sum().item()))
        return StageOutput(out.sum() if ctx.pp.rank else out)

    run_schedule(forward_only(2, 3)[ctx.pp.rank], {0: stage}, ctx.pp, shape=(2,))
    return seen


def test_evaluation_runs_forwards_alone_without_gradient():
    first, last = run_ranks(forward_without_gradient, 2)
    assert first == [(False, 6.0 * m) for m in range(3)]
    assert last == [(False, 18.0 * m) for m in range(3)]


def frozen_first_stage():
    ctx = ParallelContext.build(ParallelConfig(pipeline_model_parallel_size=2))
    weight = nn.Parameter(torch.tensor(3.0), requires_grad=ctx.pp.rank == 1)

    def stage(x, microbatch):
        out = weight * (torch.full((2,), 1.0 + microbatch) if x is None else x)
        return StageOutput(out.sum() if ctx.pp.rank else out)

    run_schedule(one_f_one_b(2, 2)[ctx.pp.rank], {0: stage}, ctx.pp, shape=(2,))
    return weight.grad


def test_a_stage_without_trainable_weights_takes_part():
    first, last = run_ranks(frozen_first_stage, 2)
    assert first is None
    assert last.item() == 2 * 3.0 * (1.0 + 2.0)


def passes_a_state_by():
    """Three stages: the first makes a state that the last two read and hand through."""
    ctx = ParallelContext.build(ParallelConfig(pipeline_model_parallel_size=3))
    weight = nn.Parameter(torch.tensor(2.0 + ctx.pp.rank))

    def stage(x, microbatch):
        if ctx.pp.rank == 0:
            y = weight * (1.0 + microbatch)
            return StageOutput({"state": y.expand(2).contiguous(), "hidden": y.view(1)})
        y = x["hidden"] * weight + weight * x["state"].sum()
        if ctx.pp.rank == 2:
            return StageOutput(y.sum())
        return StageOutput({"hidden": y, "state": x["state"]})

    def shape(microbatch, sender):
        return {"hidden": (1,), "state": (2,)}

    run_schedule(one_f_one_b(3, 4)[ctx.pp.rank], {0: stage}, ctx.pp, shape=shape)
    return weight.grad.item()


def test_stages_send_several_tensors_by_name_and_each_gets_its_gradient():
    a, b, c = (torch.tensor(2.0 + rank, requires_grad=True) for rank in range(3))
    for x in range(1, 5):
        ((a * x * b + b * 2 * a * x) * c + c * 2 * a * x).backward()
    assert run_ranks(passes_a_state_by, 3) == [a.grad.item(), b.grad.item(), c.grad.item()]


def test_a_wrong_output_is_refused_before_it_is_sent():
    def stage(x, microbatch):
        return StageOutput(torch.zeros(3, requires_grad=True))

    with pytest.raises(ValueError, match="expects a scalar loss"):
        run_schedule(one_f_one_b(1, 1)[0], {0: stage})
    for shape, options in (
        ((2,), {}),
        ((3,), {"dtype": torch.float64}),
        ((3,), {"device": "meta"}),
    ):
        with pytest.raises(ValueError, match=r"\(3,\) torch.float32 on cpu .* on this rank"):
            run_schedule(
                one_f_one_b(2, 1)[0], {0: stage}, fake_axis(2, 0), shape=shape, **options
            )


def test_chunks_that_do_not_fit_the_schedule_are_refused():
    with pytest.raises(
        ValueError, match=r"runs chunks \[0\], but functions are given for \[\]"
    ):
        run_schedule(one_f_one_b(1, 1)[0], {})


def test_actions_of_another_rank_or_of_all_are_refused_before_any_message():
    schedule = one_f_one_b(2, 2)
    for actions, axis in ((schedule[0], SINGLE), (one_f_one_b(1, 2)[0], fake_axis(2, 1))):
        with pytest.raises(ValueError, match=r"not those of rank \d of \d: build the schedule"):
            run_schedule(actions, {0: lambda x, microbatch: None}, axis)
    with pytest.raises(ValueError, match="not those of rank 0 of 2"):
        run_schedule(schedule[1], {0: lambda x, microbatch: None}, fake_axis(2, 0))


def all_of_a_schedule():
    try:
        run_schedule(one_f_one_b(2, 2), {0: lambda x, microbatch: None})
    except TypeError as error:
        return str(error)


def test_the_actions_of_all_ranks_at_once_are_refused():
    (told,) = run_ranks(all_of_a_schedule, 1, check_shapes=False)
    assert "schedule[axis.rank], not the schedule" in told


def test_a_stage_that_returns_a_bare_tensor_is_told_what_to_return():
    with pytest.raises(TypeError, match=r"chunk 0 returned Tensor: it must return StageOutput"):
        run_schedule(one_f_one_b(1, 1)[0], {0: lambda x, microbatch: torch.zeros(())})


def two_products():
    torch.manual_seed(0)
    return nn.Sequential(ColumnParallelLinear(3, 3), ColumnParallelLinear(3, 1))


def test_a_queue_under_a_whole_backward_is_emptied_at_once():
    found, x = [], torch.ones(2, 1, 3)
    for queue in (None, WeightQueue()):
        model = two_products()
        if queue is not None:
            queue.attach(model)
        data_parallel = DataParallel([model], ParallelContext.single(), DataParallelConfig())
        data_parallel.zero_grad()  # of weights that are all overwritten

        def stage(_x, microbatch, model=model):
            return StageOutput(model(x * (1 + microbatch)).sum())

        run_schedule(one_f_one_b(1, 2)[0], {0: stage}, weight_queue=queue)
        data_parallel.finish()
        found.append([grad_slot(p).main for p in model.parameters()])
    assert all(map(torch.equal, *found))
    assert all(gradient.any() for gradient in found[0])


def test_gradients_that_wait_in_a_queue_are_not_taken_for_zero():
    model, queue = two_products(), WeightQueue()
    queue.attach(model)
    data_parallel = DataParallel([model], ParallelContext.single(), DataParallelConfig())
    model(torch.ones(2, 1, 3)).sum().backward()
    with pytest.raises(
        RuntimeError, match="a WeightQueue still holds deferred weight gradients"
    ):
        data_parallel.finish()


def test_a_queue_comes_before_data_parallelism():
    model = two_products()
    DataParallel([model], ParallelContext.single(), DataParallelConfig())
    with pytest.raises(ValueError, match=r"call attach\(\) first, then wrap"):
        WeightQueue().attach(model)


def test_a_split_backward_without_a_queue_is_refused():
    with pytest.raises(ValueError, match="needs a weight_queue, to which linears defer"):
        run_schedule(zero_bubble_h1(1, 1)[0], {0: lambda x, microbatch: None})


def test_what_a_queue_holds_is_prepared_under_the_work_before_and_then_let_go():
    seen, queue = [], WeightQueue()
    weight = nn.Parameter(torch.ones(2))

    class Split(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            for name in "abc":
                begin = None if name == "b" else lambda name=name: seen.append(f"begin {name}")
                queue.put(lambda name=name: seen.append(f"make {name}"), begin)
            return grad.expand(2)

    run_schedule(
        zero_bubble_h1(1, 1)[0],
        {0: lambda x, microbatch: StageOutput(Split.apply(weight))},
        before_last_backward=lambda chunk: seen.append(f"last input {chunk}"),
        before_last_weights=lambda chunk: seen.append(f"last weights {chunk}"),
        weight_queue=queue,
    )
    assert seen == [
        "last input 0",
        "last weights 0",
        "begin a",
        "make a",
        "begin c",
        "make b",
        "make c",
    ]
    assert queue.take() == []
