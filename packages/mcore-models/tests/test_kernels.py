"""Triton kernels against plain float64 torch, forward and gradients, on a GPU."""

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


def error(got, want):
    return ((got.double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [7, 1024, 2500])
def test_gated_units_equal_plain_torch(dtype, activation, width):
    from mcore_models.kernels import fused_gated

    torch.manual_seed(0)
    x = torch.randn(9, 2, 2 * width, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(9, 2, width, device="cuda", dtype=dtype)
    wide = x.detach().double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    want = act * up
    want.backward(dy.double())
    got = fused_gated(x, activation)
    got.backward(dy)
    assert error(got, want.detach()) < TOLERANCE[dtype]
    assert error(x.grad, wide.grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "g", "size"), [(4, 2, 64), (3, 1, 80), (32, 8, 128)])
def test_rotary_split_equals_plain_torch(dtype, n, g, size):
    from mcore_models.kernels import fused_rotary_split

    torch.manual_seed(0)
    seq, batch = 5, 2
    qkv = torch.randn(seq, batch, (n + 2 * g) * size, device="cuda", dtype=dtype)
    angle = torch.randn(seq, size // 2, device="cuda")
    grads = [torch.randn(seq, batch, h, size, device="cuda", dtype=dtype) for h in (n, g, g)]

    def plain(packed):
        q, k, v = packed.view(seq, batch, n + 2 * g, size).split([n, g, g], 2)
        c, s = (f(angle.double())[:, None, None] for f in (torch.cos, torch.sin))

        def turn(t):
            a, b = t.chunk(2, -1)
            return torch.cat([a * c - b * s, b * c + a * s], -1)

        return turn(q), turn(k), v

    wide = qkv.double().requires_grad_()
    want = plain(wide)
    torch.autograd.backward(want, [t.double() for t in grads])
    x = qkv.clone().requires_grad_()
    got = fused_rotary_split(x, angle.cos(), angle.sin(), n, g)
    torch.autograd.backward(got, grads)
    for a, b in zip(got, want, strict=True):
        assert error(a, b.detach()) < TOLERANCE[dtype]
    assert error(x.grad, wide.grad) < TOLERANCE[dtype]
