"""Saved under one layout, loaded under another: every element bitwise where it belongs."""

import itertools
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn
from warm_ranks import run_ranks

from mcore_ckpt.save_load.loading import load
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.paths import resolve_folder
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import (
    ParamLayout,
    Part,
    Piece,
    Shard,
    flat_shards,
    named_parameters,
    named_shards,
    whole_layout,
)

D, N, G, H, F, E, V, L = 6, 4, 2, 3, 8, 4, 13, 4


@dataclass(frozen=True)
class Case:
    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: bool = True
    bucket_align: int = 8

    def build(self) -> ParallelContext:
        return ParallelContext.build(
            ParallelConfig(
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                context_parallel_size=self.cp,
                expert_model_parallel_size=self.ep,
                expert_tensor_parallel_size=self.etp,
            )
        )


CASES = {
    "single": Case(),
    "tp2": Case(2, tp=2),
    "tp4 with 2 kv heads": Case(4, tp=4),
    "dp2 zero": Case(2),
    "dp4 zero, more padding than a shard": Case(4, bucket_align=4096),
    "dp2 whole": Case(2, zero=False),
    "pp2": Case(2, pp=2),
    "pp2 with two chunks a rank": Case(2, pp=2, vpp=2),
    "cp2": Case(2, cp=2),
    "ep2": Case(2, ep=2),
    "tp2 dp2": Case(4, tp=2),
    "tp2 pp2": Case(4, tp=2, pp=2),
    "pp2 dp2": Case(4, pp=2),
    "tp2 ep2": Case(4, tp=2, ep=2),
    "tp2 expert tp2 dp2": Case(4, tp=2, etp=2),
    "tp2 pp2 dp2": Case(8, tp=2, pp=2),
    "pp2 tp2 ep2 with two chunks a rank": Case(8, tp=2, pp=2, vpp=2, ep=2),
    "cp2 pp2 dp2": Case(8, pp=2, cp=2),
}

EXTRA = {
    "iteration": 7,
    "consumed_train_samples": 123_456_789_012,
    "schedule": {"lr": 1e-4, "lr_decay_style": "cosine"},
    "data": {"epoch": 2, "sources": [["wiki", 0.25], ["code", 0.75]]},
}
DATA_PLAN = b'{"stretches": [[1, 0, 4]]}'


class Laid(nn.Module):
    """A parameter with a given layout."""

    def __init__(self, shape: tuple[int, ...], layout: ParamLayout) -> None:
        super().__init__()
        # NaN where no part lies: padding must never travel.
        self.weight = nn.Parameter(torch.full(shape, torch.nan, dtype=torch.bfloat16))
        self.layout = layout

    def layouts(self) -> dict[str, ParamLayout]:
        return {"weight": self.layout}


def vocabulary(ctx: ParallelContext, tied: bool) -> Laid:
    rows = -(-V // (8 * ctx.tp.size)) * 8
    first = min(ctx.tp.rank * rows, V)
    count = min(rows, V - first)
    part = Part("weight", (V, D), (first, 0), (0, 0), (count, D))
    ends = ctx.embedding_ends if tied else SINGLE
    return Laid((rows, D), ParamLayout((part,), tied=ends))


def fused_qkv(ctx: ParallelContext) -> Laid:
    """q, k and v rows in one parameter; key/value heads replicated over a block of tp."""
    blocks = max(1, ctx.tp.size // G)
    share = ctx.tp_block(blocks) if blocks > 1 else SINGLE
    q = N * H // ctx.tp.size
    kv = G * H // (ctx.tp.size // blocks)
    where = ctx.tp.rank // blocks * kv
    return Laid(
        (q + 2 * kv, D),
        ParamLayout(
            (
                Part("q.weight", (N * H, D), (ctx.tp.rank * q, 0), (0, 0), (q, D)),
                Part("k.weight", (G * H, D), (where, 0), (q, 0), (kv, D), share),
                Part("v.weight", (G * H, D), (where, 0), (q + kv, 0), (kv, D), share),
            )
        ),
    )


def row_parallel(ctx: ParallelContext) -> Laid:
    local = N * H // ctx.tp.size
    part = Part("weight", (D, N * H), (0, ctx.tp.rank * local), (0, 0), (D, local))
    return Laid((D, local), ParamLayout((part,)))


def column_parallel(ctx: ParallelContext, rows: int, width: int) -> Laid:
    local = rows // ctx.tp.size
    part = Part("weight", (rows, width), (ctx.tp.rank * local, 0), (0, 0), (local, width))
    return Laid((local, width), ParamLayout((part,)))


def experts(ctx: ParallelContext) -> Laid:
    """Stacked gate and up of this rank's experts, cut over expert_tp."""
    count, rows = E // ctx.ep.size, F // ctx.expert_tp.size
    first = ctx.expert_tp.rank * rows
    parts = tuple(
        Part(
            f"{ctx.ep.rank * count + e}.{name}.weight",
            (F, D),
            (first, 0),
            (e, i * rows, 0),
            (1, rows, D),
        )
        for e in range(count)
        for i, name in enumerate(("gate", "up"))
    )
    return Laid((count, 2 * rows, D), ParamLayout(parts, data="expert"))


def build_model(ctx: ParallelContext, case: Case) -> nn.Module:
    model = nn.ModuleDict()
    chunks = ctx.pp.size * case.vpp
    mine = {c * ctx.pp.size + ctx.pp.rank for c in range(case.vpp)}
    if 0 in mine:
        model["embedding"] = vocabulary(ctx, tied=True)
    if chunks - 1 in mine:
        # The tied copy of the last stage; with one stage it is the very same parameter.
        model["final_norm"] = Laid((D,), whole_layout("weight", (D,), ctx.tp))
        if "embedding" not in model:
            model["embedding"] = vocabulary(ctx, tied=True)
    layers = nn.ModuleDict()
    for layer in range(L):
        if layer * chunks // L in mine:
            layers[str(layer)] = block(ctx)
    model["blocks"] = layers
    if chunks - 1 in mine:
        # One more token predicted: a block of its own beside the head, on the last stage.
        joined = {"join": column_parallel(ctx, 2 * F, 2 * D), "block": block(ctx)}
        norms = {
            n: Laid((D,), whole_layout("weight", (D,), ctx.tp)) for n in ("enorm", "hnorm")
        }
        model["mtp"] = nn.ModuleDict({"0": nn.ModuleDict(norms | joined)})
    return model


def block(ctx: ParallelContext) -> nn.Module:
    return nn.ModuleDict(
        {
            "norm": Laid((D,), whole_layout("weight", (D,), ctx.tp)),
            "qkv": fused_qkv(ctx),
            "proj": row_parallel(ctx),
            "experts": experts(ctx),
        }
    )


def rng_shards(ctx: ParallelContext) -> dict[str, Shard]:
    """Each rank's random streams, under names that no other rank has, as a run saves them."""
    shards = {}
    for stream in ("default", "tensor_parallel"):
        state = torch.zeros(40, dtype=torch.uint8)
        piece = Piece((0,), (40,), state)
        shards[f"rng.{stream}.{ctx.world.rank}"] = Shard((40,), state.dtype, (piece,))
    return shards


def zero_shards(
    model: nn.Module, ctx: ParallelContext, case: Case
) -> tuple[dict[str, Shard], list[torch.Tensor]]:
    """Optimizer state: one flat buffer a kind of data axis, padded, cut over its ranks."""
    data = ctx.data_axes()
    shards, buffers = {}, []
    for kind, data_axis in data.items():
        named = [p for p in named_parameters(model) if p.layout.data == kind]
        axis = data_axis if case.zero else SINGLE
        total = sum(p.parameter.numel() for p in named)
        share = -(-total // (case.bucket_align * axis.size)) * case.bucket_align
        buffer = torch.full((share,), torch.nan)
        buffers.append(buffer)
        begin, stop, at, ranges = axis.rank * share, (axis.rank + 1) * share, 0, []
        for p in named:
            size = p.parameter.numel()
            low, high = max(at, begin), min(at + size, stop)
            if low < high:
                ranges.append((p, low - at, high - at, buffer[low - begin : high - begin]))
            at += size
        shards |= flat_shards(ranges, None if case.zero else data)
    return shards, buffers


def truth(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The whole logical tensor: numbers that name and place alone decide."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if not dtype.is_floating_point:
        return torch.randint(256, shape, generator=generator, dtype=dtype)
    return torch.randn(prod(shape), generator=generator).view(shape).to(dtype)


def everything(case: Case) -> tuple[ParallelContext, dict[str, Shard], list[torch.Tensor]]:
    ctx = case.build()
    model = build_model(ctx, case)
    shards = {f"model.{n}": s for n, s in named_shards(model, ctx.data_axes()).items()}
    state, memory = zero_shards(model, ctx, case)
    shards |= {f"optimizer.exp_avg.{name}": shard for name, shard in state.items()}
    return ctx, shards, [*(p.detach() for p in model.parameters()), *memory]


def boxed(piece, whole_tensor: torch.Tensor) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(piece.offsets, piece.lengths, strict=True)):
        whole_tensor = whole_tensor.narrow(dim, offset, length)
    return whole_tensor


def save_under(case: Case, folder: str) -> int:
    ctx, shards, _ = everything(case)
    shards |= rng_shards(ctx)
    for name, shard in shards.items():
        for piece in shard.pieces:
            piece.data.copy_(boxed(piece, truth(name, shard.shape, shard.dtype)))
    files = {"data_plan.json": DATA_PLAN}
    path = save(folder, 7, shards, world=ctx.world, extra=EXTRA, files=files)
    ctx.destroy()
    mine = path / f"rank_{ctx.world.rank:05d}.safetensors"
    return mine.stat().st_size if mine.exists() else 0


def load_under(
    case: Case, folder: str, is_same: bool = False, share: str = "auto"
) -> tuple[int, int]:
    ctx, shards, memory = everything(case)
    padding = sum(int(m.isnan().sum()) for m in memory)
    # Random streams belong to ranks: only the same layout asks for them.
    streams = rng_shards(ctx) if is_same else {}
    ignore = () if is_same else ("rng.",)
    extra = load(folder, shards | streams, world=ctx.world, ignore=ignore, share=share)
    assert extra == EXTRA
    assert (resolve_folder(folder) / "data_plan.json").read_bytes() == DATA_PLAN
    for name, stream in streams.items():
        assert torch.equal(stream.pieces[0].data, truth(name, stream.shape, stream.dtype))
    filled = 0
    for name, shard in shards.items():
        for piece in shard.pieces:
            wanted = boxed(piece, truth(name, shard.shape, shard.dtype))
            assert torch.equal(piece.data, wanted), name
            filled += piece.data.numel()
    # What is no part of a logical tensor was not touched.
    assert sum(int(m.isnan().sum()) for m in memory) == padding - filled
    ctx.destroy()
    return filled, padding


def pairs() -> list:
    every = list(itertools.product(CASES, CASES))
    # Each layout is saved or loaded; the rest in the long run.
    names = list(CASES)
    few = [(names[i], names[(i * 8 + 1) % len(names)]) for i in range(0, len(names), 2)]
    return [
        pytest.param(a, b, marks=[] if (a, b) in few else pytest.mark.parity_long)
        for a, b in every
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root, done = tmp_path_factory.mktemp("layouts"), {}

    def of(name: str) -> Path:
        if name not in done:
            done[name] = root / name.replace(" ", "_").replace(",", "")
            run_ranks(save_under, CASES[name].world, CASES[name], str(done[name]))
        return done[name]

    return of


@pytest.mark.parametrize(("source", "target"), pairs())
def test_what_one_layout_saves_another_loads_bitwise(saved, source, target):
    case = CASES[target]
    filled = run_ranks(load_under, case.world, case, str(saved(source)), source == target)
    assert all(count > 0 for count, _ in filled)


@pytest.mark.parametrize("target", ["dp2 whole", "tp4 with 2 kv heads", "tp2 ep2"])
def test_what_one_rank_reads_for_others_is_the_same(saved, target):
    case = CASES[target]
    filled = run_ranks(load_under, case.world, case, str(saved("tp2 dp2")), False, "always")
    assert all(count > 0 for count, _ in filled)


def test_each_byte_is_written_once_and_replicas_share_the_writing(tmp_path):
    alone = run_ranks(save_under, 1, CASES["single"], str(tmp_path / "a"))
    shared = run_ranks(save_under, 4, Case(4, zero=False), str(tmp_path / "b"))
    payload = sum(
        prod(s.shape) * s.dtype.itemsize for s in everything(CASES["single"])[1].values()
    )
    assert payload < sum(alone) < payload + 20_000
    assert sum(shared) < payload + 4 * 20_000
    assert max(shared) < 1.3 * min(shared)
