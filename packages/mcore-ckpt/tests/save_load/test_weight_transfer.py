"""Weights handed from one layout to another on the same ranks.

Initialisation draws the same logical tensors under every layout, so a model built under the
target's must be bit for bit what one filled from the source's is.
"""

import pytest
import torch
from warm_ranks import run_ranks

from mcore_ckpt.save_load.weight_transfer import plan_transfer, transfer_weights
from mcore_ckpt.storage.shard_plans import Claim
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_shards

pytest.importorskip("mcore_models")

LAYOUTS = {
    "tp2 pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "ep4": {"expert_model_parallel_size": 4},
    "tp4": {"tensor_model_parallel_size": 4},
    "whole": {},
}


def build(layout, seed, dtype):
    from mcore_models.config import TransformerConfig
    from mcore_models.gpt import GPT
    from mcore_moe.config import MoEConfig
    from mcore_parallel.pipeline_parallel.stages import split_layers

    ctx = ParallelContext.build(ParallelConfig(**LAYOUTS[layout]))
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2
    )
    stage = split_layers(config.num_layers, ctx.pp.size)[ctx.pp.rank]
    moe = MoEConfig(num_experts=4, moe_layer_freq="[0,1]")
    model = GPT(config, ctx, vocab_size=37, moe=moe, stage=stage, seed=seed, dtype=dtype)
    return ctx, model, named_shards(model, ctx.data_axes())


def transferred(pairs):
    for source, target in pairs:
        ctx, _, held = build(source, 5, torch.float64)
        other, model, wanted = build(target, 6, torch.float32)
        transfer_weights(held, wanted, world=ctx.world, round_bytes=2000)
        again, twin, _ = build(target, 5, torch.float64)
        for (name, mine), theirs in zip(
            model.named_parameters(), twin.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs.float()), f"{source} to {target}: {name}"
        for one in (ctx, other, again):
            one.destroy()


NAMES = list(LAYOUTS)


@pytest.mark.parametrize(
    "steps",
    [(1,), pytest.param(range(1, len(NAMES)), marks=pytest.mark.parity_long)],
    ids=["each fills one", "each fills all"],
)
def test_any_layout_fills_any_other(steps):
    pairs = [(a, NAMES[(i + n) % len(NAMES)]) for n in steps for i, a in enumerate(NAMES)]
    run_ranks(transferred, 4, pairs)


def claim(boxes, shape=(4, 2), owner=True):
    return Claim(shape, "F32", owner, tuple(boxes))


UPPER, LOWER = ((0, 0), (2, 2)), ((2, 0), (2, 2))


def test_a_box_comes_from_its_own_rank_else_from_who_sends_least():
    copies = [{"w": claim([UPPER])}, {"w": claim([UPPER], owner=False)}, {"w": claim([LOWER])}]
    whole = {"w": claim([((0, 0), (4, 2))])}
    moves = plan_transfer(copies, [whole, {}, whole])
    ways = [(move.source, move.target, move.num_bytes) for move in moves]
    assert ways == [(0, 0, 16), (2, 0, 16), (0, 2, 16), (2, 2, 16)]
    moves = plan_transfer(copies, [{}, whole, whole])
    assert [(move.source, move.target) for move in moves] == [(1, 1), (2, 1), (0, 2), (2, 2)]


@pytest.mark.parametrize(
    ("held", "wanted", "message"),
    [
        ({"w": claim([UPPER])}, {"w": claim([UPPER])}, "elements are in no box"),
        ({"w": claim([UPPER, LOWER])}, {"v": claim([UPPER])}, "not held by any rank: v"),
        ({"w": claim([UPPER, LOWER])}, {}, "needed by no rank: w"),
        (
            {"w": claim([UPPER, LOWER])},
            {"w": claim([((0, 0), (5, 2))], (5, 2))},
            r"held as \[4, 2\], needed as \[5, 2\]",
        ),
    ],
)
def test_what_cannot_be_filled_is_refused_before_anything_travels(held, wanted, message):
    with pytest.raises(ValueError, match=message):
        plan_transfer([held], [wanted])
