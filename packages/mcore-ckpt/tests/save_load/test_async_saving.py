"""Saved in the background: what was there at the call, whole, or not at all."""

import errno
import logging
import os
import shutil
import threading
import time

import pytest
import torch
from forks import fork, kill
from warm_ranks import run_ranks

from mcore_ckpt.config import RetentionConfig
from mcore_ckpt.save_load.async_saving import AsyncSaver
from mcore_ckpt.save_load.loading import load, read_tensor
from mcore_ckpt.storage.folder_lock import LOCK
from mcore_ckpt.storage.paths import complete_steps, latest_step, resolve_folder, step_folder
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import Piece, Shard


def whole(data):
    zeros = (0,) * data.dim()
    return Shard(tuple(data.shape), data.dtype, (Piece(zeros, tuple(data.shape), data),))


def test_changes_after_the_call_are_not_saved(tmp_path):
    weight, turned = torch.ones(300, 7), torch.ones(7, 300, dtype=torch.bfloat16).t()
    saver = AsyncSaver(SINGLE)
    for step in (1, 2):
        saver.save(tmp_path, step, {"w": whole(weight), "t": whole(turned)}, extra={"n": step})
        weight += 1
        turned += 1
        assert saver.wait() == step_folder(tmp_path, step)
    for step in (1, 2):
        folder = resolve_folder(tmp_path, step)
        assert torch.all(read_tensor(folder, "w") == step)
        assert torch.all(read_tensor(folder, "t") == step)
    assert saver.last_durable == step_folder(tmp_path, 2)
    assert not (tmp_path / LOCK).exists()


def test_the_step_does_not_exist_before_it_is_polled(tmp_path):
    saver = AsyncSaver(SINGLE)
    saver.save(tmp_path, 1, {"w": whole(torch.ones(4))})
    assert latest_step(tmp_path) is None
    folder = None
    while folder is None:
        folder = saver.poll()
        time.sleep(0.001)
    assert folder == step_folder(tmp_path, 1)
    assert latest_step(tmp_path) == 1
    assert saver.poll() is None


def test_the_next_save_waits_for_the_one_before(tmp_path):
    saver = AsyncSaver(SINGLE)
    for step in range(1, 5):
        saver.save(tmp_path, step, {"w": whole(torch.full((50_000,), float(step)))})
    saver.wait()
    assert complete_steps(tmp_path) == [1, 2, 3, 4]
    assert torch.all(read_tensor(resolve_folder(tmp_path, 3), "w") == 3)


def test_a_write_that_fails_is_reported_tried_again_and_given_up(tmp_path, monkeypatch, caplog):
    really = os.fsync

    def full_at_step_2(file):
        if "iter_0000002" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        really(file)

    monkeypatch.setattr(os, "fsync", full_at_step_2)
    saver = AsyncSaver(SINGLE, retries=1)
    saver.save(tmp_path, 1, {"w": whole(torch.ones(4))})
    saver.wait()
    with caplog.at_level(logging.WARNING):
        saver.save(tmp_path, 2, {"w": whole(torch.ones(4))})
        assert saver.wait() is None
    assert "writing step 2 failed, trying again: rank 0: cannot write" in caplog.text
    assert "the disk or a quota is full" in caplog.text
    assert saver.last_failure.startswith("step 2 was not saved: rank 0: cannot write")
    assert latest_step(tmp_path) == 1
    saver.save(tmp_path, 3, {"w": whole(torch.ones(4))})
    assert saver.wait() == step_folder(tmp_path, 3)
    assert saver.last_failure == ""


def test_files_that_vanish_before_the_commit_are_missed(tmp_path, caplog):
    saver = AsyncSaver(SINGLE, retries=0)
    saver.save(tmp_path, 1, {"w": whole(torch.ones(4))})
    saver._pending.job.join(60.0)
    shutil.rmtree(step_folder(tmp_path, 1))
    assert saver.wait() is None
    assert "which rank 0 cannot see" in saver.last_failure
    assert latest_step(tmp_path) is None


def test_tensors_that_are_held_until_their_copies_are_made_may_be_saved_meanwhile(tmp_path):
    # Many and large enough that the copies take longer than it takes to call.
    weights = [torch.ones(1 << 17) for _ in range(20)]
    shards = {f"w{i}": whole(weight) for i, weight in enumerate(weights)}
    saver = AsyncSaver(SINGLE)
    for step in (1, 2, 3):
        assert saver.save(tmp_path, step, shards, overlap=True)
        saver.hold()
        torch._foreach_add_(weights, 1)
        assert saver.wait() == step_folder(tmp_path, step)
    for step in (1, 2, 3):
        folder = resolve_folder(tmp_path, step)
        assert all(torch.all(read_tensor(folder, name) == step) for name in shards)
    # One share, in one block, whatever the number of saves.
    assert saver.host_bytes == 1 << 26


def test_a_disk_that_hangs_is_told_and_training_goes_on(tmp_path, monkeypatch, caplog):
    is_back = threading.Event()
    really = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (is_back.wait(30), really(file))[1])
    saver = AsyncSaver(SINGLE, silent_s=0.05)
    with caplog.at_level(logging.ERROR):
        assert saver.save(tmp_path, 1, {"w": whole(torch.ones(4))})
        assert saver.wait() is None
        assert "ranks [0] have written nothing to" in caplog.text
        assert not saver.save(tmp_path, 2, {"w": whole(torch.ones(4))})
        assert "step 2 was skipped: an earlier write still hangs" in saver.last_failure
    is_back.set()
    while saver._hanging.is_busy:
        time.sleep(0.01)
    saver._silent_s = 60.0
    assert saver.save(tmp_path, 3, {"w": whole(torch.ones(4))})
    assert saver.wait() == step_folder(tmp_path, 3)
    assert complete_steps(tmp_path) == [3]


def test_a_save_that_is_closed_before_its_end_never_existed(tmp_path):
    saver = AsyncSaver(SINGLE)
    saver.save(tmp_path, 1, {"w": whole(torch.ones(1 << 20))})
    saver.close()
    assert latest_step(tmp_path) is None
    assert not (tmp_path / LOCK).exists()
    assert saver.poll() is None
    saver.save(tmp_path, 1, {"w": whole(torch.ones(4))})
    assert saver.wait() == step_folder(tmp_path, 1)


def test_steps_that_need_not_be_kept_go_once_a_newer_one_is_durable(tmp_path):
    saver = AsyncSaver(
        SINGLE, retention=RetentionConfig(save_retain_last=2, save_retain_interval=3)
    )
    for step in range(1, 7):
        saver.save(tmp_path, step, {"w": whole(torch.ones(4))})
        saver.wait()
    assert complete_steps(tmp_path) == [3, 5, 6]


def test_bad_shards_are_refused_at_the_call(tmp_path):
    saver = AsyncSaver(SINGLE)
    bad = Shard((4,), torch.float32, (Piece((0,), (3,), torch.ones(3)),))
    with pytest.raises(ValueError, match="w: 1 of 4 elements are in no box"):
        saver.save(tmp_path, 1, {"w": bad})
    assert not (tmp_path / LOCK).exists()
    saver.save(tmp_path, 1, {"w": whole(torch.ones(4))})
    saver.wait()


def test_ranks_commit_together_and_a_fault_of_one_is_known_to_all(tmp_path):
    found = run_ranks(save_on_ranks, 2, str(tmp_path))
    assert found[0] == found[1] == [True, False, True]
    assert complete_steps(tmp_path) == [1, 3]
    shard = {"w": whole(torch.zeros(8))}
    load(tmp_path, shard)
    assert torch.equal(shard["w"].pieces[0].data, torch.tensor([3.0] * 8))


def save_on_ranks(folder):
    ctx = ParallelContext.build(ParallelConfig())
    rank = ctx.world.rank
    saver, durable = AsyncSaver(ctx.world, retries=0), []
    for step in (1, 2, 3):
        rows = Piece((4 * rank,), (4,), torch.full((4,), float(step)))
        saver.save(folder, step, {"w": Shard((8,), torch.float32, (rows,))})
        job = saver._pending.job
        job.join(60.0)
        if step == 2 and rank == 1:
            job.failure = "the disk is gone"
        durable.append(saver.wait() is not None)
    ctx.destroy()
    return durable


@pytest.mark.parametrize(
    "attempt", [*range(3), *(pytest.param(n, marks=pytest.mark.crash) for n in range(3, 25))]
)
def test_a_kill_at_any_time_leaves_a_whole_checkpoint(tmp_path, attempt):
    def work():
        saver = AsyncSaver(SINGLE)
        for step in range(1, 10_000):
            saver.save(tmp_path, step, {"w": whole(torch.full((100_000,), float(step)))})
            saver.poll()

    child = fork(work)
    time.sleep(0.03 + 0.017 * attempt)
    kill(child)
    step = latest_step(tmp_path)
    if step is not None:
        assert torch.all(read_tensor(resolve_folder(tmp_path), "w") == step)
