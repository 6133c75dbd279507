"""Weights gathered under the next forward: the same weights, and never a stale one."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from warm_ranks import run_ranks

from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.sharding import named_shards, whole_layout
from mcore_parallel.testing.ranks import gather_logical

PLAIN = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=20)
OVERLAPPED = DataParallelConfig(
    use_distributed_optimizer=True, ddp_bucket_size=20, overlap_param_gather=True
)


class Expert(nn.Linear):
    """A layer whose weights the data ranks of experts share."""

    def layouts(self):
        parts = {"weight": self.weight.shape, "bias": self.bias.shape}
        return {n: replace(whole_layout("", tuple(s)), data="expert") for n, s in parts.items()}


class Model(nn.Module):
    """The head's weight is used without a call of its module, as a fused loss does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(4, 6, dtype=torch.float64)
        self.blocks = nn.ModuleDict(
            {
                str(i): (Expert if i == 1 else nn.Linear)(6, 6, dtype=torch.float64)
                for i in range(3)
            }
        )
        self.head = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks.values():
            x = torch.tanh(block(x))
        return x @ self.head.weight.T + self.head.bias


def train(config, num_steps=4):
    ctx = ParallelContext.build(ParallelConfig())
    model = Model()
    data_parallel = DataParallel([model], ctx, config)
    optimizer = DistributedOptimizer(data_parallel, AdamW(AdamConfig()))
    for step in range(num_steps):
        data_parallel.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + ctx.dp.rank)
        x = torch.randn(3, 4, dtype=torch.float64, generator=generator)
        model(x).square().sum().backward()
        data_parallel.finish()
        optimizer.step(0.05, 0.1)
    data_parallel.wait_params()
    return gather_logical(named_shards(model, ctx.data_axes()), ctx.world)


def test_overlapped_gathers_give_the_same_weights_to_the_last_bit():
    expected = run_ranks(train, 3, PLAIN)[0]
    for found in run_ranks(train, 3, OVERLAPPED):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def gathers_waited_for():
    """Which buckets are still on their way when each part of the model has run."""
    ctx = ParallelContext.build(ParallelConfig())
    model = Model()
    data_parallel = DataParallel([model], ctx, OVERLAPPED)
    names = {id(p): name for name, p in model.named_parameters()}
    gathering = data_parallel._gathering
    seen = []

    def note(*_):
        seen.append([names[id(s.named.parameter)] for b in gathering._works for s in b.slots])

    model.embedding.register_forward_pre_hook(note)
    for block in model.blocks.values():
        block.register_forward_hook(note)
    data_parallel.gather_params()
    note()
    model(torch.zeros(2, 4, dtype=torch.float64))
    note()
    dist.barrier()
    return seen


def test_each_block_waits_for_its_own_weights_only():
    started, embedding, first, second, third, end = run_ranks(gathers_waited_for, 2)[0]
    assert len(started) == 10  # an expert's two among them
    left = [{name.rsplit(".", 1)[0] for name in names} for names in (embedding, first, second)]
    assert left == [
        {"blocks.0", "blocks.1", "blocks.2"},
        {"blocks.1", "blocks.2"},
        {"blocks.2"},
    ]
    assert third == end == []


def changed_by_owners(config):
    """Each rank writes its own range, as an update does; then forward reads the weights."""
    ctx = ParallelContext.build(ParallelConfig())
    model = Model()
    data_parallel = DataParallel([model], ctx, config)
    for bucket in data_parallel.buckets:
        bucket.owned(bucket.params).fill_(0.1)
    data_parallel.gather_params()
    return model(torch.ones(1, 4, dtype=torch.float64))


def test_forward_never_reads_a_stale_weight():
    expected = run_ranks(changed_by_owners, 3, PLAIN)[0]
    for _ in range(3):
        for found in run_ranks(changed_by_owners, 3, OVERLAPPED):
            assert torch.equal(found, expected)


def test_hooks_can_be_taken_out():
    model = Model()
    data_parallel = DataParallel([model], ParallelContext.single(), OVERLAPPED)
    data_parallel.gather_params()
    data_parallel.remove_hooks()
    assert not model._forward_pre_hooks
    assert not model.blocks["0"]._forward_pre_hooks
