"""Activations and gated activations against their formulas."""

import pytest
import torch

from mcore_moe.activations import ACTIVATIONS
from mcore_moe.kernels.gate import gated, weighted_gated

FORMULAS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: (
        x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": lambda x: x.clamp(min=0),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_follow_their_formula(name):
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[name](x), FORMULAS[name](x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["silu", "quick_gelu"])
@pytest.mark.parametrize(("clamp", "offset"), [(0.0, 0.0), (0.5, 1.0), (0.0, 1.0)])
def test_the_first_half_gates_the_second(name, clamp, offset):
    x = torch.randn(6, 8, dtype=torch.float64)
    gate, up = x.chunk(2, -1)
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    want = FORMULAS[name](gate) * (up + offset)
    exact = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(gated(x, name, clamp, offset), want, **exact)
    probs = torch.rand(6, dtype=torch.float64)
    got = weighted_gated(x, probs, torch.tensor(6), name, clamp, offset)
    torch.testing.assert_close(got, want * probs[:, None], **exact)
