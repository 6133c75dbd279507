"""Checkpoints on local disks: whole on all ranks or not there, copies on other hosts."""

import shutil
from pathlib import Path

import pytest
import torch
from warm_ranks import run_ranks

from mcore_ckpt.config import LocalConfig
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.save_load.loading import num_file_threads
from mcore_ckpt.save_load.local_saving import LocalSaver, _Files, _State
from mcore_ckpt.storage.index import INDEX
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import Piece, Shard


def config(folder, **changes):
    return LocalConfig(
        non_persistent_local_ckpt_dir=str(folder), non_persistent_save_interval=1, **changes
    )


def state(value, rank=0, cut=4):
    """Rows cut over ranks, in two pieces; what all hold; and nothing at all."""
    rows = torch.full((4, 3), float(value + rank))
    pieces = (
        Piece((4 * rank, 0), (cut, 3), rows[:cut]),
        Piece((4 * rank + cut, 0), (4 - cut, 3), rows[cut:]),
    )
    ids = torch.full((5,), value, dtype=torch.int64)
    return {
        "model.w": Shard((8, 3), rows.dtype, pieces),
        "rng.ids": Shard((5,), ids.dtype, (Piece((0,), (5,), ids),)),
    }


def assert_holds(shards, value, rank):
    assert all(torch.all(p.data == value + rank) for p in shards["model.w"].pieces)
    assert torch.all(shards["rng.ids"].pieces[0].data == value)


def test_options_go_together():
    for wrong, message in (
        ({"non_persistent_save_interval": 5}, "give both or none"),
        ({"non_persistent_local_ckpt_dir": "x"}, "give both or none"),
        ({"non_persistent_save_interval": -1}, "must be 0 or more"),
        ({"replication": True}, "--replication has no effect without"),
        ({"replication_jump": 8}, "has no effect without --replication"),
    ):
        with pytest.raises(ValueError, match=message):
            LocalConfig(**wrong)
    with pytest.raises(ValueError, match="needs --replication-jump"):
        config("x", replication=True)


def test_a_thread_for_each_core_reads_and_writes(monkeypatch):
    for num_cores, num_threads in {2: 4, 12: 12, 96: 16}.items():
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=num_cores: range(n))
        assert num_file_threads() == num_threads


def test_one_process_without_a_group_is_told_to_use_torchrun(tmp_path):
    with pytest.raises(ValueError, match="start with torchrun"):
        LocalSaver(config(tmp_path), SINGLE)


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path):
    said = run_ranks(make_without_the_package, 2, str(tmp_path))
    assert all("nvidia-resiliency-ext" in text for text in said)
    assert all("install mcore-ckpt[resiliency]" in text for text in said)


def make_without_the_package(folder):
    import sys

    name = "nvidia_resiliency_ext"
    held = {key: sys.modules.pop(key) for key in list(sys.modules) if key.startswith(name)}
    sys.modules[name] = None
    ctx = ParallelContext.build(ParallelConfig())
    try:
        with pytest.raises(ValueError, match="local checkpoints need") as caught:
            LocalSaver(config(folder), ctx.world)
    finally:
        del sys.modules[name]
        sys.modules.update(held)
        ctx.destroy()
    return str(caught.value)


def test_ranks_that_cannot_keep_copies_are_told_the_number(tmp_path):
    said = run_ranks(make_with_odd_copies, 2, str(tmp_path))
    assert all("must be a multiple of 4" in text for text in said)


def make_with_odd_copies(folder):
    ctx = ParallelContext.build(ParallelConfig())
    with pytest.raises(ValueError, match="2 ranks cannot keep copies") as caught:
        LocalSaver(config(folder, replication=True, replication_jump=2), ctx.world)
    ctx.destroy()
    return str(caught.value)


def test_a_ranks_own_part_of_a_tensor_can_be_read_again(tmp_path):
    part = torch.arange(6.0).view(2, 3)
    files = _Files(tmp_path, 1)
    files.write(
        _State([("w", (4, 3), "torch.float32", (2, 0), (2, 3))], [part], {"n": 4}), 4, 1
    )
    assert files.failures == []
    again = files.read(4, 1)
    assert (again.keys[0][1], again.extra) == ((4, 3), {"n": 4})
    assert torch.equal(next(again.tensors), part)


def test_every_copy_that_cannot_be_written_is_reported(tmp_path):
    files = _Files(tmp_path, 0)
    for owner in (0, 1):
        files.where(4, owner).write_bytes(b"")  # a file where the copy's folder belongs
        files.write(_State([], [], {}), 4, owner)
    assert ["of_00000" in files.failures[0], "of_00001" in files.failures[1]] == [True, True]


def test_the_newest_step_that_is_whole_comes_back_and_older_ones_go(tmp_path):
    pytest.importorskip("nvidia_resiliency_ext")
    run_ranks(save_fail_and_load, 2, str(tmp_path))


def save_fail_and_load(folder):
    ctx = ParallelContext.build(ParallelConfig())
    rank, world = ctx.world.rank, ctx.world
    saver = LocalSaver(config(folder), world)
    assert saver.latest() is None
    with pytest.raises(ValueError, match="holds no local checkpoint that is complete on all"):
        saver.load(state(0, rank))
    saver.save(3, state(30, rank), {"iteration": 3})
    saver.save(5, state(50, rank), {"iteration": 5})
    mine = Path(folder) / f"rank_{rank:05d}"
    assert [path.name for path in mine.iterdir()] == [f"iter_0000005_of_{rank:05d}"]
    with pytest.raises(ValueError, match="local step 5 exists: step 5 is not newer"):
        saver.save(5, state(0, rank))
    # A new process finds it; a rank that cannot write makes the step void on all.
    again = LocalSaver(config(folder), world)
    assert again.latest() == 5
    if rank == 1:
        again._files.folder.rename(f"{again._files.folder}.away")
        again._files.folder.write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"local step 7 was not saved: rank 1: .*directory"):
        again.save(7, state(70, rank))
    if rank == 1:
        again._files.folder.unlink()
        Path(f"{again._files.folder}.away").rename(again._files.folder)
    shards = state(0, rank)
    third = LocalSaver(config(folder), world)
    assert third.load(shards) == {"iteration": 5}
    assert_holds(shards, 50, rank)
    # Other pieces are another layout, and nothing is cut anew.
    with pytest.raises(ValueError, match=r"another layout|ranks failed"):
        third.load(state(0, rank, cut=2))
    (mine / f"iter_0000005_of_{rank:05d}" / INDEX).unlink()
    assert LocalSaver(config(folder), world).latest() is None
    ctx.destroy()


def test_copies_of_a_lost_host_make_the_step_whole(tmp_path):
    pytest.importorskip("nvidia_resiliency_ext")
    run_ranks(save_copies_and_lose_a_host, 2, str(tmp_path))


def save_copies_and_lose_a_host(folder):
    ctx = ParallelContext.build(ParallelConfig())
    rank, world = ctx.world.rank, ctx.world
    options = config(folder, replication=True, replication_jump=1)
    LocalSaver(options, world).save(4, state(40, rank), {"iteration": 4})
    mine = Path(folder) / f"rank_{rank:05d}"
    assert len(list(mine.glob(f"*/{INDEX}"))) == 2
    other = LocalSaver(options, world)._files.read(4, 1 - rank)
    assert other.extra == {"iteration": 4}
    assert all(torch.all(t == 40 + 1 - rank) for t in list(other.tensors)[:2])
    if rank == 0:
        shutil.rmtree(mine)
    # Its pieces are still on the other's disk; without copies they would be gone.
    saver = LocalSaver(options, world)
    assert saver.latest() == 4
    shards = state(0, rank)
    assert saver.load(shards) == {"iteration": 4}
    assert_holds(shards, 40, rank)
    # Both ranks save the next, and both have both again.
    saver.save(6, state(60, rank), {"iteration": 6})
    assert len(list(mine.glob(f"iter_0000006*/{INDEX}"))) == 2
    shutil.rmtree(mine / f"iter_0000006_of_{rank:05d}")
    third = LocalSaver(options, world)
    assert third.load(shards) == {"iteration": 6}
    assert_holds(shards, 60, rank)
    # A copy that is damaged is told on all ranks, and nothing is filled by halves.
    if rank == 0:
        damaged = mine / "iter_0000006_of_00001" / "pieces-0.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pieces-0\.safetensors is damaged: the check"):
        LocalSaver(options, world).load(shards)
    assert_holds(shards, 60, rank)
    shutil.rmtree(mine)
    assert LocalSaver(config(folder), world).latest() is None
    ctx.destroy()
