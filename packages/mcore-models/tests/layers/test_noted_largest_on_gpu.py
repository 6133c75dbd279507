"""Largest magnitudes that kernels leave with tensors reach the linears, and change no bit."""

import pytest
import torch

from mcore_models.kernels.rope import fused_rotary_split
from mcore_models.layers.norm import RMSNorm
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.precision.config import Fp8Config
from mcore_parallel.precision.fp8 import WeightCasts, fp8_gemms
from mcore_parallel.precision.noted_largest import noted_largest
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.gpu

T, D, N, G, H = 128, 512, 4, 2, 64


def look(found):
    def hook(grad):
        found.append(noted_largest(grad))
        assert found[-1] is None or found[-1] == grad.abs().max()

    return hook


def pass_through(notes):
    """Outputs and gradients of linear, addition, norm, linear, rotation, with what was left."""
    ctx = ParallelContext.single("cuda")
    gemms = fp8_gemms(Fp8Config(fp8_format="hybrid"), ctx, WeightCasts())
    placed = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    first = RowParallelLinear(D, D, gemm=gemms.row, **placed)
    norm = RMSNorm(D, **placed)
    second = ColumnParallelLinear(D, (N + 2 * G) * H, gemm=gemms.column, **placed)
    norm.notes_largest = notes
    x = torch.randn(T, 1, D, **placed).requires_grad_()
    angle = torch.randn(T, H // 2, device="cuda")
    left = []
    branch = first(x)
    branch.register_hook(look(left))
    normed, total = norm.add_and_norm(x, branch)
    left.append(noted_largest(normed))
    qkv = second(normed)
    qkv.register_hook(look(left))
    heads = fused_rotary_split(qkv, angle.cos(), angle.sin(), N, G, notes_largest=notes)
    sum(y.float().cos().sum() for y in (*heads, total)).backward()
    weights = first.weight, norm.weight, second.weight
    return left, [*heads, total, x.grad, *(weight.grad for weight in weights)]


def test_magnitudes_left_with_tensors_reach_the_linears_and_change_no_bit():
    without, want = pass_through(False)
    left, got = pass_through(True)
    assert without == [None] * 3
    assert not [largest for largest in left if largest is None]
    assert all(map(torch.equal, got, want))
