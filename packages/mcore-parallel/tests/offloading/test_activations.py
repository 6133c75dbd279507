"""Activations in host memory: the same gradients, and what travels."""

import gc

import pytest
import torch
from torch import nn

from mcore_parallel.offloading.activations import ActivationOffload


class Layer(nn.Module):
    """Saves its input twice, two halves of one tensor, an expanded one and its weights."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x):
        left, right = self.first(x).chunk(2, -1)
        y = (left.square() * right).sigmoid().transpose(0, 1)
        y = y * y.mean(-1, keepdim=True).expand_as(y)
        return x + self.second(y.transpose(0, 1).contiguous()) * x.tanh()


def stack(num_layers=4, width=24, device="cpu"):
    torch.manual_seed(0)
    return nn.ModuleList(Layer(width) for _ in range(num_layers)).to(device)


def gradients(layers, inputs):
    """Run all forwards before all backwards, as a pipeline does, the first one first."""
    losses = []
    for x in inputs:
        losses.append(nn.Sequential(*layers)(x).square().sum())
    for loss in losses:
        loss.backward()
    found = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    return found


def batches(count, width=24, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, width, generator=generator).to(device) for _ in range(count)]


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_gradients_are_those_of_activations_that_stay(device, num_layers):
    width = 24 if device == "cpu" else 256
    inputs = batches(3, width, device)
    expected = gradients(stack(width=width, device=device), inputs)
    layers = stack(width=width, device=device)
    offload = ActivationOffload(
        list(layers), num_layers, torch.device(device), least_elements=1
    )
    taken = []
    for _ in range(3):
        found = gradients(layers, inputs)
        assert all((a == b).all() for a, b in zip(found, expected, strict=True))
        gc.collect()
        taken.append(offload.host_bytes)
    assert taken[0] == taken[2] > 0  # the memory of one step serves all
    offload.remove_hooks()
    again = gradients(layers, inputs)
    assert all((a == b).all() for a, b in zip(again, expected, strict=True))
    assert offload.host_bytes == taken[0]


def test_a_tensor_travels_once_and_weights_stay():
    layers = stack(2)
    offload = ActivationOffload(list(layers), 1, torch.device("cpu"))
    x = batches(1)[0].requires_grad_()
    layers[1](layers[0](x)).sum().backward()
    row = x.numel() * 4
    # x; both halves; the sigmoid; their product; its mean's factors; the linear's input; tanh.
    assert row < offload.host_bytes < 12 * row
    assert not any(p.grad is None for p in layers.parameters())


class Borrower(nn.Module):
    """Computes with a linear that another layer owns."""

    def __init__(self, owner):
        super().__init__()
        self.linears = (owner.second,)  # in a tuple, so that it is none of its parameters

    def forward(self, x):
        return self.linears[0](x)


def test_weights_stay_of_another_layer_that_a_layer_computes_with():
    owner, last = stack(2)
    x = batches(1)[0].requires_grad_()
    taken = []
    for layers in ([owner, last], [owner, Borrower(owner), last]):
        offload = ActivationOffload(layers, len(layers) - 1, torch.device("cpu"))
        nn.Sequential(*layers)(x).sum().backward()
        taken.append(offload.host_bytes)
        offload.remove_hooks()
    assert taken[1] - taken[0] == x.numel() * x.element_size()  # its input alone


def test_memory_of_a_graph_that_nobody_runs_back_is_used_again():
    layers = stack(2)
    offload = ActivationOffload(list(layers), 1, torch.device("cpu"))
    for _ in range(4):
        layers[1](layers[0](batches(1)[0].requires_grad_())).sum()
        gc.collect()
        before = offload.host_bytes
    assert offload.host_bytes == before
    with torch.no_grad():
        layers[1](layers[0](batches(1)[0]))
    assert offload.host_bytes == before > 0


def test_the_last_layer_is_refused():
    with pytest.raises(ValueError, match="last layer's activations immediately"):
        ActivationOffload(list(stack(2)), 2, torch.device("cpu"))
