"""The feed-forward layer against its formula."""

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from mcore_models.layers.fp8_gated_mlp import Fp8GatedMLP, GatedCast
from mcore_models.layers.mlp import MLP
from mcore_models.layers.sparse_mlp import SparseMLP, cut_gates, normal_quantile
from mcore_moe import ExpertNetwork
from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.weight_queue import WeightQueue
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.precision.fp8 import (
    PLAIN_GEMMS,
    WeightCasts,
    delayed_scales,
    fp8_gemms,
    layer_gemms,
)
from mcore_parallel.precision.fp8_recipes import Delayed

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_is_two_products_with_an_activation_between(is_gated, bias):
    network = ExpertNetwork(gated=is_gated, activation="silu", bias=bias)
    layer = MLP(4, 6, network, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    hidden = F.linear(x, layer.fc1.weight, layer.fc1.bias)
    hidden = F.silu(hidden[..., :6]) * hidden[..., 6:] if is_gated else F.silu(hidden)
    torch.testing.assert_close(layer(x), F.linear(hidden, layer.fc2.weight, layer.fc2.bias))


@pytest.mark.parametrize("sparsity", [0.3, 0.95])
def test_the_wanted_share_of_normal_gates_is_cut_and_the_others_shift(sparsity):
    gate = 3 + 2 * torch.randn(4, 20_000, dtype=torch.float64)
    cut = cut_gates(gate, normal_quantile(sparsity))
    assert (cut == 0).double().mean().item() == pytest.approx(sparsity, abs=0.01)
    shift = (gate - cut)[cut > 0].view(-1)
    wanted = 3 + 2 * torch.special.ndtri(torch.tensor(sparsity)).item()
    assert shift.mean().item() == pytest.approx(wanted, abs=0.05)
    layer = SparseMLP(4, 6, ExpertNetwork(activation="gelu_tanh"), sparsity=sparsity)
    x = torch.randn(3, 2, 4)
    gates, up = layer.fc1(x).chunk(2, -1)
    hidden = F.gelu(cut_gates(gates, layer.quantile), approximate="tanh") * up
    torch.testing.assert_close(layer(x), layer.fc2(hidden))


def test_a_linear_that_was_replaced_is_called():
    layer = MLP(8, 16)
    x = torch.randn(3, 2, 8)
    want = layer(x)
    layer.fc1, layer.fc2 = (torch.nn.Sequential(linear) for linear in (layer.fc1, layer.fc2))
    assert torch.equal(layer(x), want)


def narrow_mlp(recipe, kind=Fp8GatedMLP, **network):
    """A feed-forward layer in fp8, and its delayed scales."""
    config, ctx = (
        Fp8Config(fp8_format="hybrid", fp8_recipe=recipe),
        ParallelContext.single("cpu"),
    )
    scales = delayed_scales(config, ctx)
    own = None if scales is None else Delayed(scales, "layer")
    gemms = fp8_gemms(config, ctx, WeightCasts(), own)
    layer = kind(32, 48, ExpertNetwork(**network), gemms=gemms)
    for seed, linear in enumerate((layer.fc1, layer.fc2)):
        linear.reset_parameters(seed)
    return layer, scales


def two_steps(layer, scales):
    """Outputs and gradients of two steps, the second on larger numbers."""
    found = []
    for step in range(2):
        x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(step)) * (1 + step)
        with nullcontext() if scales is None else scales.noting():
            y = layer(x.requires_grad_())
            y.backward(torch.cos(y.detach()))
        if scales is not None:
            scales.move_on()
        found += [y.detach(), x.grad]
    return [*found, layer.fc1.weight.grad, layer.fc2.weight.grad]


def keeping(found):
    return lambda tensor: found.append(tensor) or tensor


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_an_activation_cast_as_it_is_computed_changes_no_bit(recipe):
    want = two_steps(*narrow_mlp(recipe, MLP))
    for forgets in (False, True):
        layer, scales = narrow_mlp(recipe, recompute_activation=forgets)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(keeping(kept), lambda t: t):
            got = two_steps(layer, scales)
        assert all(map(torch.equal, got, want))
        # The activation is kept as one byte an element, or not at all.
        of_activation = [t for t in kept if t.shape == (48, 32) and t.dtype == E4M3]
        assert len(of_activation) == (0 if forgets else 2)
    queue = WeightQueue()
    layer, scales = narrow_mlp(recipe)
    for weight in (layer.fc1.weight, layer.fc2.weight):
        slot = grad_slot(weight)
        slot.main, slot.queue = torch.zeros_like(weight), queue
    assert all(map(torch.equal, two_steps(layer, scales)[:4], want))
    for work, _ in queue.take():
        work()
    for weight, total in zip((layer.fc1.weight, layer.fc2.weight), want[4:], strict=True):
        torch.testing.assert_close(grad_slot(weight).main, total)


def test_what_lies_between_is_freed_without_the_collector():
    layer, scales = narrow_mlp("tensorwise")
    gc.collect()
    gc.disable()  # which would free cycles some day, and hold a layer's gradients until then
    try:
        two_steps(layer, scales)
        assert not [x for x in gc.get_objects() if type(x) is GatedCast]
    finally:
        gc.enable()


def test_layers_that_the_fused_function_cannot_take_run_module_by_module():
    layer, _ = narrow_mlp("tensorwise")
    x = torch.randn(16, 2, 32)
    assert layer._fused_gemms(x) is not None
    assert layer._fused_gemms(x[:3]) is None  # rows that tensor cores do not take
    with torch.autocast("cpu", torch.bfloat16):
        assert layer._fused_gemms(x) is None
    hook = layer.fc2.register_forward_pre_hook(lambda *_: None)
    assert layer._fused_gemms(x) is None
    hook.remove()
    assert layer._fused_gemms(x) is not None
    seen = []
    layer.fc1.register_forward_hook(lambda _, inputs, output: seen.append(output))
    want = narrow_mlp("tensorwise")[0](x)
    assert torch.equal(layer(x), want)
    assert seen[0].isfinite().all()
    gemms = layer_gemms(
        Fp8Config(fp8_format="hybrid"), ParallelContext.single("cpu"), 1, WeightCasts()
    )
    assert Fp8GatedMLP.supports(ExpertNetwork(), gemms[0])
    assert not Fp8GatedMLP.supports(ExpertNetwork(), PLAIN_GEMMS)
    for change in ({"bias": True}, {"clamp": 7.0}, {"gated": False}, {"activation": "relu"}):
        assert not Fp8GatedMLP.supports(ExpertNetwork(**change), gemms[0])
