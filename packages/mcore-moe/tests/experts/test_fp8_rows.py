"""Rows in fp8 against what they were cast from: within four percent, by the norm."""

import pytest
import torch

from mcore_moe import MoEConfig, Routing, build_dispatcher, sequential_linear
from mcore_moe.experts.fp8_rows import fp8_linear, packed, unpacked
from mcore_moe.kernels.fp8_rows import cast_rows
from mcore_moe.kernels.rows import expert_offsets
from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.mesh import SINGLE
from mcore_parallel.precision.fp8 import WeightCasts

BOUND = (
    0.04  # e4m3 has three bits behind the point: 1/16 at worst, a GEMM of normal factors .037
)


def error(got, want):
    return float(((got.double() - want).norm() / want.norm()).detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gemm_of_rows_in_fp8_is_near_the_exact_one(dtype):
    torch.manual_seed(0)
    offsets = expert_offsets(torch.tensor([9, 0, 24]))
    x = torch.randn(40, 32).to(dtype).requires_grad_()  # seven rows of no expert
    x.data[5] *= 1000  # has a scale of its own
    weight = torch.randn(3, 48, 32).to(dtype).requires_grad_()
    grad = torch.randn(40, 48).to(dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = sequential_linear(*wide, offsets)
    wanted = torch.autograd.grad(want, wide, grad.double())
    casts = WeightCasts()
    y = fp8_linear(x, weight, offsets, casts=casts)
    assert y.dtype == dtype
    got = torch.autograd.grad(y, (x, weight), grad)
    assert error(y[:5], want[:5]) < BOUND
    assert error(y[6:33], want[6:33]) < BOUND
    assert error(got[0][:33], wanted[0][:33]) < BOUND
    rounding = {torch.float64: 1e-14, torch.bfloat16: 4e-3}[dtype]
    assert error(got[1], wanted[1]) < rounding
    slot = grad_slot(weight)
    slot.main = torch.ones_like(weight, dtype=torch.float64)
    with casts.keeping():
        for _ in range(2):
            assert torch.equal(fp8_linear(x, weight, offsets, casts=casts), y)
        y = fp8_linear(x, weight, offsets, casts=casts)
        _, none = torch.autograd.grad(y, (x, weight), grad, allow_unused=True)
    assert none is None
    assert error(slot.main - 1, wanted[1]) < rounding


def test_rows_travel_with_their_scales_and_what_is_not_finite_stays_so():
    x = torch.randn(6, 8, dtype=torch.bfloat16)
    x[1], x[2, 3], x[4] = 0.0, float("inf"), x[0] * 2**20
    y = unpacked(packed(x), x.dtype)
    assert y.dtype == x.dtype
    assert packed(x).shape == (6, 8 + 4)
    assert torch.equal(y[1], x[1])
    assert y[2].isnan().all()
    torch.testing.assert_close(y[4], y[0] * 2**20)
    config = MoEConfig(num_experts=2, moe_dispatch_dtype="fp8")
    routing = Routing(torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1))
    sent = build_dispatcher(config, SINGLE, SINGLE).dispatch(x, routing)
    torch.testing.assert_close(sent.x, y, rtol=0, atol=0, equal_nan=True)
    finite = torch.tensor([0, 1, 3, 4, 5])
    tops = x[finite].abs().amax(1, keepdim=True)
    assert ((y - x)[finite].abs() <= tops / 16).all()
    assert torch.equal(
        cast_rows(x.double()[finite]).numbers.float(), cast_rows(x[finite]).numbers.float()
    )
