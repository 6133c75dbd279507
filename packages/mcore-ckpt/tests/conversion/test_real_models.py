"""A GPT with its sharded optimizer: saved under one layout, loaded under another."""

import zlib
from dataclasses import dataclass
from math import prod

import pytest
import torch
from warm_ranks import run_ranks

from mcore_ckpt.save_load.loading import load
from mcore_ckpt.save_load.saving import save
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.pipeline_parallel.stages import split_layers
from mcore_parallel.sharding import named_shards

pytest.importorskip("mcore_models")


@dataclass(frozen=True)
class Case:
    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    zero: bool = True


LONG = pytest.mark.parity_long
CASES = {
    "single": Case(),
    "pp2": Case(2, pp=2),
    "tp2 dp2": Case(4, tp=2),
    "pp2 dp2 with two chunks a rank": Case(4, pp=2, vpp=2),
    "dp4 ep2": Case(4, ep=2),
    "dp2 whole": Case(2, zero=False),
}


def build(case, tied):
    """Build the model in bf16, its optimizer, and everything that a checkpoint holds."""
    from mcore_models.config import TransformerConfig
    from mcore_models.gpt import GPT
    from mcore_moe.config import MoEConfig

    config = TransformerConfig(
        num_layers=4,
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=10,
        make_vocab_size_divisible_by=8,
        untie_embeddings_and_output_weights=not tied,
        add_qkv_bias=True,
    )
    ctx = ParallelContext.build(
        ParallelConfig(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            expert_model_parallel_size=case.ep,
        )
    )
    stages = split_layers(config.num_layers, case.pp, vpp=case.vpp)
    chunks = [
        GPT(
            config,
            ctx,
            vocab_size=37,
            moe=MoEConfig(num_experts=2, moe_layer_freq="2"),
            stage=stages[chunk * case.pp + ctx.pp.rank],
            dtype=torch.bfloat16,
        )
        for chunk in range(case.vpp)
    ]
    options = DataParallelConfig(use_distributed_optimizer=case.zero, ddp_bucket_size=500)
    optimizer = DistributedOptimizer(DataParallel(chunks, ctx, options), AdamW(AdamConfig()))
    shards = {}
    for chunk in chunks:
        described = named_shards(chunk, ctx.data_axes())
        shards |= {f"model.{name}": shard for name, shard in described.items()}
    shards |= {f"optimizer.{name}": shard for name, shard in optimizer.named_shards().items()}
    return ctx, shards, optimizer


def poison(optimizer):
    """Fill the optimizer's flat memory, padding included, with NaN."""
    for segments in optimizer._segments.values():
        for segment in segments:
            for flat in (segment.main, *segment.moments.values()):
                flat.fill_(torch.nan)


def truth(name, piece, shape, dtype):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    data = torch.randn(prod(shape), generator=generator).view(shape).to(dtype)
    for dim, (offset, length) in enumerate(zip(piece.offsets, piece.lengths, strict=True)):
        data = data.narrow(dim, offset, length)
    return data


def save_under(case, tied, folder):
    ctx, shards, optimizer = build(case, tied)
    poison(optimizer)
    for name, shard in shards.items():
        for piece in shard.pieces:
            piece.data.copy_(truth(name, piece, shard.shape, shard.dtype))
    save(folder, 1, shards, world=ctx.world)
    ctx.destroy()
    return sorted(shards)


def load_under(case, tied, folder):
    ctx, shards, optimizer = build(case, tied)
    poison(optimizer)
    load(folder, shards, world=ctx.world)
    for name, shard in shards.items():
        for piece in shard.pieces:
            wanted = truth(name, piece, shard.shape, shard.dtype)
            assert torch.equal(piece.data, wanted), name
    ctx.destroy()
    return sorted(shards)


@pytest.mark.parametrize(
    ("source", "target", "tied"),
    [
        ("single", "pp2", True),
        pytest.param("pp2", "tp2 dp2", False, marks=LONG),
        pytest.param("tp2 dp2", "pp2 dp2 with two chunks a rank", True, marks=LONG),
        pytest.param("pp2 dp2 with two chunks a rank", "dp4 ep2", True, marks=LONG),
        ("dp4 ep2", "dp2 whole", False),
        pytest.param("dp2 whole", "single", False, marks=LONG),
    ],
)
def test_weights_and_optimizer_of_a_gpt_go_from_layout_to_layout(
    tmp_path, source, target, tied
):
    saved = run_ranks(save_under, CASES[source].world, CASES[source], tied, str(tmp_path))
    loaded = run_ranks(load_under, CASES[target].world, CASES[target], tied, str(tmp_path))
    names = set().union(*map(set, saved))
    assert names == set().union(*map(set, loaded))
    assert "optimizer.main.blocks.3.mlp_norm.weight" in names
    assert ("model.head.weight" in names) != tied
