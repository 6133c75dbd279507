"""Gradients of gradients: refused, whatever the incoming gradient is."""

import pytest
import torch

from mcore_parallel import ColumnParallelLinear
from mcore_parallel.autograd.functions import OnceDifferentiable


class _Square(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.detach().square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(2 * (x * grad).detach().numpy())  # past autograd


def layer(x):
    torch.manual_seed(0)
    return ColumnParallelLinear(3, 4)(x)


@pytest.mark.parametrize(
    ("name", "function"), [("Square", _Square.apply), ("ColumnParallel", layer)]
)
def test_a_gradient_that_is_to_be_differentiated_is_refused(name, function):
    x = torch.arange(3.0)[None].requires_grad_()
    y = function(x).sum()
    (plain,) = torch.autograd.grad(y, x, retain_graph=True)
    assert not plain.requires_grad
    with pytest.raises(RuntimeError, match=f"{name}.*leave create_graph=True out"):
        torch.autograd.grad(y, x, create_graph=True)
    assert torch.equal(torch.autograd.grad(y, x)[0], plain)
