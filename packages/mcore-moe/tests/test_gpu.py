"""What only a GPU shows: the grouped kernel, its gradients, the same bits in every run."""

from dataclasses import replace

import pytest
import torch
from warm_ranks import run_ranks

from mcore_moe import (
    ExpertNetwork,
    MoEConfig,
    MoELayer,
    Router,
    grouped_linear,
    sequential_linear,
)
from mcore_moe.dispatch.permutation import (
    RowPlan,
    permute,
    permute_reference,
    plan_rows,
    plan_slice,
    unpermute,
    unpermute_reference,
)
from mcore_moe.experts.grouped_gemm import accumulating_linear
from mcore_moe.experts.weight_gradient import (
    Factors,
    add_weight_gradient_plain,
    add_weight_gradients,
    has_grouped_kernel,
)
from mcore_moe.kernels import quack_gemm
from mcore_moe.kernels.gate import weighted_gated
from mcore_moe.kernels.rows import expert_offsets, plan_choices
from mcore_moe.kernels.topk import top_experts
from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.optional_kernels import package_versions

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "counts", [[200, 0, 56, 1], [0, 0, 257, 0], [0, 0, 0, 0]], ids=["uneven", "one", "none"]
)
def test_the_grouped_kernel_equals_a_loop_with_gradients(counts):
    torch.manual_seed(0)
    offsets = expert_offsets(torch.tensor(counts, device="cuda"))
    shape = (sum(counts), 128)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert has_grouped_kernel(x, weight)
    grad = torch.randn(shape[0], 64, device="cuda", dtype=torch.bfloat16)
    results = []
    for linear in (grouped_linear, sequential_linear):
        y = linear(x, weight, offsets)
        results.append((y, *torch.autograd.grad(y, (x, weight), grad)))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1.6e-2, atol=0.3)


@pytest.mark.parametrize("num_experts", [4, 130, 256])
def test_experts_and_rows_are_those_of_stable_sorts(num_experts):
    torch.manual_seed(0)
    scores = torch.randn(1001, num_experts, device="cuda").mul(30).round()
    scores[5, 2] = float("nan")
    ids = top_experts(scores, 3)
    assert torch.equal(ids, top_experts.reference(scores, 3))
    keep = torch.rand(ids.shape, device="cuda") < 0.5
    dropped = ids.where(keep, num_experts)
    most = int(dropped.flatten().bincount(minlength=num_experts + 1)[:-1].max())
    for kept, capacity in ((None, 0), (keep, 0), (keep, most + 5)):
        plan = plan_rows(ids, num_experts, kept, capacity)
        chosen = ids if kept is None else dropped
        expected = RowPlan(
            *plan_choices.reference(chosen, num_experts, capacity, has_all=kept is None),
            is_complete=kept is None,
        )
        num_rows = expected.choices.numel()
        assert torch.equal(plan.choices[:num_rows], expected.choices.int())
        assert torch.equal(plan.slots.clamp(max=num_rows), expected.slots.int())
        assert torch.equal(plan.offsets, expected.offsets)
        x = torch.randn(1001, 24, device="cuda", dtype=torch.bfloat16)
        rows = torch.randn(plan.choices.numel(), 24, device="cuda", dtype=torch.bfloat16)
        rows[num_rows:] = float("nan")  # of no expert
        permuted, summed = permute(x.requires_grad_(), plan), unpermute(rows, plan)
        assert not permuted[num_rows:].any()
        wide = x.detach().double().requires_grad_()
        want = permute_reference(wide, expected)
        assert torch.equal(permuted[:num_rows].double(), want)
        want_sum = unpermute_reference(rows[:num_rows].double(), expected)
        torch.testing.assert_close(summed.double(), want_sum, rtol=1.6e-2, atol=1e-2)
        grad = torch.randn_like(permuted)
        (got_grad,) = torch.autograd.grad(permuted, x, grad)
        (want_grad,) = torch.autograd.grad(want, wide, grad[:num_rows].double())
        torch.testing.assert_close(got_grad.double(), want_grad, rtol=1.6e-2, atol=1e-2)


PARTS = [[[200, 0, 56, 1]], [[0, 0, 0, 0]], [[0, 0, 1257, 0], [0, 1, 64, 0], [0, 0, 0, 0]]]
PARTS += [
    [[70, 0, 1, 130], [5, 0, 300, 0]],
    [[9, 0, 64, 2], [1, 0, 0, 0], [0, 0, 0, 99], [7] * 4],
]


def draw_part(counts, gathered):
    """Factors with rows that are of no expert and no numbers."""
    offsets = expert_offsets(torch.tensor(counts, device="cuda"))
    size = sum(counts) + 9
    sources = torch.randint(9, (size,), device="cuda", dtype=torch.int32)
    dy, x = (torch.randn(size, n, device="cuda", dtype=torch.bfloat16) for n in (200, 136))
    for side, rows in (("grad", dy), ("x", x)):
        if gathered != side:
            rows[sum(counts) :] = float("nan")
    return Factors(dy, x, offsets, **({f"{gathered}_sources": sources} if gathered else {}))


def add_plain(total, parts):
    for part in parts:
        wide = part._replace(grad=part.grad.double(), x=part.x.double())
        add_weight_gradient_plain(total, wide)


@pytest.mark.parametrize("counts", PARTS, ids=str)
@pytest.mark.parametrize("gathered", ["", "grad", "x"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_main_gradients_of_experts_equal_plain_float64(counts, gathered, overwrite):
    torch.manual_seed(0)
    parts = [draw_part(of_part, gathered) for of_part in counts]
    before = torch.randn(4, 200, 136, device="cuda")
    want = torch.zeros_like(before).double() if overwrite else before.double()
    add_plain(want, parts)
    # quack adds float32 sums; torch's GEMM rounds each part's gradient to bfloat16 first.
    by_quack = quack_gemm.usable(parts[0].x, before)
    assert by_quack == quack_gemm.fits(before.device)
    got = before.clone()
    add_weight_gradients(got, parts, overwrite=overwrite)
    error = (got.double() - want).norm() / want.norm().clamp(min=1e-3)
    assert error < (1e-5 if by_quack else 4e-3)


@pytest.mark.parametrize("gathered", ["", "grad", "x"])
def test_main_gradients_of_four_micro_batches_follow_new_sizes_in_a_recorded_graph(gathered):
    torch.manual_seed(0)
    parts = [draw_part([64, 0, 30, 6], gathered) for _ in range(4)]
    got = torch.zeros(4, 200, 136, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        add_weight_gradients(got, parts)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_weight_gradients(got, parts, overwrite=True)
    new = [0, 0, 0, 100], [1, 98, 1, 0], [0] * 4, [25] * 4
    for part, counts in zip(parts, new, strict=True):
        part.offsets.copy_(expert_offsets(torch.tensor(counts)))
    want = torch.zeros_like(got).double()
    add_plain(want, parts)
    graph.replay()
    is_exact = quack_gemm.usable(parts[0].x, got)
    assert (got.double() - want).norm() < (1e-5 if is_exact else 4e-3) * want.norm()


def is_taken(x, weight):
    """Skip where quack is not installed; where it is, its trial must succeed."""
    if not package_versions(["quack-kernels"]):
        pytest.skip("quack-kernels is not installed")
    return quack_gemm.usable(x, weight)


@pytest.mark.parametrize("spread", ["even", "one expert", "few", "elsewhere"])
@pytest.mark.parametrize("has_main", [False, True])
def test_gemms_that_gather_equal_plain_float64(spread, has_main):
    from mcore_moe.experts.gathered_gemm import gathered_linear, summed_linear

    torch.manual_seed(0)
    T, K, N, E, topk = 515, 256, 192, 9, 2
    scores = torch.rand(T, E, device="cuda")
    scores += {"one expert": 9.0, "few": 5.0}.get(spread, 0.0) * (
        torch.arange(E, device="cuda") < {"one expert": 1}.get(spread, 3)
    )
    ids = scores.topk(topk).indices
    plan = plan_rows(ids, E)
    if spread == "elsewhere":  # the choices of other ranks leave rows of no expert
        plan = plan_slice(plan_rows(ids, E, ids % 2 == 0), 0, T * topk)
    x = torch.randn(T, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    first, second = (
        torch.randn(E, *shape, device="cuda", dtype=torch.bfloat16).mul(0.1).requires_grad_()
        for shape in ((N, K), (K, N))
    )
    assert is_taken(x, first)
    grad = torch.randn(T, K, device="cuda", dtype=torch.bfloat16)
    for weight in (first, second):
        grad_slot(weight).main = (
            torch.ones_like(weight, dtype=torch.float32) if has_main else None
        )
    y = summed_linear(gathered_linear(x, first, plan).relu(), second, plan)
    found = list(torch.autograd.grad(y, (x, first, second), grad, allow_unused=has_main))
    if has_main:
        assert found[1:] == [None, None]
        found[1:] = [grad_slot(weight).main - 1 for weight in (first, second)]
    wide = [t.detach().double().requires_grad_() for t in (x, first, second)]
    rows = permute(wide[0], plan)
    hidden = sequential_linear(rows, wide[1], plan.offsets).bfloat16().double().relu()
    want = unpermute(sequential_linear(hidden, wide[2], plan.offsets), plan)
    expected = torch.autograd.grad(want, wide, grad.double())
    for a, b in zip((y, *found), (want, *expected), strict=True):
        assert (a.double() - b).abs().max() < 1.6e-2 * b.abs().max()


@pytest.mark.parametrize("counts", [[200, 0, 56, 1], [0, 0, 257, 0], [0, 0, 0, 3]], ids=str)
@pytest.mark.parametrize("has_main", [False, True])
def test_gemms_of_wide_experts_equal_plain_float64(counts, has_main):
    torch.manual_seed(0)
    offsets = expert_offsets(torch.tensor(counts, device="cuda"))
    num_rows = sum(counts)
    x = torch.randn(num_rows, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 2304, 2048, device="cuda", dtype=torch.bfloat16).mul(0.02)
    weight.requires_grad_()
    assert is_taken(x, weight)
    assert quack_gemm.sorts_faster(weight)
    slot = grad_slot(weight)
    slot.main = torch.ones_like(weight, dtype=torch.float32) if has_main else None
    grad = torch.randn(num_rows, 2304, device="cuda", dtype=torch.bfloat16)
    if has_main:
        y = accumulating_linear(x, weight, offsets, linear=grouped_linear)
    else:
        y = grouped_linear(x, weight, offsets)
    found = list(torch.autograd.grad(y, (x, weight), grad, allow_unused=has_main))
    if slot.main is not None:
        found[1] = slot.main - 1
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = sequential_linear(*wide, offsets)
    expected = torch.autograd.grad(want, wide, grad.double())
    for a, b in zip((y, *found), (want, *expected), strict=True):
        assert (a.double() - b).abs().max() < 1e-2 * b.abs().max()


@pytest.mark.parametrize("counts", [[200, 0, 56, 1], [0, 0, 257, 0]], ids=str)
def test_gemms_of_rows_in_fp8_are_near_plain_float64(counts):
    from mcore_moe.experts.fp8_rows import fp8_linear, weight_casts
    from mcore_moe.kernels.fp8_rows import cast_rows
    from mcore_parallel.precision.fp8 import WeightCasts

    torch.manual_seed(0)
    offsets = expert_offsets(torch.tensor(counts, device="cuda"))
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 192, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rows, columns = weight_casts(weight, WeightCasts())
    sources = (cast_rows(x), x), (rows, weight), (columns, weight.mT.contiguous())
    for cast, source in sources:
        for got, want in zip(cast, cast_rows.reference(source), strict=True):
            assert torch.equal(got.float(), want.float())
    grad = torch.randn(300, 192, device="cuda", dtype=torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = sequential_linear(*wide, offsets)
    expected = [want, *torch.autograd.grad(want, wide, grad.double())]
    y = fp8_linear(x, weight, offsets, casts=WeightCasts())
    found = [y, *torch.autograd.grad(y, (x, weight), grad)]
    for a, b, bound in zip(found, expected, (0.04, 0.04, 4e-3), strict=True):
        rows = slice(None) if a.dim() == 3 else slice(257)
        assert (a[rows].double() - b[rows]).norm() < bound * b[rows].norm()


@pytest.mark.parametrize("is_local", [True, False])
def test_rows_of_tokens_in_fp8_equal_rows_that_are_cast_themselves(is_local):
    from mcore_moe.experts.fp8_rows import fp8_linear
    from mcore_moe.experts.gathered_gemm import gathered_linear, summed_linear
    from mcore_parallel.precision.fp8 import WeightCasts

    torch.manual_seed(0)
    T, K, N, E, topk = 515, 256, 192, 9, 2
    ids = torch.rand(T, E, device="cuda").topk(topk).indices
    plan = plan_rows(ids, E)
    if not is_local:  # the choices of other ranks leave rows of no expert
        plan = plan_slice(plan_rows(ids, E, ids % 2 == 0), 0, T * topk)
    x = torch.randn(T, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = [
        torch.randn(E, *shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in ((N, K), (K, N))
    ]
    assert is_taken(x, weights[0])
    grad, casts = torch.randn_like(x), WeightCasts()
    hidden = gathered_linear(x, weights[0], plan, casts).relu()
    found = summed_linear(hidden, weights[1], plan, casts)
    rows = fp8_linear(permute(x, plan), weights[0], plan.offsets, casts=casts).relu()
    want = unpermute(fp8_linear(rows, weights[1], plan.offsets, casts=casts), plan)
    assert torch.equal(found, want)
    pairs = (torch.autograd.grad(y, (x, *weights), grad) for y in (found, want))
    for i, (a, b) in enumerate(zip(*pairs, strict=True)):
        assert torch.equal(a, b) if i == 0 else (a - b).norm() < 4e-3 * b.norm()


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_layer_by_quack_equals_one_expert_after_the_other(recomputes):
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    module = layer(torch.bfloat16).cuda()
    is_taken(x, module.experts.fc1_weight)
    experts = module.experts
    experts.network = replace(experts.network, recompute_activation=recomputes)
    results = []
    for grouped in (True, False):
        module.experts.grouped = grouped
        module.zero_grad()
        results.append(gradients(module, x))
    for result, one in zip(*results, strict=True):
        assert (result.double() - one).abs().max() < 2 * 1.6e-2 * one.double().abs().max()


def test_float32_logits_of_bfloat16_tokens_are_near_float64():
    torch.manual_seed(0)
    config = MoEConfig(num_experts=32, moe_router_topk=2, moe_router_dtype="fp32")
    router = Router(512, config, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(700, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    got = router._logits(x)
    wide = [x.detach().double().requires_grad_(), router.weight.detach().double()]
    want = torch.nn.functional.linear(wide[0], wide[1].requires_grad_())
    grad = torch.randn_like(got)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(got, (x, router.weight), grad)
    for a, b in zip(found, torch.autograd.grad(want, wide, grad.double()), strict=True):
        assert (a.double() - b).abs().max() < 2**-8 * b.abs().max()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 7), (64, 1024), (33, 2500), (0, 16)], ids=str)
def test_the_weighted_gate_equals_plain_float64(shape, dtype, activation):
    torch.manual_seed(0)
    num_rows, width = shape
    x = torch.randn(num_rows, 2 * width, device="cuda", dtype=dtype)
    weight, grad = torch.rand(num_rows, device="cuda"), torch.randn(shape, device="cuda")
    end = torch.tensor(num_rows - 1 if num_rows > 1 else num_rows, device="cuda")
    results = []
    for run, wide in ((weighted_gated.launch, dtype), (weighted_gated, torch.float64)):
        inputs = [
            x.to(wide).requires_grad_(),
            weight.to(torch.promote_types(wide, weight.dtype)),
        ]
        inputs[1].requires_grad_()
        y = run(*inputs, end, activation)
        grads = torch.autograd.grad(y, inputs, grad.to(dtype).to(wide))
        results.append([rows[:end] for rows in (y, *grads)])
    for result, expected in zip(*results, strict=True):
        assert result.shape == expected.shape
        if expected.numel():
            error = (result - expected).abs().max() / expected.abs().max()
            assert error < {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}[dtype]


def layer(dtype, **fields):
    torch.manual_seed(0)
    config = MoEConfig(num_experts=8, moe_router_topk=2, moe_aux_loss_coeff=0.1, **fields)
    return MoELayer(64, 128, config, ExpertNetwork(init_std=0.1), dtype=dtype)


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
