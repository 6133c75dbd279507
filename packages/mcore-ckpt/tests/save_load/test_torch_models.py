"""Any torch model and optimizer, whatever its state is made of, in one call each way."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from warm_ranks import run_ranks

from mcore_ckpt.save_load.loading import load
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.save_load.torch_models import load_torch, save_torch, torch_model_shards
from mcore_parallel.mesh import SINGLE

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9)),
    "sgd without state": lambda p: torch.optim.SGD(p, lr=0.1),
    # Numbers, lists of tensors, and tensors of other shapes than their parameter.
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, optimizer, steps):
    x = torch.linspace(-1, 1, 10).view(2, 5)

    def loss():
        optimizer.zero_grad()
        total = model(x).square().mean()
        total.backward()
        return total

    for _ in range(steps):
        optimizer.step(loss)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bitwise_with_a_new_optimizer(tmp_path, name):
    model = build(1)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.05
    save_torch(tmp_path, 2, model, optimizer, world=SINGLE, extra={"seen": 4})
    train(model, optimizer, 3)
    for steps in (0, 1):
        other = build(9)
        again = OPTIMIZERS[name](other.parameters())
        train(other, again, steps)
        assert load_torch(tmp_path, other, again, world=SINGLE) == {"seen": 4}
        train(other, again, 3)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


class Odd(torch.optim.Optimizer):
    """Keeps what no optimizer of torch's keeps: dictionaries, tuples, None, words."""

    def __init__(self, parameters):
        super().__init__(parameters, {"plan": ("warm", 3)})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            nested = {"count": 7, "rows": [parameter.detach() * 2, None], "pair": (0.5, True)}
            self.state[parameter] = {"nested": nested, "word": "x"}


def test_nested_state_comes_back_with_its_types(tmp_path):
    model = build(1)
    optimizer = Odd(model.parameters())
    optimizer.step()
    save_torch(tmp_path, 1, model, optimizer, world=SINGLE)
    again = Odd(model.parameters())
    again.param_groups[0]["plan"] = ("cold", 0)
    load_torch(tmp_path, model, again, world=SINGLE)
    assert again.param_groups[0]["plan"] == ("warm", 3)
    for parameter, state in again.state.items():
        nested = state["nested"]
        assert torch.equal(nested.pop("rows")[0], parameter * 2)
        assert state == {"nested": {"count": 7, "pair": (0.5, True)}, "word": "x"}
    assert len(again.state) == 4


def test_what_cannot_be_saved_or_loaded_is_said_before_anything_is_written(tmp_path):
    model = build(1)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 1)
    with pytest.raises(ValueError, match=r"of a parameter of shape \[8, 5\] that is not"):
        save_torch(tmp_path, 1, model[2], optimizer, world=SINGLE)
    optimizer.state[model[0].weight]["made"] = object()
    with pytest.raises(
        ValueError, match=r"optimizer.made of 0.weight is a object, which cannot be saved"
    ):
        save_torch(tmp_path, 1, model, optimizer, world=SINGLE)
    assert not list(tmp_path.iterdir())
    save(tmp_path, 1, torch_model_shards(model), world=SINGLE)
    with pytest.raises(ValueError, match="holds no optimizer of save_torch"):
        load_torch(tmp_path, model, optimizer, world=SINGLE)
    assert load_torch(tmp_path, model, world=SINGLE) == {}
    del optimizer.state[model[0].weight]["made"]
    save_torch(tmp_path, 2, model, optimizer, world=SINGLE)
    half = OPTIMIZERS["adamw"](model[0].parameters())
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, the check.* of \[4\]"):
        load_torch(tmp_path, model, half, world=SINGLE)
    load(tmp_path, torch_model_shards(model, optimizer))


def test_a_frozen_parameter_has_no_state_and_gets_none(tmp_path):
    model = build(1)
    model[0].weight.requires_grad_(requires_grad=False)
    free = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(free, lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="make one step first"):
        torch_model_shards(model, optimizer)
    train(model, optimizer, 1)
    names = torch_model_shards(model, optimizer).keys()
    assert "optimizer.momentum_buffer.2.weight" in names
    assert "optimizer.momentum_buffer.0.weight" not in names


def run_page(folder, page):
    os.chdir(folder)
    scope = {"__name__": "page"}
    exec(compile(page, "fsdp2.md", "exec"), scope)
    before, after = build(0), scope["model"]
    assert isinstance(before, nn.Module)
    state = scope["optimizer"].state
    return [float(one["step"]) for one in state.values()], len(list(after.parameters()))


def test_the_page_on_fsdp2_runs_on_two_ranks(tmp_path):
    page = (Path(__file__).parents[4] / "docs/fsdp2.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert run_ranks(run_page, 2, str(tmp_path), code) == [([1.0] * 4, 4)] * 2
