"""The grouped product, and gradients put off, against the sequential product."""

import pytest
import torch

from mcore_moe import grouped_linear, sequential_linear
from mcore_moe.grouped_gemm import deferred_linear, has_grouped_kernel
from mcore_parallel.grad_slot import grad_slot

COUNTS = [torch.tensor(c) for c in ([2, 0, 3], [0, 0, 5], [5, 0, 0], [0, 0, 0])]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_gemm_equals_the_sequential_one_with_gradients(counts, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(int(counts.sum()), 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(3, 16, 8, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(x.shape[0], 16, generator=generator).to(dtype)
    assert has_grouped_kernel(x, weight) == (dtype == torch.bfloat16)
    results = []
    for linear in (grouped_linear, sequential_linear):
        y = linear(x, weight, counts)
        results.append((y, *torch.autograd.grad(y, (x, weight), grad)))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


class Queue:
    """As ``mcore_parallel.WeightQueue``: keeps what is put off."""

    def __init__(self):
        self.works = []

    def put(self, work):
        self.works.append(work)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weight_gradients_put_off_are_those_made_at_once(counts, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(int(counts.sum()), 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(3, 16, 8, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(x.shape[0], 16, generator=generator).to(dtype)
    for linear in (grouped_linear, sequential_linear):
        at_once = torch.autograd.grad(linear(x, weight, counts), (x, weight), grad)
        ready, grad_slot(weight).queue = [], Queue()
        grad_slot(weight).main = torch.ones_like(weight, dtype=torch.float64)
        grad_slot(weight).on_ready = lambda ready=ready: ready.append(True)
        y = deferred_linear(x, weight, counts, linear=linear)
        (grad_x,) = torch.autograd.grad(y, x, grad)
        (work,) = grad_slot(weight).queue.works
        assert (grad_slot(weight).main == 1).all()
        assert not ready
        with torch.no_grad():
            work()
        assert ready == [True]
        torch.testing.assert_close(grad_x, at_once[0])
        torch.testing.assert_close(
            (grad_slot(weight).main - 1).to(dtype), at_once[1], atol=1e-6, rtol=1.6e-2
        )


def test_rows_that_the_kernel_cannot_align_are_computed_all_the_same():
    x, weight = torch.randn(5, 3).bfloat16(), torch.randn(3, 7, 3).bfloat16()
    assert not has_grouped_kernel(x, weight)
    expected = sequential_linear(x, weight, COUNTS[0])
    assert torch.equal(grouped_linear(x, weight, COUNTS[0]), expected)
