"""mcore-ckpt alone: a torch module's weights saved, read back bitwise, by logical name."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from mcore_ckpt import __version__
from mcore_ckpt.save_load.loading import load
from mcore_ckpt.save_load.saving import save
from mcore_parallel import SINGLE, named_shards

assert __version__[0].isdigit(), __version__

with tempfile.TemporaryDirectory() as folder:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shards = {f"model.{name}": shard for name, shard in named_shards(model).items()}
    save(Path(folder), 7, shards, world=SINGLE, extra={"iteration": 7})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    extra = load(Path(folder), shards, world=SINGLE)
    assert extra["iteration"] == 7
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
