"""What goes along with a step is looked at before anything is written, on all ranks."""

from pathlib import Path

import pytest
import torch
from warm_ranks import run_ranks

from mcore_ckpt.save_load.async_saving import AsyncSaver
from mcore_ckpt.save_load.loading import load
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.paths import latest_step, step_folder
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import Piece, Shard


def weights(value=1.0):
    data = torch.full((4,), value)
    return {"w": Shard((4,), data.dtype, (Piece((0,), (4,), data),))}


@pytest.mark.parametrize(
    ("along", "message"),
    [
        ({"extra": {"loss": torch.ones(1)}}, "extra must be JSON"),
        ({"files": {"rank_00000.safetensors": b""}}, "has a file of that name"),
        ({"files": {"index.json": b""}}, "has a file of that name"),
        ({"files": {"a/b.txt": b""}}, "use a name without folders"),
        ({"files": {"../b.txt": b""}}, "use a name without folders"),
        ({"files": {"": b""}}, "use a name without folders"),
        (
            {"folders": {"tok": Path("/nowhere")}},
            "/nowhere, to be saved as tok, is not a folder",
        ),
        ({"files": {"a": b""}, "folders": {"a": Path("/")}}, "has a file of that name"),
    ],
)
def test_what_cannot_go_along_is_refused_before_anything_is_written(tmp_path, along, message):
    save(tmp_path, 1, weights(), world=SINGLE)
    with pytest.raises(ValueError, match=message):
        save(tmp_path, 2, weights(), world=SINGLE, **along)
    saver = AsyncSaver(SINGLE)
    with pytest.raises(ValueError, match=message):
        saver.save(tmp_path, 2, weights(), **along)
    assert not saver.is_under_way
    assert latest_step(tmp_path) == 1
    assert not step_folder(tmp_path, 2).exists()


def test_json_is_saved_as_it_was_at_the_call(tmp_path):
    extra = {"schedule": {"step": 1}, "files": [1]}
    saver = AsyncSaver(SINGLE)
    saver.save(tmp_path, 1, weights(), extra=extra)
    extra["schedule"]["step"] = 2
    extra["files"].append(2)
    saver.wait()
    assert load(tmp_path, weights()) == {"schedule": {"step": 1}, "files": [1]}


def test_only_what_rank_0_brings_counts_and_its_fault_is_known_to_all(tmp_path):
    run_ranks(bring, 2, str(tmp_path))


def bring(folder):
    ctx = ParallelContext.build(ParallelConfig())
    data = weights()["w"].pieces[0]
    shards = {"w": Shard((4,), data.data.dtype, (data,), (ctx.world,))}
    rank = ctx.world.rank
    save(folder, 1, shards, world=ctx.world, extra={"a": object()} if rank else {"a": 1})
    with pytest.raises(ValueError, match="extra must be JSON"):
        save(folder, 2, shards, world=ctx.world, extra={} if rank else {"a": object()})
    assert load(folder, shards, world=ctx.world) == {"a": 1}
    ctx.destroy()
