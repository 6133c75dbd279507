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
from warm_ranks import run_ranks

from mcore_ckpt.save_load.dtensors import tensor_shards
from mcore_ckpt.save_load.loading import load
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.save_load.torch_models import load_torch, save_torch, torch_model_shards
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext

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
        # What one rank wrote, into an optimizer that has made no step.
        other = wrapped(kind, 8)
        fresh = torch.optim.AdamW(other.parameters(), lr=0.7, foreach=False)
        load_torch(f"{folder}/single", other, fresh, world=ctx.world)
        assert fresh.param_groups[0]["lr"] == 0.1
        save_torch(f"{folder}/{kind}_again", 1, other, fresh, world=ctx.world)
    mesh = init_device_mesh("cpu", (4,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(ValueError, match="only sharded and replicated tensors can be saved"):
        tensor_shards({"x": partial})
    columns = distribute_tensor(torch.arange(12.0).view(2, 6), mesh, [Cut(1)])
    (piece,) = tensor_shards({"x": columns})["x"].pieces
    assert piece.offsets[0] == 0
    assert torch.equal(piece.data[0], torch.arange(6.0)[piece.offsets[1] :][: piece.lengths[1]])
    ctx.destroy()


def test_fully_sharded_models_save_and_load_what_one_rank_does(tmp_path):
    alone = build(3)
    optimizer = trained(alone)
    state = torch_model_shards(alone, optimizer)
    save_torch(tmp_path / "single", 1, alone, optimizer, world=SINGLE)
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
