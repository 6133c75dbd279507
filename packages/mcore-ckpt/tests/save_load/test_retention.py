"""What is kept and what goes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.config import RetentionConfig
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.save_load.retention import dispensable, prune
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.paths import TRACKER, complete_steps, remove_steps, step_folder
from mcore_parallel.mesh import SINGLE
from mcore_parallel.sharding import Piece, Shard


def save_step(folder, step):
    piece = Piece((0,), (3,), torch.ones(3))
    save(folder, step, {"w": Shard((3,), torch.float32, (piece,))}, world=SINGLE)


def test_the_newest_and_the_multiples_stay(tmp_path):
    for step in (10, 20, 25, 30, 40):
        save_step(tmp_path, step)
    config = RetentionConfig(save_retain_last=2, save_retain_interval=20)
    assert prune(tmp_path, config) == [10, 25]
    assert complete_steps(tmp_path) == [20, 30, 40]
    assert not step_folder(tmp_path, 10).exists()


def test_a_step_that_cannot_be_deleted_is_a_warning_with_its_folder(tmp_path, caplog):
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    folder = step_folder(tmp_path, 1)
    target = folder.rename(tmp_path / "other_disk")
    folder.symlink_to(target)  # rmtree refuses a link
    assert prune(tmp_path, RetentionConfig(save_retain_last=1)) == [1, 2]
    assert complete_steps(tmp_path) == [3]
    assert f"{folder} could not be deleted completely, delete it by hand: " in caplog.text


def test_a_run_folder_is_emptied_of_its_steps_and_keeps_what_else_it_holds(tmp_path):
    for step in (1, 2):
        save_step(tmp_path, step)
    (tmp_path / "notes.txt").write_text("mine")
    foreign = step_folder(tmp_path, 3) / "mp_rank_00"
    foreign.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="a checkpoint of another program"):
        remove_steps(tmp_path)
    assert complete_steps(tmp_path) == [1, 2]
    foreign.rmdir()
    remove_steps(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_all_stay_by_default_but_garbage_goes(tmp_path):
    save_step(tmp_path, 1)
    stale = tmp_path / f".{TRACKER}.4711"  # of a process that was killed before the rename
    stale.write_text("1")
    for step in (2, 9):
        step_folder(tmp_path, step).mkdir()
        (step_folder(tmp_path, step) / "rank_00000.safetensors").write_bytes(b"half")
    save_step(tmp_path, 5)
    assert prune(tmp_path, RetentionConfig()) == []
    assert complete_steps(tmp_path) == [1, 5]
    assert not stale.exists()
    assert not step_folder(tmp_path, 2).exists()
    # Newer than the latest: someone may be writing it.
    assert step_folder(tmp_path, 9).exists()


def test_nothing_goes_while_the_pointer_names_no_whole_step(tmp_path):
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    (tmp_path / TRACKER).write_text("7")
    assert prune(tmp_path, RetentionConfig(save_retain_last=1)) == []
    assert complete_steps(tmp_path) == [1, 2, 3]


@given(
    st.lists(st.integers(0, 60), unique=True, min_size=1),
    st.integers(0, 5),
    st.integers(0, 7),
)
def test_the_latest_and_the_newest_are_never_dispensable(steps, last, every):
    latest = sorted(steps)[len(steps) // 2]
    config = RetentionConfig(save_retain_last=last, save_retain_interval=every if last else 0)
    gone = dispensable(steps, latest, config)
    assert latest not in gone
    assert all(step < latest for step in gone)
    kept = sorted(step for step in steps if step <= latest and step not in gone)
    assert kept[-last:] == sorted(step for step in steps if step <= latest)[-last:]
    assert not any(every and step % every == 0 for step in gone)


def test_a_config_that_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match="--save-retain-interval 5 has no effect without"):
        RetentionConfig(save_retain_interval=5)
    with pytest.raises(ValueError, match="--save-retain-last -1 must be 0 or more"):
        RetentionConfig(save_retain_last=-1)
