"""Gated layers by quack-kernels on a GPU, held to plain torch in float64."""

import pytest
import torch

from mcore_models import quack_products as quack
from mcore_models.mlp import ACTIVATIONS, MLP
from mcore_parallel.gated_products import in_turns, twin_kernels

pytestmark = [
    pytest.mark.gpu,
    # torch says so when a backward's first product is the first of its thread.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    pytest.mark.skipif(not quack.is_installed(), reason="quack-kernels is not installed"),
]

T, D, WIDTH = 1024, 512, 1112
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Of the norm: one rounding of a result, 2**-9 or 2**-12 at most, and those of its factors."""


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def random(*shape, dtype=torch.bfloat16, std=1.0):
    return (torch.randn(*shape, device="cuda") * std).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("keep", [True, False])
def test_the_first_product_gates_as_its_twin(dtype, activation, keep):
    torch.manual_seed(0)
    x, weight = random(T, D, dtype=dtype), random(2 * WIDTH, D, dtype=dtype, std=D**-0.5)
    twin = twin_kernels(ACTIVATIONS[activation])
    hidden, activated = quack.gated_kernels(activation).widen(x, weight, keep)
    want_hidden, want = twin.widen(x.double(), weight.double(), True)
    assert error(activated, want) < TOLERANCE[dtype]
    assert (hidden is not None) == keep
    if keep:
        assert error(hidden, want_hidden) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gradients_of_the_second_product_and_the_gate_are_the_twins(dtype, activation):
    torch.manual_seed(0)
    grad, weight = random(T, D, dtype=dtype), random(D, WIDTH, dtype=dtype, std=D**-0.5)
    hidden = random(T, 2 * WIDTH, dtype=dtype)
    twin = twin_kernels(ACTIVATIONS[activation])
    got = quack.gated_kernels(activation).narrow_backward(grad, weight, hidden)
    want = twin.narrow_backward(grad.double(), weight.double(), hidden.double())
    for one, other in zip(got, want, strict=True):
        assert error(one, other) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_first_product_are_the_twins(dtype, total_dtype):
    torch.manual_seed(0)
    grad = in_turns(random(T, 2 * WIDTH, dtype=dtype))
    weight, x = random(2 * WIDTH, D, dtype=dtype, std=D**-0.5), random(T, D, dtype=dtype)
    got, want = quack.gated_kernels("silu").gradients, twin_kernels(torch.sigmoid).gradients
    of_input = got.of_input(grad.view(2, -1, 2 * WIDTH), weight)
    assert of_input.shape == (2, T // 2, D)
    wanted = want.of_input(grad.double(), weight.double())
    assert error(of_input.view(T, D), wanted) < TOLERANCE[dtype]
    tolerance = 1e-5 if total_dtype == torch.float32 else 8e-3
    for overwrite in (True, False):
        total = torch.randn(2 * WIDTH, D, device="cuda").to(total_dtype)
        wanted = total.double()
        got.of_weight(total, grad.t(), x, overwrite=overwrite)
        want.of_weight(wanted, grad.double().t(), x.double(), overwrite=overwrite)
        assert error(total, wanted) < tolerance


@pytest.mark.parametrize("has_main_grad", [True, False])
def test_a_layer_by_quack_is_the_layer_by_torch_and_repeats_its_bits(has_main_grad):
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x, grad = random(512, 2, D), random(512, 2, D)
    layers = {name: MLP(D, WIDTH, backend=name, **options) for name in ("torch", "quack")}
    layers["quack"].load_state_dict(layers["torch"].state_dict())
    exact = MLP(D, WIDTH, device="cuda", dtype=torch.float64)
    exact.load_state_dict({k: v.double() for k, v in layers["torch"].state_dict().items()})
    rows = x.double().requires_grad_()
    wanted = exact(rows)
    wanted.backward(grad.double())
    want = [wanted, rows.grad, *(weight.grad for weight in exact.parameters())]
    seen = []
    for name in ("torch", "quack", "quack"):
        layer = layers[name]
        for weight in layer.parameters():
            weight.grad = None
            if has_main_grad:
                weight.main_grad = torch.full_like(weight, torch.nan, dtype=torch.float32)
                weight.main_grad_is_stale = True
        rows = x.clone().requires_grad_()
        y = layer(rows)
        y.backward(grad)
        made = [w.main_grad if has_main_grad else w.grad for w in layer.parameters()]
        seen.append([y.detach(), rows.grad, *made])
    errors = [[error(a, b) for a, b in zip(made, want, strict=True)] for made in seen]
    for torchs, quacks in zip(*errors[:2], strict=True):
        assert quacks < 1.1 * torchs  # rounds no more often than torch's own kernels
    assert all(torch.equal(a, b) for a, b in zip(*seen[1:], strict=True))


def test_auto_takes_it_for_large_layers_only():
    options = {"device": "cuda", "dtype": torch.bfloat16}
    small, large = MLP(D, WIDTH, **options), MLP(2048, 2048, **options)
    x = random(1024, 1, 2048)
    assert not small._uses_quack(random(T, 1, D))
    assert large._uses_quack(x)
    assert not large._uses_quack(x[:1000])
    assert not large._uses_quack(x.float())


def test_it_can_be_recorded_in_a_graph():
    layer = MLP(D, WIDTH, backend="quack", device="cuda", dtype=torch.bfloat16)
    x, grad = random(T, 1, D).requires_grad_(), random(T, 1, D)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            want = torch.autograd.grad(layer(x), [x, *layer.parameters()], grad)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            got = torch.autograd.grad(layer(x), [x, *layer.parameters()], grad)
        graph.replay()
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
