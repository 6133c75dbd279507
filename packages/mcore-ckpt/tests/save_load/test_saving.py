"""What a save promises: exact cover or an error, whole or not at all, one writer."""

import errno
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forks import exit_code, fork, kill
from safetensors.torch import load_file
from warm_ranks import run_ranks

from mcore_base.file_lock import Holder
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.save_load import plan_cache
from mcore_ckpt.save_load.claims import build_claim, build_claims
from mcore_ckpt.save_load.loading import load, read_tensor
from mcore_ckpt.save_load.plan_cache import PlanCache
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.files import memory
from mcore_ckpt.storage.folder_lock import LOCK, FolderLock
from mcore_ckpt.storage.index import read_index
from mcore_ckpt.storage.paths import (
    TRACKER,
    complete_steps,
    latest_step,
    resolve_folder,
    step_folder,
)
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import Piece, Shard


def whole(data, **fields):
    zeros = (0,) * data.dim()
    return Shard(
        tuple(data.shape), data.dtype, (Piece(zeros, tuple(data.shape), data),), **fields
    )


def state(value, numel=1000):
    return {
        "model.w": whole(torch.full((numel // 10, 10), float(value))),
        "optimizer.exp_avg.w": whole(torch.full((numel // 10, 10), value + 0.5)),
    }


def assert_holds(folder, value):
    wanted = state(value)
    shards = state(-1)
    load(folder, shards)
    for name, shard in wanted.items():
        assert torch.equal(shards[name].pieces[0].data, shard.pieces[0].data)


def test_one_rank_needs_no_process_group_and_no_pickle(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert not dist.is_initialized()
    folder = save(tmp_path, 100, state(3), world=SINGLE, extra={"iteration": 100})
    assert folder == tmp_path / "iter_0000100"
    assert (tmp_path / TRACKER).read_text() == "100"
    shards = state(-1)
    assert load(tmp_path, shards) == {"iteration": 100}
    assert_holds(folder, 3)


def test_many_ranks_use_no_pickle_either(tmp_path):
    run_ranks(save_without_pickle, 2, str(tmp_path))
    assert_holds(tmp_path, 5)


def save_without_pickle(folder):
    def refuse(*_args, **_kwargs):
        raise AssertionError("pickle was used")

    kept = {name: getattr(pickle, name) for name in ("dump", "dumps", "load", "loads")}
    ctx = ParallelContext.build(_config())
    for name in kept:
        setattr(pickle, name, refuse)
    try:
        save(folder, 1, state(5), world=ctx.world)
        load(folder, state(0), world=ctx.world)
    finally:
        for name, function in kept.items():
            setattr(pickle, name, function)
    ctx.destroy()


def _config(**degrees):
    from mcore_parallel.config import ParallelConfig

    return ParallelConfig(**degrees)


def test_other_programs_can_read_the_files(tmp_path):
    data = torch.arange(12.0).view(3, 4)
    pieces = (Piece((0, 0), (3, 1), data[:, :1]), Piece((0, 1), (3, 3), data[:, 1:]))
    shard = Shard((3, 4), data.dtype, pieces)
    folder = save(tmp_path, 1, {"a": shard, "b": whole(torch.tensor(7))}, world=SINGLE)
    tensors = load_file(folder / "rank_00000.safetensors")
    assert torch.equal(tensors["a[0:3,1:4]"], data[:, 1:])
    assert tensors["b"] == 7
    table = json.loads((folder / "index.json").read_text())
    assert table["format"] == "mcore"
    assert table["tensors"]["a"][:2] == ["F32", [3, 4]]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e5m2),
    ],
)
def test_every_dtype_and_odd_shapes_come_back(tmp_path, dtype):
    raw = torch.randint(0, 2, (3, 5, 2), generator=torch.Generator().manual_seed(0))
    tensors = {
        "cube": raw.to(dtype),
        "strided": raw.to(dtype).transpose(0, 2),
        "scalar": raw[0, 0, 0].to(dtype),
        "empty": raw.to(dtype)[:0],
    }
    folder = save(tmp_path, 1, {n: whole(t) for n, t in tensors.items()}, world=SINGLE)
    for name, tensor in tensors.items():
        found = read_tensor(folder, name)
        assert found.dtype == dtype
        assert bytes(memory(found)) == bytes(memory(tensor.contiguous())), name


def test_tensors_larger_than_a_block_and_pieces_that_do_not_lie_in_order(tmp_path, monkeypatch):
    # Blocks of 64 bytes, so that everything is cut.
    for module in ("index", "files"):
        monkeypatch.setattr(f"mcore_ckpt.storage.{module}.BLOCK_BYTES", 64)
    monkeypatch.setattr("mcore_ckpt.storage.files.SLAB_BYTES", 256)
    data = torch.randn(37, 29)
    shards = {
        "rows": whole(data),
        "turned": whole(data.t()),
        "cut": Shard(
            (37, 29),
            data.dtype,
            (Piece((0, 0), (37, 11), data[:, :11]), Piece((0, 11), (37, 18), data[:, 11:])),
        ),
    }
    save(tmp_path, 1, shards, world=SINGLE)
    for rows, columns in ((slice(3, 30), slice(5, 20)), (slice(0, 37), slice(10, 12))):
        for name, true in (("rows", data), ("turned", data.t()), ("cut", data)):
            box = true[rows.start : rows.stop, columns.start : columns.stop]
            if 0 in box.shape:
                continue
            target = torch.zeros(box.shape[::-1]).t()
            piece = Piece((rows.start, columns.start), tuple(box.shape), target)
            load(
                tmp_path,
                {name: Shard(tuple(true.shape), true.dtype, (piece,))},
                ignore=("rows", "turned", "cut"),
            )
            assert torch.equal(target, box)


def test_files_and_folders_go_along(tmp_path):
    (tmp_path / "tok" / "deep").mkdir(parents=True)
    (tmp_path / "tok" / "deep" / "vocab.json").write_text("{}")
    folder = save(
        tmp_path / "run",
        1,
        state(1),
        world=SINGLE,
        files={"recipe.toml": b"a = 1\n"},
        folders={"tokenizer": tmp_path / "tok"},
    )
    assert (folder / "recipe.toml").read_bytes() == b"a = 1\n"
    assert (folder / "tokenizer" / "deep" / "vocab.json").read_text() == "{}"


def test_a_hole_is_an_error_that_names_the_tensor(tmp_path):
    data = torch.zeros(4, 3)
    shard = Shard((4, 4), data.dtype, (Piece((0, 0), (4, 3), data),))
    with pytest.raises(ValueError, match=r"model.w: 4 of 16 elements are in no box"):
        save(tmp_path, 1, {"model.w": shard}, world=SINGLE)
    assert latest_step(tmp_path) is None


def test_overlap_bounds_and_wrong_memory_are_errors_that_name_the_tensor(tmp_path):
    data = torch.zeros(3, 4)
    both = (Piece((0, 0), (3, 4), data), Piece((1, 0), (3, 4), data))
    with pytest.raises(ValueError, match=r"w: boxes \[0:3, 0:4\] and \[1:4, 0:4\] overlap"):
        save(tmp_path, 1, {"w": Shard((4, 4), data.dtype, both)}, world=SINGLE)
    with pytest.raises(ValueError, match=r"w: box \[1:4, 0:4\] is not inside \(3, 4\)"):
        save(tmp_path, 1, {"w": Shard((3, 4), data.dtype, both[1:])}, world=SINGLE)
    bad = (Piece((0, 0), (3, 5), data),)
    with pytest.raises(ValueError, match=r"w: a piece of lengths \(3, 5\) has memory of shape"):
        save(tmp_path, 1, {"w": Shard((3, 5), data.dtype, bad)}, world=SINGLE)
    with pytest.raises(
        ValueError, match=r"w: a torch.int64 shard has a piece of torch.float32"
    ):
        save(tmp_path, 1, {"w": Shard((3, 4), torch.int64, both[:1])}, world=SINGLE)


@pytest.mark.parametrize("call", [partial(save, step=2, world=SINGLE), load])
def test_memory_that_holds_no_numbers_is_refused(tmp_path, call):
    save(tmp_path, 1, {"w": whole(torch.ones(3))}, world=SINGLE)
    with pytest.raises(ValueError, match=r"w is on the meta device.*to_empty"):
        call(tmp_path, shards={"w": whole(torch.ones(3, device="meta"))})
    with pytest.raises(ValueError, match=r"w: torch.sparse_coo tensors cannot be saved"):
        call(tmp_path, shards={"w": whole(torch.ones(3).to_sparse())})
    with pytest.raises(ValueError, match=r"w is a conjugate or negative view.*resolve_conj"):
        call(tmp_path, shards={"w": whole(torch.ones(3, dtype=torch.complex64).conj())})
    with pytest.raises(ValueError, match=r"__metadata__ is reserved by safetensors files"):
        call(tmp_path, shards={"__metadata__": whole(torch.ones(3))})
    assert [entry.name for entry in tmp_path.glob("iter_*")] == ["iter_0000001"]


def test_shards_taken_for_replicas_leave_a_hole_that_is_found(tmp_path):
    # Experts 0 and 1 on two ranks, wrongly marked as copies of one another.
    with pytest.raises(RuntimeError, match="w: 8 of 16 elements are in no box"):
        run_ranks(save_wrong_replicas, 2, str(tmp_path))


def save_wrong_replicas(folder):
    ctx = ParallelContext.build(_config())
    rows = Piece((2 * ctx.world.rank, 0), (2, 4), torch.zeros(2, 4))
    shard = Shard((4, 4), torch.float32, (rows,), (ctx.world,))
    save(folder, 1, {"w": shard}, world=ctx.world)


def test_copies_that_are_cut_otherwise_are_not_written(tmp_path):
    # As a tied embedding under a sharded optimizer: each stage has buckets of its own.
    run_ranks(save_uneven_copies, 2, str(tmp_path))
    assert torch.equal(read_tensor(resolve_folder(tmp_path), "w"), torch.arange(8.0))
    assert len(read_index(resolve_folder(tmp_path)).tensors["w"].chunks) == 2


def save_uneven_copies(folder):
    ctx = ParallelContext.build(_config(pipeline_model_parallel_size=2))
    data = torch.arange(8.0)
    cuts = ((0, 5), (5, 8)) if ctx.pp.rank == 0 else ((0, 2), (2, 8))
    pieces = tuple(Piece((a,), (b - a,), data[a:b]) for a, b in cuts)
    shard = Shard((8,), data.dtype, pieces, (ctx.embedding_ends,))
    save(folder, 1, {"w": shard}, world=ctx.world)


def test_a_shape_or_dtype_that_differs_between_ranks_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"w: F32 \[2\] on rank 0, F32 \[3\] on rank 1"):
        run_ranks(save_unequal, 2, str(tmp_path))


def save_unequal(folder):
    ctx = ParallelContext.build(_config())
    save(folder, 1, {"w": whole(torch.zeros(2 + ctx.world.rank))}, world=ctx.world)


def test_a_fault_of_one_rank_is_raised_on_all_and_nothing_is_saved(tmp_path):
    said = run_ranks(save_with_a_bad_rank, 2, str(tmp_path))
    assert "has memory of shape (3, 2)" in said[1]
    assert "1 of 2 ranks failed:\nrank 1: w: a piece" in said[0]
    assert latest_step(tmp_path) is None


def save_with_a_bad_rank(folder):
    ctx = ParallelContext.build(_config())
    rank = ctx.world.rank
    piece = Piece((2 * rank, 0), (2, 2), torch.zeros(2 + rank, 2))
    try:
        save(folder, 1, {"w": Shard((4, 2), torch.float32, (piece,))}, world=ctx.world)
    except ValueError as error:
        ctx.destroy()
        return str(error)
    raise AssertionError("no error")


def test_a_complete_step_is_refused_and_replaced_only_when_asked(tmp_path):
    save(tmp_path, 4, state(1), world=SINGLE)
    with pytest.raises(RuntimeError, match="already holds a complete checkpoint"):
        save(tmp_path, 4, state(2), world=SINGLE)
    assert_holds(tmp_path, 1)
    folder = save(tmp_path, 4, state(2), world=SINGLE, replace=True)
    assert_holds(tmp_path, 2)
    assert [path.name for path in tmp_path.glob("iter_*")] == [folder.name]


def test_garbage_of_an_interrupted_save_is_replaced(tmp_path):
    garbage = step_folder(tmp_path, 4)
    garbage.mkdir()
    (garbage / "rank_00000.safetensors").write_bytes(b"half")
    (garbage / "rank_00007.safetensors").write_bytes(b"half")
    save(tmp_path, 4, state(1), world=SINGLE)
    assert_holds(tmp_path, 1)
    assert not (garbage / "rank_00007.safetensors").exists()


def test_garbage_goes_only_once_the_new_step_is_durable(tmp_path, monkeypatch):
    save(tmp_path, 1, state(1), world=SINGLE)
    garbage = step_folder(tmp_path, 4)
    garbage.mkdir()
    (garbage / "rank_00007.safetensors").write_bytes(b"half")
    really = os.fsync

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeError, match="the disk or a quota is full"):
        save(tmp_path, 4, state(4), world=SINGLE)
    assert len(list(tmp_path.rglob("rank_00007.safetensors"))) == 1
    assert_holds(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", really)
    save(tmp_path, 4, state(4), world=SINGLE)
    assert_holds(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [
        "iter_0000001",
        "iter_0000004",
    ]
    assert not list(tmp_path.rglob("rank_00007.safetensors"))


def test_a_job_that_lost_its_lock_makes_nothing_final(tmp_path):
    save(tmp_path, 1, state(1), world=SINGLE)
    lock = FolderLock(tmp_path)
    lock.acquire()
    other = replace(Holder.current(), token="another", host="elsewhere")
    (tmp_path / LOCK).write_text(json.dumps(asdict(other)))
    with pytest.raises(RuntimeError, match=r"was lost: process \d+ on elsewhere holds it now"):
        lock.check()
    with pytest.raises(RuntimeError, match=r"process \d+ on elsewhere is writing"):
        save(tmp_path, 2, state(2), world=SINGLE)
    lock.release()
    # What another took is not given back in its name.
    assert (tmp_path / LOCK).exists()
    assert latest_step(tmp_path) == 1


def test_a_world_that_saves_again_plans_once_and_anew_when_it_changes(tmp_path):
    plans = PlanCache()
    save(tmp_path, 1, state(1), world=SINGLE, plans=plans)
    first = plans.plan(build_claims(state(1)), SINGLE)
    save(tmp_path, 2, state(2), world=SINGLE, plans=plans)
    assert plans.plan(build_claims(state(2)), SINGLE) is first
    save(tmp_path, 3, state(3, 500), world=SINGLE, plans=plans)
    assert plans.plan(build_claims(state(3, 500)), SINGLE) is not first
    assert_holds(resolve_folder(tmp_path, 2), 2)
    assert read_tensor(resolve_folder(tmp_path), "model.w").shape == (50, 10)


def test_shards_of_the_save_before_are_not_described_again(tmp_path, monkeypatch):
    described = []

    def describe(name, shard):
        described.append(name)
        return build_claim(name, shard)

    monkeypatch.setattr(plan_cache, "build_claim", describe)
    plans, shards = PlanCache(), state(1)
    save(tmp_path, 1, shards, world=SINGLE, plans=plans)
    assert sorted(described) == sorted(shards)
    described.clear()
    shards["model.w"].pieces[0].data.fill_(7)
    other = next(name for name in shards if name != "model.w")
    save(tmp_path, 2, shards | {other: state(1)[other]}, world=SINGLE, plans=plans)
    assert described == [other]
    assert (read_tensor(resolve_folder(tmp_path), "model.w") == 7).all()
    shards["model.w"].pieces[0].data.data = torch.zeros(3)
    with pytest.raises(ValueError, match="has memory of shape"):
        save(tmp_path, 3, shards, world=SINGLE, plans=plans)
    assert latest_step(tmp_path) == 2


AT_ALL_OR_SOME = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.crash)])


def dies_at(event_number, folder, work):
    """Fork, and kill the child at its n-th file operation below a folder; say if it died."""
    seen = 0

    def count(event, arguments):
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"):
            seen += str(folder) in str(arguments[0])
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    def watched():
        sys.addaudithook(count)
        work()

    code = exit_code(fork(watched))
    assert code in {0, -signal.SIGKILL}
    return code != 0


@AT_ALL_OR_SOME
def test_a_kill_at_every_file_operation_leaves_a_whole_checkpoint(tmp_path, every):
    point = 0
    died = True
    while died:
        point += every
        run = tmp_path / str(point)
        save(run, 1, state(1), world=SINGLE)
        died = dies_at(point, run, lambda run=run: save(run, 2, state(2), world=SINGLE))
        assert_holds(run, latest_step(run))
        # The dead holder's lock is taken over and the garbage replaced.
        save(run, 3, state(3), world=SINGLE)
        assert_holds(run, 3)
    assert point > 8
    assert latest_step(run) == 3


@AT_ALL_OR_SOME
def test_a_kill_at_every_file_operation_of_a_replacement_leaves_one_of_the_two(tmp_path, every):
    point = 0
    died = True
    values = set()
    while died:
        point += every
        run = tmp_path / str(point)
        save(run, 1, state(1), world=SINGLE)
        died = dies_at(
            point, run, lambda run=run: save(run, 1, state(2), world=SINGLE, replace=True)
        )
        shards = state(-1)
        load(run, shards)
        values.add(shards["model.w"].pieces[0].data[0, 0].item())
        assert_holds(run, int(shards["model.w"].pieces[0].data[0, 0]))
        save(run, 1, state(3), world=SINGLE, replace=True)
        assert_holds(run, 3)
    assert values == {1.0, 2.0}


def kill_after(delay_s, run):
    def work():
        for step in range(2, 10_000):
            save(run, step, state(step, 200_000), world=SINGLE)

    child = fork(work)
    time.sleep(delay_s)
    kill(child)


@pytest.mark.parametrize(
    "attempt", [0, 4, *(pytest.param(n, marks=pytest.mark.crash) for n in range(5, 50))]
)
def test_a_kill_at_any_time_leaves_a_whole_checkpoint(tmp_path, attempt):
    save(tmp_path, 1, state(1, 200_000), world=SINGLE)
    kill_after(0.02 + 0.0137 * attempt, tmp_path)
    step = latest_step(tmp_path)
    shards = state(-1, 200_000)
    load(tmp_path, shards)
    assert torch.all(shards["model.w"].pieces[0].data == step)
    save(tmp_path, step + 5, state(7, 200_000), world=SINGLE)


def test_a_full_disk_is_an_error_and_leaves_the_last_checkpoint(tmp_path):
    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.dont_write_bytecode = True  # it would be cut short
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(RuntimeError, match="the disk or a quota is full"):
            save(tmp_path, 2, state(2, 100_000), world=SINGLE)

    save(tmp_path, 1, state(1), world=SINGLE)
    assert exit_code(fork(fill)) == 0
    assert complete_steps(tmp_path) == [1]
    assert not list(step_folder(tmp_path, 2).glob("*.safetensors"))
    assert_holds(tmp_path, 1)


def test_a_second_job_is_refused_while_the_first_writes(tmp_path):
    code = (
        "import sys, time; from mcore_ckpt.storage.folder_lock import FolderLock\n"
        "with FolderLock(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        message = f"process {holder.pid} on {socket.gethostname()} is writing to"
        with pytest.raises(RuntimeError, match=message):
            save(tmp_path, 1, state(1), world=SINGLE)
    finally:
        holder.kill()
        holder.communicate()
    # Its process is dead: the lock is taken over at once.
    save(tmp_path, 1, state(1), world=SINGLE)
    assert not (tmp_path / LOCK).exists()


def test_a_job_that_holds_the_lock_saves_under_it(tmp_path):
    with FolderLock(tmp_path):
        save(tmp_path, 1, state(1), world=SINGLE)
        save(tmp_path, 2, state(2), world=SINGLE)
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()


def test_ranks_that_do_not_see_one_folder_are_told_so(tmp_path):
    with pytest.raises(RuntimeError, match="must be shared by all hosts"):
        run_ranks(save_to_two_folders, 2, str(tmp_path))


def save_to_two_folders(folder):
    ctx = ParallelContext.build(_config())
    # One relative path, another folder on each rank, as with disks that are not shared.
    mine = Path(folder) / str(ctx.world.rank)
    step_folder(mine / "run", 1).mkdir(parents=True)
    before = Path.cwd()
    os.chdir(mine)
    rows = Piece((2 * ctx.world.rank, 0), (2, 4), torch.zeros(2, 4))
    try:
        save("run", 1, {"w": Shard((4, 4), torch.float32, (rows,))}, world=ctx.world)
    finally:
        os.chdir(before)


def test_steps_are_numbers_or_release(tmp_path):
    for step in (-1, "1", "latest", True):
        with pytest.raises(ValueError, match="must be a number from 0, or 'release'"):
            save(tmp_path, step, state(1), world=SINGLE)


@pytest.mark.parametrize("place", ["/proc/none/run", "{file}/run"])
def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path, place):
    (tmp_path / "file").write_text("")
    folder = place.format(file=tmp_path / "file")
    with pytest.raises(CheckpointError, match=f"cannot write {folder}"):
        save(folder, 1, {}, world=SINGLE)
