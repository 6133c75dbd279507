"""The feed-forward layer against its formula."""

import pytest
import torch
import torch.nn.functional as F

from mcore_models.layers.mlp import MLP


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
