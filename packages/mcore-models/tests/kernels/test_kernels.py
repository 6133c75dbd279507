"""Triton kernels against plain float64 torch, forward and gradients, on a GPU."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.optional_kernels import kernel_failure

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


def error(got, want):
    return ((got.double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [7, 1024, 2500])
def test_gated_units_equal_plain_torch(dtype, activation, width):
    from mcore_moe.kernels.gate import gated

    torch.manual_seed(0)
    x = torch.randn(9, 2, 2 * width, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(9, 2, width, device="cuda", dtype=dtype)
    wide = x.detach().double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    want = act * up
    want.backward(dy.double())
    got = gated.launch(x, activation)
    got.backward(dy)
    assert error(got, want.detach()) < TOLERANCE[dtype]
    assert error(x.grad, wide.grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "g", "size"), [(4, 2, 64), (3, 1, 80), (32, 8, 128)])
def test_rotary_split_equals_plain_torch(dtype, n, g, size):
    from mcore_models.kernels.rope import rotary_split

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
    got = rotary_split.launch(x, angle.cos(), angle.sin(), n, g)
    torch.autograd.backward(got, grads)
    for a, b in zip(got, want, strict=True):
        assert error(a, b.detach()) < TOLERANCE[dtype]
    assert error(x.grad, wide.grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "LayerNorm without bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_branch", [True, False])
@pytest.mark.parametrize("into_main_grad", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(3, 300), (2500, 4096), (100, 16384), (0, 512)])
def test_norms_with_their_addition_equal_plain_float64(
    kind, dtype, has_branch, into_main_grad, rows, width
):
    from mcore_models.layers import norm

    torch.manual_seed(0)
    zero_centered = width == 300
    more = {"bias": False} if "without" in kind else {}
    make = partial(getattr(norm, kind.split()[0]), width, zero_centered=zero_centered, **more)
    fast = make(device="cuda", dtype=dtype)
    for parameter in fast.parameters():
        torch.nn.init.normal_(parameter)
    slow = make(device="cuda", dtype=torch.float64)
    slow.load_state_dict(fast.state_dict())
    inputs = [torch.randn(rows, 1, width, device="cuda", dtype=dtype) for _ in range(4)]
    if into_main_grad:
        for parameter in fast.parameters():
            grad_slot(parameter).main = torch.ones(width, device="cuda")

    def run(module, wide):
        x, branch, dy, dtotal = (t.to(wide, copy=True) for t in inputs)
        x.requires_grad_()
        branch.requires_grad_()
        if not has_branch:
            y = module(x)
            y.backward(dy)
            return [y, x.grad]
        # The sum is rounded before it is normed: float64 must start from the same numbers.
        total = (x.to(dtype) + branch.to(dtype)).to(wide)
        y, total_ = module.add_and_norm(x, branch)
        assert error(total_.detach(), total.detach()) <= TOLERANCE[dtype] if rows else True
        torch.autograd.backward([y, total_], [dy, dtotal])
        return [y, total_, x.grad, branch.grad]

    got, want = run(fast, dtype), run(slow, torch.float64)
    for parameter, twin in zip(fast.parameters(), slow.parameters(), strict=True):
        grad = grad_slot(parameter).main - 1 if into_main_grad else parameter.grad
        assert (parameter.grad is None) == into_main_grad
        got.append(grad)
        want.append(twin.grad)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        if b.numel() and b.abs().max():
            assert error(a, b.detach()) < 2 * TOLERANCE[dtype]


def test_a_norm_gives_the_same_bits_every_time():
    from mcore_models.layers.norm import RMSNorm

    torch.manual_seed(0)
    norm = RMSNorm(4096, device="cuda", dtype=torch.bfloat16)
    x, branch, dy, dtotal = (
        torch.randn(4096, 1, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    x.requires_grad_()
    runs = [
        torch.autograd.grad(norm.add_and_norm(x, branch), [x, norm.weight], [dy, dtotal])
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "g", "size"), [(4, 2, 64), (3, 1, 80), (32, 4, 128)])
def test_norm_and_rotary_split_equals_plain_torch(dtype, n, g, size):
    from mcore_models.kernels.qk_norm_rope import norm_rotary_split

    torch.manual_seed(0)
    seq, batch = 37, 2
    qkv = torch.randn(seq, batch, (n + 2 * g) * size, device="cuda", dtype=dtype)
    weights = [torch.randn(size, device="cuda", dtype=dtype) for _ in range(2)]
    angle = torch.randn(seq, size // 2, device="cuda")
    tables = angle.cos(), angle.sin()
    grads = [torch.randn(seq, batch, h, size, device="cuda", dtype=dtype) for h in (n, g, g)]

    def plain(packed, q_weight, k_weight):
        q, k, v = packed.view(seq, batch, n + 2 * g, size).split([n, g, g], 2)
        q, k = F.rms_norm(q, (size,), q_weight, 1e-6), F.rms_norm(k, (size,), k_weight, 1e-6)
        c, s = (table.double()[:, None, None] for table in tables)
        turned = []
        for t in (q, k):
            a, b = t.chunk(2, -1)
            turned.append(torch.cat([a * c - b * s, b * c + a * s], -1))
        return *turned, v

    narrow = [t.requires_grad_() for t in (qkv, *weights)]
    wide = [t.detach().double().requires_grad_() for t in narrow]
    got = norm_rotary_split.launch(*narrow, *tables, n, g, epsilon=1e-6)
    want = plain(*wide)
    for a, b in zip(got, want, strict=True):
        assert error(a, b.detach()) < TOLERANCE[dtype]
    found = torch.autograd.grad(got, narrow, grads)
    for a, b in zip(
        found, torch.autograd.grad(want, wide, [g.double() for g in grads]), strict=True
    ):
        assert error(a, b) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("packed", "width", "channels"),
    [
        (False, 128, 128),
        (True, 128, 128),
        *((True, *widths) for widths in ((64, 32), (96, 128), (128, 256))),
    ],
)
def test_the_gated_delta_rule_equals_plain_torch(packed, width, channels):
    from mcore_models.kernels.delta import (
        delta_rule_plain,
        gated_delta_rule,
        kernel_widths,
    )

    device, kind = torch.device("cuda"), (torch.bfloat16, *kernel_widths(width, channels))
    assert kernel_failure(gated_delta_rule, device, *kind) == ""
    torch.manual_seed(0)
    length, rows, groups, heads = 333, 2, 2, 4
    there = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = F.normalize(torch.randn(2, length, rows, groups, width, **there), dim=-1)
    v = torch.randn(length, rows, heads, channels, **there)
    g = -0.1 * torch.rand(length, rows, heads, device="cuda")
    leaves = [q * width**-0.5, k, v, g, torch.rand_like(g)]
    given = {}
    if packed:
        leaves.append(torch.randn(rows, heads, width, channels, device="cuda"))
        given["starts"] = torch.rand(length, rows, device="cuda") < 0.03

    def run(rule, *tensors):
        state = tensors[5] if packed else None
        return rule(*tensors[:5], **given, state=state)

    narrow = [t.detach().requires_grad_() for t in leaves]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    got, want = run(gated_delta_rule, *narrow), run(delta_rule_plain, *wide)
    grads = [torch.randn_like(y) for y in got]
    found = torch.autograd.grad(got, narrow, grads)
    wanted = torch.autograd.grad(want, wide, [grad.double() for grad in grads])
    for a, b in zip((*got, *found), (*want, *wanted), strict=True):
        assert error(a.detach(), b.detach()) < TOLERANCE[torch.bfloat16]
