import pytest
import torch
import torch.nn.functional as F

from mcore_moe import (
    ExpertNetwork,
    Experts,
    MoEAxes,
    MoEConfig,
    MoELayer,
    Routing,
    plan_rows,
)
from mcore_moe.dispatch.permutation import plan_slice
from mcore_moe.experts import weight_gradient
from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_shards

TWO, THREE = MoEConfig(num_experts=2), MoEConfig(num_experts=3)


def plain_sum(layer, x, routing, activation, gated):
    """Every expert on every token, weighed: what the layer must compute, written out."""
    y = torch.zeros_like(x)
    experts = layer.experts
    for e in range(experts.num_experts):
        hidden = x @ experts.fc1_weight[e].T + experts.fc1_bias[e]
        if gated:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = activation(gate) * up
        else:
            hidden = activation(hidden)
        out = hidden @ experts.fc2_weight[e].T + experts.fc2_bias[e]
        weight = (routing.probs * (routing.ids == e)).sum(1, keepdim=True)
        y = y + weight * out
    return y


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("name", "activation"),
    [("silu", F.silu), ("gelu", F.gelu), ("squared_relu", lambda x: F.relu(x) ** 2)],
)
def test_layer_equals_the_dense_sum_over_experts_biases_weighed_too(name, activation, gated):
    config = MoEConfig(num_experts=4, moe_router_topk=2)
    torch.manual_seed(0)
    layer = MoELayer(
        8,
        16,
        config,
        ExpertNetwork(bias=True, activation=name, gated=gated),
        dtype=torch.float64,
    )
    for bias in (layer.experts.fc1_bias, layer.experts.fc2_bias):
        torch.nn.init.normal_(bias)
    x = torch.randn(6, 8, dtype=torch.float64)
    routing: Routing = layer.router(x)[0]
    expected = plain_sum(layer, x, routing, activation, gated)
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-10, atol=1e-12)


def test_weights_on_inputs_are_those_of_the_choice_and_learn():
    config = MoEConfig(num_experts=4, moe_router_topk=2, moe_apply_probs_on_input=True)
    torch.manual_seed(0)
    layer = MoELayer(8, 16, config, ExpertNetwork(init_std=0.5), dtype=torch.float64)
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    routing: Routing = layer.router(x)[0]
    expected = torch.zeros_like(x)
    for e, (fc1, fc2) in enumerate(
        zip(layer.experts.fc1_weight, layer.experts.fc2_weight, strict=True)
    ):
        weight = (routing.probs * (routing.ids == e)).sum(1, keepdim=True)
        gate, up = (x * weight @ fc1.T).chunk(2, -1)
        expected = expected + F.silu(gate) * up @ fc2.T
    wanted = torch.autograd.grad(expected.square().sum(), (x, *layer.parameters()))
    y = layer(x)[0]
    found = torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))
    for got, want in zip((y, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_latent_experts_compute_between_two_projections():
    config = MoEConfig(num_experts=4, moe_router_topk=2, moe_latent_size=4)
    torch.manual_seed(0)
    layer = MoELayer(8, 16, config, ExpertNetwork(bias=True), dtype=torch.float64)
    assert layer.experts.fc1_weight.shape == (4, 32, 4)
    x = torch.randn(6, 8, dtype=torch.float64)
    routing: Routing = layer.router(x)[0]
    down, up = layer.latent_down.weight, layer.latent_up.weight
    expected = plain_sum(layer, x @ down.T, routing, F.silu, True) @ up.T
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-10, atol=1e-12)


class BreaksRest:
    """What a kernel may leave in rows of no expert."""

    def add_fc1(self, hidden, rows, offsets):
        inside = torch.arange(len(rows))[:, None] < offsets[-1]
        return hidden.where(inside, float("nan"))

    def add_fc2(self, y, active, offsets):
        return self.add_fc1(y, active, offsets)


def test_rows_of_no_expert_leave_every_gradient_alone():
    torch.manual_seed(0)
    experts = Experts(8, 16, THREE, ExpertNetwork(bias=True), dtype=torch.float64)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]])
    plan = plan_rows(ids, 3, torch.tensor([[1, 1], [0, 1], [1, 0], [0, 0]]) == 1)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    wanted = [x, probs, *experts.parameters()]
    expected = torch.autograd.grad(experts(x, probs, plan).square().sum(), wanted)
    experts.adapter = BreaksRest()
    wide = plan_slice(plan, 0, 8)
    assert len(plan.choices) == 4
    assert len(wide.choices) == 8
    y = experts(x, probs, wide)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), wanted), expected)


def test_an_expert_without_rows_gets_zero_and_not_missing_gradients():
    experts = Experts(8, 16, THREE)
    ids = torch.tensor([0, 0, 2, 2, 2])[:, None]
    experts(torch.randn(5, 8), torch.ones(5, 1), plan_rows(ids, 3)).sum().backward()
    assert experts.fc1_weight.grad[1].abs().sum() == 0
    assert experts.fc1_weight.grad[2].abs().sum() > 0


def test_each_expert_is_a_logical_tensor():
    shards = named_shards(torch.nn.ModuleDict({"experts": Experts(8, 16, TWO)}))
    assert {name: shard.shape for name, shard in shards.items()} == {
        "experts.0.fc1.gate.weight": (16, 8),
        "experts.0.fc1.up.weight": (16, 8),
        "experts.0.fc2.weight": (8, 16),
        "experts.1.fc1.gate.weight": (16, 8),
        "experts.1.fc1.up.weight": (16, 8),
        "experts.1.fc2.weight": (8, 16),
    }
    plain = named_shards(Experts(8, 16, TWO, ExpertNetwork(gated=False, bias=True)))
    assert plain["1.fc1.weight"].shape == (16, 8)
    assert plain["1.fc2.bias"].shape == (8,)


def test_same_seed_gives_same_experts_and_a_seed_less_one_draws():
    torch.manual_seed(3)
    first, second = Experts(8, 16, TWO), Experts(8, 16, TWO)
    assert not torch.equal(first.fc1_weight, second.fc1_weight)
    first.reset_parameters(seed=5)
    second.reset_parameters(seed=5)
    assert torch.equal(first.fc1_weight, second.fc1_weight)
    assert torch.equal(first.fc2_weight, second.fc2_weight)
    assert first.fc1_weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_init_std_zero_leaves_zeros_and_draws_nothing():
    before = torch.random.get_rng_state()
    layer = MoELayer(8, 16, MoEConfig(num_experts=4), ExpertNetwork(bias=True, init_std=0.0))
    assert all(p.abs().sum() == 0 for p in layer.parameters())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_impossible_experts_are_refused():
    from mcore_parallel.mesh import Axis

    four = Axis("ep", 4, 0, None, (0, 1, 2, 3))
    with pytest.raises(ValueError, match="--num-experts 6 cannot be split over"):
        Experts(8, 16, MoEConfig(num_experts=6), axes=MoEAxes(ep=four))
    with pytest.raises(ValueError, match="--moe-ffn-hidden-size 18 cannot be split over"):
        Experts(8, 18, MoEConfig(num_experts=4), axes=MoEAxes(expert_tp=four))
    with pytest.raises(ValueError, match="unknown activation 'tanh': use one of"):
        ExpertNetwork(activation="tanh")
    with pytest.raises(ValueError, match="--num-experts 0"):
        MoELayer(8, 16, MoEConfig())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_batches", [1, 4, 5])
def test_weight_gradients_of_micro_batches_together_are_their_sums(
    monkeypatch, dtype, num_batches
):
    sizes = []
    add = weight_gradient.add_weight_gradients

    def noted(main, parts, *, overwrite=False):
        sizes.append(len(parts))
        add(main, parts, overwrite=overwrite)

    monkeypatch.setattr(weight_gradient, "add_weight_gradients", noted)
    found = []
    for together in (1, 2):
        config = MoEConfig(num_experts=4, moe_wgrad_micro_batches=together)
        torch.manual_seed(0)
        layer = MoELayer(8, 16, config, ExpertNetwork(init_std=0.5), dtype=dtype)
        options = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=1)
        data_parallel = DataParallel([layer], ParallelContext.single(), options)
        weights = layer.experts.fc1_weight, layer.experts.fc2_weight
        for _ in range(2):  # of a second step, into gradients that are stale
            data_parallel.zero_grad()
            sizes.clear()
            with data_parallel.no_sync():
                for batch in range(num_batches):
                    if batch == num_batches - 1:
                        data_parallel.start_sync(0)
                    x = torch.randn(6, 8, dtype=dtype)
                    layer(x)[0].square().sum().backward()
                    with torch.no_grad():
                        layer(x)
            # What the sums over data have begun with, before anything else is added.
            assert all(bucket.is_reducing for bucket in data_parallel.buckets)
            begun = [grad_slot(weight).main.clone() for weight in weights]
            data_parallel.finish()
        found.append(begun)
    whole, rest = divmod(num_batches, 2)
    assert sizes == [2] * (2 * whole) + [1] * (2 * rest)
    for got, want in zip(found[1], found[0], strict=True):
        assert torch.equal(got, want)


def test_weight_gradients_that_wait_reach_a_step_whose_last_micro_batch_has_none():
    config = MoEConfig(num_experts=4, moe_wgrad_micro_batches=3)
    torch.manual_seed(0)
    layer = MoELayer(8, 16, config, ExpertNetwork(init_std=0.5), dtype=torch.float64)
    weight, x = layer.experts.fc1_weight, torch.randn(6, 8, dtype=torch.float64)
    want = torch.autograd.grad(layer(x)[0].sum(), weight)[0]
    data_parallel = DataParallel([layer], ParallelContext.single(), DataParallelConfig())
    for is_finished in (False, True):  # what an unfinished step kept is dropped
        data_parallel.zero_grad()
        with data_parallel.no_sync():
            layer(x)[0].sum().backward()
        assert grad_slot(weight).is_keeping
        if is_finished:
            data_parallel.finish()
    torch.testing.assert_close(grad_slot(weight).main, want)
