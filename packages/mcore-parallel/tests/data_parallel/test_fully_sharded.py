"""Weights sharded by torch's ``fully_shard``: formats, loads, and copies of instances."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from warm_ranks import run_ranks

from mcore_parallel.autograd.grad_slot import grad_slot, overwrites
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.data_parallel.engines import ENGINES
from mcore_parallel.data_parallel.replica_checks import UnlikeWeightsError
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.testing.ranks import gather_logical


class Block(nn.Linear):
    """Computes in the dtype of what comes in, which its gathered weights must have."""

    def forward(self, x):
        assert self.weight.dtype == self.bias.dtype == x.dtype
        return super().forward(x).tanh()


class Chunk(nn.Module):
    """Two blocks of uneven rows between plain layers, and a parameter of another dtype."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first = Block(4, 5, dtype=dtype)
        self.blocks = nn.ModuleDict({str(i): Block(5, 5, dtype=dtype) for i in range(2)})
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.full((5,), 2.0, dtype=dtype), requires_grad=False)

    def forward(self, x):
        x = self.first(x) * self.frozen
        for block in self.blocks.values():
            x = block(x)
        return x * self.scale.to(x.dtype)


def train(strategy, dtype, steps=2, has_main=True, **options):
    is_alone = strategy == "no_shard"
    ctx = ParallelContext.single() if is_alone else ParallelContext.build(ParallelConfig())
    config = DataParallelConfig(data_parallel_sharding_strategy=strategy, **options)
    chunk = Chunk(dtype)
    held = list(chunk.parameters())
    engine = ENGINES[config.sharding]([chunk], ctx, config)
    left = {id(parameter) for parameter in chunk.parameters()}
    assert not [p for p in held if p.numel() and id(p) not in left]  # no whole weight stays
    optimizer = DistributedOptimizer(engine, AdamW(AdamConfig()), has_main=has_main)
    for step in range(steps):
        engine.zero_grad()
        batches = [backward_input(6 * step + i, dtype) for i in range(6)]
        own = batches[ctx.dp.rank :: ctx.dp.size]
        with engine.no_sync():
            for x in own[:-1]:
                chunk(x).square().sum().backward()
            engine.start_sync(0)
            chunk(own[-1]).square().sum().backward()
        engine.finish()
        optimizer.step(lr=0.01, weight_decay=0.1)
    return engine, optimizer, chunk, ctx


def backward_input(seed, dtype):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(shards, ctx):
    return gather_logical(shards, ctx.world)


def check_formats():
    """In 16 bits: rows and gradients in float32, gathered weights and their copies narrow."""
    expected, reference, *_ = train("no_shard", torch.bfloat16)
    for strategy in ("optim_grads", "optim_grads_params"):
        engine, optimizer, chunk, ctx = train(strategy, torch.bfloat16)
        engine.wait_params()
        state = whole(optimizer.named_shards(), ctx)
        wanted = whole(reference.named_shards(), ParallelContext.single())
        assert state.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert state[name].dtype == tensor.dtype
            torch.testing.assert_close(state[name], tensor, rtol=0.02, atol=2e-3)
        weights = whole(engine.weight_shards(), ctx)
        for name, shard in expected.weight_shards().items():
            assert weights[name].dtype == shard.dtype, name
        for name in weights.keys() - {"scale", "frozen"}:
            assert (weights[name] == state[f"main.{name}"].bfloat16()).all()
        assert {s.dtype for n, s in engine.grad_shards().items() if n != "scale"} == {
            torch.float32
        }
        rows = [p.to_local().shape[0] for p in chunk.parameters() if isinstance(p, DTensor)]
        assert set(rows) == {1 if ctx.dp.rank == 2 else 2}
        ctx.destroy()


def check_narrow_rows():
    """Rows and gradients in 16 bits: main weights are the optimizer's, or there are none."""
    _, reference, *_ = train("no_shard", torch.bfloat16)
    wanted = whole(reference.named_shards(), ParallelContext.single())
    for strategy in ("optim_grads", "optim_grads_params"):
        for has_main in (True, False):
            options = {"has_main": has_main, "main_grads_dtype": "bf16"}
            engine, optimizer, _, ctx = train(strategy, torch.bfloat16, **options)
            state = whole(optimizer.named_shards(), ctx)
            weights = whole(engine.weight_shards(), ctx)
            assert {n for n in state if n.startswith("main.")} == {
                n for n in wanted if n.startswith("main.") and has_main
            }
            for name, tensor in state.items():
                torch.testing.assert_close(tensor, wanted[name], rtol=0.02, atol=3e-3)
            for name in weights.keys() - {"scale", "frozen"}:
                main = wanted[f"main.{name}"]
                torch.testing.assert_close(weights[name].float(), main, rtol=0.02, atol=3e-3)
                if has_main:
                    assert (weights[name] == state[f"main.{name}"].bfloat16()).all()
            for unit in engine.units:
                if unit.dtype == torch.bfloat16:
                    assert unit.own_main() is None
                    assert unit.own_grads().dtype == torch.bfloat16
                    assert unit.own_weights().data_ptr() == unit.rows.data_ptr()
            ctx.destroy()


def check_narrow_sums():
    """Gradients travel in 16 bits where a flag says so: their sums are bfloat16 numbers."""
    found = []
    for is_narrow in (False, True):
        options = {"grad_reduce_in_bf16": is_narrow}
        engine, *_, ctx = train("optim_grads", torch.bfloat16, steps=1, **options)
        grads = whole(engine.grad_shards(), ctx)
        found.append(torch.cat([each.flatten() for n, each in grads.items() if n != "scale"]))
        ctx.destroy()
    wide, narrow = found
    assert not torch.equal(wide, narrow)
    torch.testing.assert_close(narrow, wide, rtol=0.02, atol=2e-3)


def check_loading():
    """A load into the shards is what the next forward sees, whatever was gathered before."""
    engine, optimizer, chunk, ctx = train("optim_grads_params", torch.bfloat16)
    x = backward_input(99, torch.bfloat16)
    with torch.no_grad():
        chunk(x)  # leaves the weights of the root gathered
        for name, shard in engine.weight_shards().items():
            for piece in shard.pieces if name not in ("scale", "frozen") else ():
                piece.data.zero_()
        optimizer.refresh(from_parameters=True)
        assert not chunk(x).any()
        for name, shard in optimizer.named_shards().items():
            for piece in shard.pieces:
                piece.data.fill_(0.5 if name.startswith("main.") else 0.0)
        optimizer.refresh()
        alike = Chunk(torch.bfloat16)
        for name, parameter in alike.named_parameters():
            if name not in ("frozen", "scale"):
                parameter.fill_(0.5)
        alike.scale.copy_(chunk.scale)
        assert (chunk(x) == alike(x)).all()
    assert all(
        (tensor == 0.5).all()
        for name, tensor in whole(engine.weight_shards(), ctx).items()
        if name not in ("frozen", "scale")
    )
    with pytest.raises(RuntimeError, match="summed already"):
        engine.finish()
    ctx.destroy()


def check_meta_device():
    """Weights without memory become zeros, rows or whole, until a function sets them."""
    ctx = ParallelContext.build(ParallelConfig())
    with torch.device("meta"):
        chunk = Chunk(torch.bfloat16)
    slot = grad_slot(overwrites(chunk.scale))
    engine = ENGINES["optim_grads_params"](
        [chunk], ctx, DataParallelConfig(use_torch_fsdp2=True)
    )
    assert grad_slot(chunk.scale) is slot
    assert not chunk.frozen.requires_grad
    expected = dict(Chunk(torch.bfloat16).named_parameters())
    seen = []

    def fill(weights):
        for name, shard in weights.items():
            seen.append(name)
            for piece in shard.pieces:
                assert not piece.data.any()
                assert piece.data.dtype == expected[name].dtype
                box = zip(piece.offsets, piece.lengths, strict=True)
                piece.data.copy_(expected[name][tuple(slice(o, o + n) for o, n in box)])

    engine.fill_weights(fill)
    assert sorted(seen) == sorted(expected)  # each once
    for name, weight in whole(engine.weight_shards(), ctx).items():
        assert torch.equal(weight, expected[name])
    x = backward_input(0, torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(chunk(x), Chunk(torch.bfloat16)(x))
    ctx.destroy()


def check_all():
    check_formats()
    check_narrow_rows()
    check_meta_device()
    check_narrow_sums()
    check_loading()


def test_rows_are_main_weights_and_a_load_reaches_what_was_gathered():
    run_ranks(check_all, 3)


def check_hybrid():
    parallel = ParallelConfig(num_distributed_optimizer_instances=2)
    ctx = ParallelContext.build(parallel)
    chunk = Chunk(torch.float32)
    config = DataParallelConfig(use_torch_fsdp2=True)
    engine = ENGINES[config.sharding]([chunk], ctx, config)
    optimizer = DistributedOptimizer(engine, AdamW(AdamConfig()))
    for step in range(2):
        engine.zero_grad()
        with engine.no_sync():
            for place in range(2):
                if place:
                    engine.start_sync(0)
                x = backward_input(8 * step + 2 * ctx.dp.rank + place, torch.float32)
                chunk(x).square().sum().backward()
        engine.finish()
        if step == 0:
            found, norm = whole(engine.grad_shards(), ctx), optimizer.grad_norm()
        optimizer.step(lr=0.01, weight_decay=0.1)
    engine.check_weights()
    if ctx.optimizer_replica.rank == 1:
        engine.units[0].own_main().add_(1e-6)
    with pytest.raises(UnlikeWeightsError, match=r"blocks\.1|hold unlike copies"):
        engine.check_weights()
    alone = Chunk(torch.float32)
    for seed in range(8):
        alone(backward_input(seed, torch.float32)).square().sum().backward()
    trained = {n: p.grad for n, p in alone.named_parameters() if p.requires_grad}
    for name, gradient in trained.items():
        torch.testing.assert_close(found[name], gradient)
    squares = sum(float(gradient.double().square().sum()) for gradient in trained.values())
    assert float(norm) == pytest.approx(squares**0.5, rel=1e-5)


def test_hybrid_sharding_sums_over_instances_once_and_finds_a_copy_that_came_apart():
    run_ranks(check_hybrid, 4)


def test_contradicting_options_are_refused():
    for options, message in (
        ({"use_torch_fsdp2": True, "ddp_bucket_size": 5}, "--ddp-bucket-size 5 has no effect"),
        ({"use_torch_fsdp2": True, "data_parallel_sharding_strategy": "optim"}, "leave one"),
        (
            {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "no_shard"},
            "leave one out",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            DataParallelConfig(**options)
