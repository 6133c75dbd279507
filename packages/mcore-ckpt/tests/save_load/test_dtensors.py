"""Torch's fully_shard: saved by it and loaded by anyone, and the other way round."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from mcore_ckpt.save_load.dtensors import tensor_shards, torch_model_shards
from mcore_ckpt.save_load.loading import load
from mcore_ckpt.save_load.saving import save
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.testing.ranks import run_ranks

# Four ranks share three rows: torch pads inside, and the last rank holds nothing.
WIDTHS = (5, 8, 3)


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Linear(*WIDTHS[1:]))
    model.register_buffer("count", torch.tensor([float(seed)]))
    return model


def trained(model, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        model(torch.ones(2, WIDTHS[0])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def wrapped(kind, seed):
    model = build(seed)
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    elif kind == "tensor":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["dp"]
    else:
        mesh = init_device_mesh("cpu", (4,))
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save_and_load(folder):
    ctx = ParallelContext.build(ParallelConfig())
    for kind in ("flat", "hybrid", "tensor"):
        model = wrapped(kind, 3)
        shards = torch_model_shards(model, trained(model))
        save(f"{folder}/{kind}", 1, shards, world=ctx.world)
        # What one rank wrote, or another wrapping.
        other = wrapped(kind, 8)
        state = torch_model_shards(other, trained(other, 1))
        load(f"{folder}/single", state, world=ctx.world)
        save(f"{folder}/{kind}_again", 1, state, world=ctx.world)
    mesh = init_device_mesh("cpu", (4,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(ValueError, match="only cuts and copies save"):
        tensor_shards({"x": partial})
    with pytest.raises(ValueError, match="make one step first"):
        torch_model_shards(model, torch.optim.AdamW(model.parameters()))
    columns = distribute_tensor(torch.arange(12.0).view(2, 6), mesh, [Cut(1)])
    (piece,) = tensor_shards({"x": columns})["x"].pieces
    assert piece.offsets[0] == 0
    assert torch.equal(piece.data[0], torch.arange(6.0)[piece.offsets[1] :][: piece.lengths[1]])
    ctx.destroy()


def test_a_frozen_parameter_has_no_state_and_gets_none():
    model = build(1)
    model[0].weight.requires_grad_(requires_grad=False)
    free = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(free, lr=0.1, momentum=0.9)
    model(torch.ones(2, WIDTHS[0])).sum().backward()
    optimizer.step()
    shards = torch_model_shards(model, optimizer)
    assert "optimizer.momentum_buffer.1.weight" in shards
    assert "optimizer.momentum_buffer.0.weight" not in shards
    assert len(optimizer.state_dict()["state"]) == 3


def test_state_that_would_be_lost_is_refused():
    model = build(1)
    optimizer = trained(model)
    with pytest.raises(ValueError, match=r"of a parameter of shape \[8, 5\] that is not"):
        torch_model_shards(model[1], optimizer)
    optimizer.state[model[0].weight]["step"] = 2
    with pytest.raises(ValueError, match=r"optimizer.step.0.weight is no tensor but int"):
        torch_model_shards(model, optimizer)
    plain = torch.optim.SGD(model.parameters())
    plain.step()
    with pytest.raises(ValueError, match="leave it out if it is of a kind that never holds"):
        torch_model_shards(model, plain)


def test_fully_sharded_models_save_and_load_what_one_rank_does(tmp_path):
    alone = build(3)
    state = torch_model_shards(alone, trained(alone))
    save(tmp_path / "single", 1, state, world=SINGLE)
    run_ranks(save_and_load, 4, str(tmp_path))
    for kind in ("flat", "hybrid", "tensor"):
        for folder, atol in ((kind, 1e-6), (f"{kind}_again", 0.0)):
            found = build(5)
            shards = torch_model_shards(found, trained(found, 1))
            load(tmp_path / folder, shards)
            for name, shard in shards.items():
                torch.testing.assert_close(
                    shard.pieces[0].data, state[name].pieces[0].data, rtol=0, atol=atol
                )
