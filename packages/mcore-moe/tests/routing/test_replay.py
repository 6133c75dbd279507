"""Choices that do not follow from the scores: recorded, balanced, and those of padding."""

from math import gcd

import pytest
import torch

from mcore_moe import (
    ExpertNetwork,
    MoEConfig,
    MoELayer,
    finish_step,
    record_routing,
    replay_routing,
)
from mcore_moe.routing.topk import balanced_ids, balanced_stride
from mcore_parallel.autograd.recomputing import recompute


def build(seed=0, **fields):
    torch.manual_seed(seed)
    config = MoEConfig(num_experts=6, **{"moe_router_topk": 2, **fields})
    layers = [
        MoELayer(8, 16, config, ExpertNetwork(init_std=0.5), dtype=torch.float64)
        for _ in range(2)
    ]
    return torch.nn.ModuleList(layers)


def forward(model, x, recomputes=False):
    for layer in model:
        y, _ = recompute(layer, x) if recomputes else layer(x)
        x = x + y
    return x


@pytest.mark.parametrize("recomputes", [False, True])
def test_replayed_tokens_go_where_they_went_and_the_router_learns(recomputes):
    batches = torch.randn(3, 5, 8, dtype=torch.float64)
    engine = build(1)
    with record_routing(engine) as recorded, torch.no_grad():
        for x in batches:
            forward(engine, x)
    assert [len(ids) for ids in recorded.values()] == [3, 3]
    model = build(2)
    with replay_routing(model, recorded):
        for x in batches[:2]:
            forward(model, x, recomputes).square().sum().backward()
        for layer, (path, ids) in zip(model, recorded.items(), strict=True):
            assert path in ("0.router", "1.router")
            expected = torch.cat(ids[:2]).flatten().bincount(minlength=6)
            assert torch.equal(layer.router.step_counts, expected)
            assert layer.router.weight.grad.abs().sum() > 0
    assert all(layer.router.tape is None for layer in model)
    # Recomputed or not, the gradients are those of the recorded choices.
    plain = build(2)
    with replay_routing(plain, recorded):
        for x in batches[:2]:
            forward(plain, x).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_a_recording_that_does_not_fit_is_refused():
    model, x = build(), torch.randn(4, 8, dtype=torch.float64)
    with record_routing(model) as recorded:
        forward(model, x)
    other_size = pytest.raises(ValueError, match=r"has 4 tokens .* but this pass has 3")
    with replay_routing(model, recorded), other_size:
        forward(model, x[:3])
    with replay_routing(model, recorded):
        forward(model, x)
        with pytest.raises(ValueError, match="ends after 1 forward passes"):
            forward(model, x)
    more = build(moe_router_topk=3)
    with replay_routing(more, recorded), pytest.raises(ValueError, match="with 2 experts each"):
        forward(more, x)
    for expert, complaint in ((99, "expert 99"), (-1, "expert -1"), (3, "an expert twice")):
        named = {path: [torch.full_like(ids[0], expert)] for path, ids in recorded.items()}
        with (
            pytest.raises(ValueError, match=f"has {complaint}"),
            replay_routing(model, named),
        ):
            pass
    bytes_of_them = {path: [one.byte() for one in ids] for path, ids in recorded.items()}
    with replay_routing(model, bytes_of_them):
        forward(model, x)
    other_routers = pytest.raises(ValueError, match=r"differ in these routers: 1\.router")
    with other_routers, replay_routing(model[:1], recorded):
        pass


@pytest.mark.parametrize("kind", ["aux_loss", "sinkhorn"])
def test_forced_balance_gives_every_expert_as_many_tokens(kind):
    model = build(moe_router_force_load_balancing=True, moe_router_load_balancing_type=kind)
    layer = model[0]
    y, _ = layer(torch.ones(9, 8, dtype=torch.float64))
    y.square().sum().backward()
    assert finish_step(layer)["router"].counts.tolist() == [3] * 6
    assert layer.router.weight.grad.abs().sum() > 0
    # On four ranks no token's two experts, of eight, are neighbours.
    ids = balanced_ids(16, MoEConfig(num_experts=8), torch.device("cpu"))
    assert (ids[:, 0] // 2 != ids[:, 1] // 2).all()
    for num_experts in (1, 2, 3, 4, 6):  # only neighbours' strides reach all of these
        assert balanced_stride(num_experts) == max(1, num_experts - 1)
    for num_experts in (5, 7, 8, 9, 10, 12, 60, 256):
        stride = balanced_stride(num_experts)
        assert gcd(stride, num_experts) == 1
        assert 1 < stride < num_experts - 1


def test_padding_gets_no_expert_and_takes_no_room():
    for fields in (
        {},
        {"moe_expert_capacity_factor": 1.0},
        {"moe_router_load_balancing_type": "sinkhorn"},  # padding claims no share of an expert
    ):
        layer = build(**fields)[0]
        x = torch.randn(12, 8, dtype=torch.float64, requires_grad=True)
        mask = torch.arange(12) >= 6  # padding comes first, and would take the room
        y, _ = layer(x, mask=mask)
        y.sum().backward()
        assert not y[~mask].any()
        assert not x.grad[~mask].any()
        has_room = "moe_expert_capacity_factor" in fields
        alone = build(moe_expert_capacity_factor=2.0)[0] if has_room else layer
        torch.testing.assert_close(y[mask], alone(x[mask])[0])  # half as many tokens
