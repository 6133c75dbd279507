"""What only a GPU shows: the grouped kernel, its gradients, the same bits in every run."""

import pytest
import torch

from mcore_moe import MoEConfig, MoELayer, grouped_linear, sequential_linear
from mcore_moe.activations import weighted_gated
from mcore_moe.grouped_gemm import has_grouped_kernel
from mcore_parallel.testing.ranks import run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "counts", [[200, 0, 56, 1], [0, 0, 257, 0], [0, 0, 0, 0]], ids=["uneven", "one", "none"]
)
def test_the_grouped_kernel_equals_a_loop_with_gradients(counts):
    torch.manual_seed(0)
    counts = torch.tensor(counts, device="cuda")
    shape = (int(counts.sum()), 128)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert has_grouped_kernel(x, weight)
    grad = torch.randn(shape[0], 64, device="cuda", dtype=torch.bfloat16)
    results = []
    for linear in (grouped_linear, sequential_linear):
        y = linear(x, weight, counts)
        results.append((y, *torch.autograd.grad(y, (x, weight), grad)))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1.6e-2, atol=0.3)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 7), (64, 1024), (33, 2500), (0, 16)], ids=str)
def test_the_weighted_gate_equals_plain_float64(shape, dtype, activation):
    from mcore_moe.kernels import fused_weighted_gated

    torch.manual_seed(0)
    num_rows, width = shape
    x = torch.randn(num_rows, 2 * width, device="cuda", dtype=dtype)
    weight, grad = torch.rand(num_rows, device="cuda"), torch.randn(shape, device="cuda")
    results = []
    for run, wide in ((fused_weighted_gated, dtype), (weighted_gated, torch.float64)):
        inputs = [
            x.to(wide).requires_grad_(),
            weight.to(torch.promote_types(wide, weight.dtype)),
        ]
        inputs[1].requires_grad_()
        y = run(*inputs, activation)
        results.append((y, *torch.autograd.grad(y, inputs, grad.to(dtype).to(wide))))
    for result, expected in zip(*results, strict=True):
        assert result.shape == expected.shape
        if expected.numel():
            error = (result - expected).abs().max() / expected.abs().max()
            assert error < {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}[dtype]


def layer(dtype, **fields):
    torch.manual_seed(0)
    config = MoEConfig(num_experts=8, moe_router_topk=2, moe_aux_loss_coeff=0.1, **fields)
    return MoELayer(64, 128, config, init_std=0.1, dtype=dtype)


def gradients(module, x):
    x = x.clone().requires_grad_()
    y, aux = module(x)
    (y.float().square().sum() + aux).backward()
    return [y, x.grad, *(p.grad.clone() for p in module.parameters())]


def test_a_gpu_computes_what_a_cpu_does():
    x = torch.randn(300, 64, dtype=torch.float64)
    expected = gradients(layer(torch.float64), x)
    results = gradients(layer(torch.float64).cuda(), x.cuda())
    for result, one in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"moe_expert_capacity_factor": 0.7},
        {"moe_expert_capacity_factor": 1.2, "moe_pad_expert_input_to_capacity": True},
    ],
    ids=["all", "dropped", "padded"],
)
def test_every_run_gives_the_same_bits(fields):
    x = torch.randn(3000, 64, device="cuda", dtype=torch.bfloat16)
    first, second = (gradients(layer(torch.bfloat16, **fields).cuda(), x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def check_compiled():
    x = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16)
    expected = gradients(layer(torch.bfloat16).cuda(), x)
    module = layer(torch.bfloat16).cuda()
    module.forward = torch.compile(module.forward, fullgraph=True)
    for result, one in zip(gradients(module, x), expected, strict=True):
        scale = one.float().abs().max()
        assert (result.float() - one.float()).abs().max() < 0.02 * scale


def test_compiled_by_inductor_it_is_one_graph_and_agrees():
    run_ranks(check_compiled, 1, check_shapes=False)
