"""Matrix rules over layouts: whole logical matrices, the same bits as on one rank."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from warm_ranks import run_ranks

from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel import matrix_exchange, optimizer_segments
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.data_parallel.engines import ENGINES
from mcore_parallel.data_parallel.matrix_exchange import _choose_owners, _Task
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig, MuonConfig, SoapConfig
from mcore_parallel.optimizers.muon import Muon
from mcore_parallel.optimizers.soap import Soap
from mcore_parallel.optimizers.update_rule import UpdateGroup
from mcore_parallel.sharding import ParamLayout, Part, sliced_layout, whole_layout
from mcore_parallel.testing.ranks import gather_logical

D, E = 8, 4
ROWS = {"q": 16, "k": 4, "v": 4}
RULES = {
    "muon": Muon(MuonConfig(muon_nesterov=True)),
    "adamuon": Muon(MuonConfig(muon_moment2_method="adamuon")),
    "normuon": Muon(MuonConfig(muon_moment2_method="normuon")),
    "soap": Soap(SoapConfig(soap_precondition_frequency=2)),
}


class Experts(nn.Module):
    """One matrix an expert, those of this rank in a stack."""

    def __init__(self, ctx):
        super().__init__()
        self.ctx = ctx
        self.stack = nn.Parameter(torch.zeros(E // ctx.ep.size, 6, D, dtype=torch.float64))

    def layouts(self):
        begin, everywhere = self.ctx.ep.rank * len(self.stack), self.ctx.expert_tp
        return {
            "stack": ParamLayout(
                tuple(
                    Part(
                        f"{begin + i}.weight", (6, D), (0, 0), (i, 0, 0), (1, 6, D), everywhere
                    )
                    for i in range(len(self.stack))
                ),
                data="expert",
            )
        }


class Block(nn.Module):
    """Fused q, k, v split by rows, a projection split by columns, a norm, experts."""

    def __init__(self, ctx):
        super().__init__()
        self.ctx, tp = ctx, ctx.tp.size
        rows = sum(ROWS.values()) // tp
        self.qkv = nn.Parameter(torch.zeros(rows, D, dtype=torch.float64))
        self.proj = nn.Parameter(torch.zeros(D, D // tp, dtype=torch.float64))
        self.norm = nn.Parameter(torch.zeros(D, dtype=torch.float64))
        self.experts = Experts(ctx)

    def layouts(self):
        tp = self.ctx.tp
        parts, local = [], 0
        for name, rows in ROWS.items():
            share = rows // tp.size
            at = (tp.rank * share, 0), (local, 0), (share, D)
            parts.append(Part(f"{name}.weight", (rows, D), *at))
            local += share
        return {
            "qkv": ParamLayout(tuple(parts)),
            "proj": sliced_layout("proj.weight", (D, D), 1, tp),
            "norm": whole_layout("norm.weight", (D,), tp),
        }


def number(name, step):
    return sum(ord(letter) * (i + 1) for i, letter in enumerate(name)) + 1000 * step


def fill(shards, step):
    """Set every piece from random numbers of its logical tensor and the step."""
    for name, shard in shards.items():
        generator = torch.Generator().manual_seed(number(name, step))
        values = torch.randn(shard.shape, generator=generator, dtype=torch.float64)
        for piece in shard.pieces:
            place = tuple(
                slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True)
            )
            piece.data.copy_(values[place])


def build(ctx, config, rule, joins=False, **options):
    engine = ENGINES[config.sharding]([Block(ctx)], ctx, config)
    engine.fill_weights(lambda shards: fill(shards, 0))
    adam = AdamW(AdamConfig())

    def group_of(named):
        is_matrix = all(len(part.shape) > 1 for part in named.layout.parts)
        joined = joins and named.name == "qkv"
        return UpdateGroup(RULES[rule] if is_matrix else adam, joins_parts=joined)

    options = {"group_of": group_of, **options}
    return engine, DistributedOptimizer(engine, RULES[rule], **options)


def train(engine, optimizer, steps):
    for step in steps:
        engine.zero_grad()
        engine.finish()
        fill(engine.grad_shards(), step)
        optimizer.step(0.1, 0.2, torch.tensor(0.5))
    engine.wait_params()


def state_after_steps(parallel, data, rule, options):
    ctx = ParallelContext.build(ParallelConfig(**parallel))
    engine, optimizer = build(ctx, DataParallelConfig(**data), rule, **options)
    train(engine, optimizer, (1, 2, 3))
    weights = gather_logical(engine.weight_shards(), ctx.world)
    return weights | gather_logical(optimizer.named_shards(), ctx.world)


def on_one_rank(rule, **options):
    engine, optimizer = build(ParallelContext.single(), DataParallelConfig(), rule, **options)
    train(engine, optimizer, (1, 2, 3))
    world = ParallelContext.single().world
    weights = gather_logical(engine.weight_shards(), world)
    return weights | gather_logical(optimizer.named_shards(), world)


ZERO = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 100}
LAYOUTS = [
    ({"tensor_model_parallel_size": 2}, {}),
    ({}, ZERO),
    ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, ZERO),
    ({"expert_model_parallel_size": 2, "context_parallel_size": 2}, ZERO),
    ({}, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    ({"num_distributed_optimizer_instances": 2}, ZERO),
]


def states_of_layouts(rule):
    return [state_after_steps(*layout, rule, {}) for layout in LAYOUTS]


@pytest.mark.parametrize(
    "rule",
    [
        *("muon", "soap"),
        *(pytest.param(rule, marks=pytest.mark.parity_long) for rule in ("adamuon", "normuon")),
    ],
)
def test_every_layout_gives_the_bits_of_one_rank(rule):
    expected = on_one_rank(rule)
    assert {"q.weight", "experts.3.weight", "exp_avg.norm.weight"} < expected.keys()
    for found in run_ranks(states_of_layouts, 4, rule):
        for layout, state in zip(LAYOUTS, found, strict=True):
            assert state.keys() == expected.keys(), layout
            for name, tensor in state.items():
                if name.endswith("norm.weight"):  # of AdamW, whose last bit depends on where
                    # a vector begins in memory
                    torch.testing.assert_close(tensor, expected[name], rtol=1e-14, atol=1e-15)
                else:
                    assert torch.equal(tensor, expected[name]), (layout, name)


def states_of_modes():
    parallel, modes = {"tensor_model_parallel_size": 2}, ("duplicated", "blockwise")
    options = [{"matrix_tp_mode": mode} for mode in modes]
    options += [{"joins": True}, {"joins": True, "matrix_tp_mode": "blockwise"}]
    options += [{"host_share": 0.6}]
    return [state_after_steps(parallel, ZERO, "muon", each) for each in options]


def test_modes_of_tensor_ranks_joined_rows_and_state_on_the_host():
    one, joined = on_one_rank("muon"), on_one_rank("muon", joins=True)
    assert not torch.equal(one["q.weight"], joined["q.weight"])
    assert torch.equal(one["proj.weight"], joined["proj.weight"])
    for duplicated, blocks, whole_rows, joined_blocks, hosted in run_ranks(states_of_modes, 4):
        for name, tensor in one.items():
            assert torch.equal(duplicated[name], tensor), name
            assert torch.equal(whole_rows[name], joined[name]), name
            assert torch.equal(hosted[name], tensor), name
            # A block is another matrix; tensors that are whole on each rank stay the same.
            is_split = name.removeprefix("momentum.") == name and name.split(".")[0] in (
                "q",
                "k",
                "v",
                "proj",
            )
            assert torch.equal(blocks[name], tensor) != is_split, name
        assert not torch.equal(joined_blocks["q.weight"], blocks["q.weight"])


def test_a_block_is_orthogonalized_by_itself():
    blocks = run_ranks(states_of_modes, 4)[0][1]
    engine, _ = build(ParallelContext.single(), DataParallelConfig(), "muon")
    rule, beta = RULES["muon"], RULES["muon"].config.muon_momentum
    weight = {n: s.pieces[0].data.clone() for n, s in engine.weight_shards().items()}[
        "proj.weight"
    ]
    momentum = torch.zeros_like(weight)
    for step in (1, 2, 3):
        gradient = torch.randn(
            (D, D),
            generator=torch.Generator().manual_seed(number("proj.weight", step)),
            dtype=torch.float64,
        )
        gradient *= 0.5
        momentum.lerp_(gradient, 1 - beta)
        ahead = gradient.lerp(momentum, beta)
        halves = [
            rule.direction(h[None].clone(), {}, num_steps=step)[0] for h in ahead.chunk(2, 1)
        ]
        direction = torch.cat(halves, 1) * rule.factor((D, D // 2))
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * direction
    torch.testing.assert_close(blocks["proj.weight"], weight, rtol=1e-12, atol=1e-12)


def test_small_chunks_and_pieces_give_the_same_bits(monkeypatch):
    expected = on_one_rank("muon")
    monkeypatch.setattr(matrix_exchange, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(optimizer_segments, "PIECE_BYTES", 768)
    ctx = ParallelContext.single()
    engine, optimizer = build(ctx, DataParallelConfig(), "muon", host_share=1.0)
    assert optimizer._exchange.num_chunks == 3
    train(engine, optimizer, (1, 2, 3))
    found = gather_logical(engine.weight_shards(), ctx.world)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def reload_under_another_layout():
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2))
    engine, optimizer = build(ctx, DataParallelConfig(**ZERO), "soap")
    train(engine, optimizer, (1,))
    saved = gather_logical(optimizer.named_shards(), ctx.world)
    saved |= gather_logical(engine.weight_shards(), ctx.world)
    other = ParallelContext.build(ParallelConfig())
    config = DataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    engine, optimizer = build(other, config, "soap")
    for name, shard in {**optimizer.named_shards(), **engine.weight_shards()}.items():
        for piece in shard.pieces:
            place = tuple(
                slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True)
            )
            piece.data.copy_(saved[name][place])
    optimizer.num_steps = 1
    optimizer.refresh()
    train(engine, optimizer, (2, 3))
    return gather_logical(engine.weight_shards(), other.world)


def test_state_of_whole_matrices_goes_on_under_another_layout():
    expected = on_one_rank("soap")
    for found in run_ranks(reload_under_another_layout, 2):
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_owners_are_chosen_by_cost():
    rule = SimpleNamespace(cost=lambda shape: max(shape) * min(shape) ** 2)
    shapes = [(8, 8)] * 2 + [(4, 4)] * 5 + [(4, 2)] * 3
    tasks = {str(i): _Task(str(i), s, rule, candidates=[0, 1, 2]) for i, s in enumerate(shapes)}
    loads = [0.0] * 3
    _choose_owners(tasks, loads)
    assert Counter(t.owner for t in tasks.values() if t.shape == (8, 8)) == {0: 1, 1: 1}
    assert {t.owner for t in tasks.values() if t.shape != (8, 8)} == {2}
    assert loads == [512, 512, 5 * 64 + 3 * 16]
