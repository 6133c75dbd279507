"""The feed-forward layer against its formula."""

import pytest
import torch
import torch.nn.functional as F

from mcore_models.layers.mlp import ACTIVATIONS, MLP, gated

FORMULAS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: (
        x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_follow_their_formula(name):
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[name](x), FORMULAS[name](x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["silu", "quick_gelu"])
def test_the_first_half_gates_the_second(name):
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    want = FORMULAS[name](x[..., :4]) * x[..., 4:]
    torch.testing.assert_close(gated(x, name), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_is_two_products_with_an_activation_between(is_gated, bias):
    layer = MLP(4, 6, gated=is_gated, activation="silu", bias=bias, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    hidden = F.linear(x, layer.fc1.weight, layer.fc1.bias)
    hidden = F.silu(hidden[..., :6]) * hidden[..., 6:] if is_gated else F.silu(hidden)
    torch.testing.assert_close(layer(x), F.linear(hidden, layer.fc2.weight, layer.fc2.bias))


def test_a_linear_that_was_replaced_is_called():
    layer = MLP(8, 16)
    x = torch.randn(3, 2, 8)
    want = layer(x)
    layer.fc1, layer.fc2 = (torch.nn.Sequential(linear) for linear in (layer.fc1, layer.fc2))
    assert torch.equal(layer(x), want)
