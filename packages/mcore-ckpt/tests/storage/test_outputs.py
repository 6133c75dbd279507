"""Where commands write: one writer at a time, whole at once, garbage of the dead taken away."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from forks import exit_code, fork

from mcore_base.file_lock import Holder
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.storage.folder_lock import LOCK
from mcore_ckpt.storage.outputs import atomic_dir


def left_behind(output, holder=None):
    """Make what a killed process leaves; return its file."""
    room = output.with_name(f".{output.name}.partial")
    (room / "0123").mkdir(parents=True)
    (room / "0123" / "half").write_bytes(b"half")
    if holder:
        (room / LOCK).write_text(json.dumps(asdict(holder)))
    return room / "0123" / "half"


def make(output, meanwhile=None):
    with atomic_dir(output) as folder:
        (folder / "whole").write_bytes(b"whole")
        if meanwhile:
            meanwhile(folder)


def dead_holder():
    child = fork(lambda: None)
    exit_code(child)
    return replace(Holder.current(), token="another", pid=child)


def test_what_the_dead_left_is_removed_and_told(tmp_path, caplog):
    output = tmp_path / "out"
    holder = dead_holder()
    half = left_behind(output, holder)
    make(output)
    assert f"taking over the lock of dead {holder}\n" in caplog.text
    assert f"removing {half.parent} of a killed command" in caplog.text
    # Nothing is left beside the output, and nothing but what was written in it.
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "whole"]
    left_behind(tmp_path / "two")  # killed before it could say who it is
    make(tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "two"]


def test_what_the_living_write_stays_and_a_second_writer_is_refused(tmp_path):
    output = tmp_path / "out"
    half = left_behind(output, replace(Holder.current(), token="another"))
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* is writing to"):
        make(output)
    assert half.exists()


def test_a_writer_that_lost_its_place_makes_nothing_final_and_takes_nothing_away(tmp_path):
    room = tmp_path / ".out.partial"

    def lose(_):
        (room / LOCK).write_text(json.dumps({"host": "elsewhere", "pid": 1}))
        (room / "theirs").mkdir()

    with pytest.raises(CheckpointError, match="was lost: process 1 on elsewhere holds it now"):
        make(tmp_path / "out", lose)
    assert list(tmp_path.iterdir()) == [room]
    assert sorted(path.name for path in room.iterdir()) == [LOCK, "theirs"]


def test_an_empty_folder_behind_a_link_becomes_the_output(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with atomic_dir(tmp_path / "link") as folder:
        (folder / "x").write_text("here")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "x").read_text() == "here"


def test_a_folder_whose_place_cannot_be_taken_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(ValueError, match="the working directory of this command"),
        atomic_dir(Path()),
    ):
        pass
    with pytest.raises(ValueError, match="is not empty"), atomic_dir(Path("..")):
        pass
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    with pytest.raises(ValueError, match="a mount point"), atomic_dir(tmp_path / "disk"):
        pass


def test_an_output_that_came_into_being_meanwhile_is_not_replaced(tmp_path):
    output = tmp_path / "out"

    def come(_):
        output.mkdir()
        (output / "precious").write_bytes(b"")

    with pytest.raises(OSError, match="not empty"):
        make(output, come)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious"]
