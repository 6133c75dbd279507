from math import log

import pytest
import torch
from warm_ranks import run_ranks

from mcore_moe import SUMMARY_COLUMNS, MoEConfig, MoELayer, RouterStats, finish_step, summarize
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext

CONFIG = MoEConfig(
    num_experts=4,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.25,
)


def model():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"a": MoELayer(8, 16, CONFIG), "b": MoELayer(8, 16, CONFIG)})


def inputs():
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(1))


def step(layers, x, axis):
    for layer in layers.values():
        layer(x)
    stats = finish_step(layers, axis)
    return stats, [layer.router.expert_bias.clone() for layer in layers.values()]


def check_many_ranks():
    ctx = ParallelContext.build(ParallelConfig())
    mine = inputs().split([7, 0, 5])[ctx.global_rank]
    stats, biases = step(model(), mine, ctx.world)
    ctx.destroy()
    return {name: s.counts for name, s in stats.items()}, biases


def test_every_rank_moves_its_biases_by_the_counts_of_all():
    layers = model()
    stats, biases = step(layers, inputs(), ParallelContext.single().world)
    assert set(stats) == {"a.router", "b.router"}
    assert all(s.counts.sum() == 24 for s in stats.values())
    assert all(bias.abs().max() == 0.25 for bias in biases)
    for counts, ranks_biases in run_ranks(check_many_ranks, 3):
        assert all(torch.equal(counts[name], stats[name].counts) for name in stats)
        assert all(torch.equal(a, b) for a, b in zip(ranks_biases, biases, strict=True))


def test_counts_begin_anew_after_a_step():
    layers = model()
    step(layers, inputs(), ParallelContext.single().world)
    assert layers["a"].router.step_counts.sum() == 0
    stats, _ = step(layers, inputs(), ParallelContext.single().world)
    assert stats["a.router"].counts.sum() == 24


def test_a_model_without_routers_has_no_stats():
    assert finish_step(torch.nn.Linear(2, 2)) == {}


def test_stats_name_the_busiest_the_idle_and_the_rest():
    bias = torch.tensor([0.5, 0.0, -0.25, 0.0])
    losses = torch.tensor([1.5, 7.0], dtype=torch.float64)
    uneven = RouterStats(torch.tensor([6, 2, 0, 0]), torch.tensor(2), bias, losses)
    even = RouterStats(torch.tensor([2, 2, 2, 2]), torch.tensor(0))
    assert (uneven.imbalance, uneven.num_idle) == (3.0, 2)
    summary = summarize([uneven, even])
    rows = [dict(zip(SUMMARY_COLUMNS, row, strict=True)) for row in summary.tolist()]
    entropy = -(0.75 * log(0.75) + 0.25 * log(0.25)) / log(4)
    assert rows[0] == pytest.approx(
        {
            "imbalance": 3.0,
            "idle_experts": 2.0,
            "load_p10": 0.0,
            "load_p50": 0.5,
            "load_p90": 2.4,
            "load_entropy": entropy,
            "dropped_share": 0.25,
            "expert_bias_range": 0.75,
            "load_balancing_loss": 1.5,
            "z_loss": 7.0,
        }
    )
    assert rows[1] == pytest.approx(
        dict.fromkeys(SUMMARY_COLUMNS, 0.0)
        | {f"load_p{n}": 1.0 for n in (10, 50, 90)}
        | {"imbalance": 1.0, "load_entropy": 1.0}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_means_over_passes_without_coefficients_and_never_rounded(dtype):
    config = MoEConfig(num_experts=4, moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.25)
    torch.manual_seed(0)
    layer = MoELayer(8, 16, config).to(dtype)
    added = [layer(inputs().to(dtype) * scale)[1].item() for scale in (1, 2, 3)]
    balance, z = finish_step(layer)["router"].losses.tolist()
    assert 0.5 * balance + 0.25 * z == pytest.approx(sum(added) / 3, rel=1e-6)
    assert balance >= 1.0
    layer.eval()(inputs().to(dtype))  # no pass of training
    assert finish_step(layer)["router"].losses.tolist() == [0.0, 0.0]


def test_choices_without_room_are_counted_and_padding_is_neither_chosen_nor_dropped():
    config = MoEConfig(num_experts=4, moe_expert_capacity_factor=0.5)
    torch.manual_seed(0)
    layer = MoELayer(8, 16, config)
    x = torch.ones(8, 8)  # all tokens choose the same two experts
    mask = torch.arange(8) < 6
    layer(x, mask=mask)
    stats = finish_step(layer)["router"]
    assert (stats.counts.sum(), stats.num_dropped) == (12, 8)  # room for two tokens an expert
    assert layer.router.step_dropped == 0
