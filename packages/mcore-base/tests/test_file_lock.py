"""One writer at a time, whatever host names, process numbers and clocks two hosts share."""

import errno
import json
import os
import threading
import time
from dataclasses import asdict, replace

import pytest
from forks import exit_code, fork, kill

from mcore_base import file_lock
from mcore_base.file_lock import FileLock, Holder, LockHeldError


def container():
    """Same host name and process number as this process, in another container."""
    return replace(Holder.current(), token="another", namespace="kernel/pid:[2]")


def write(path, holder, age_s=0.0):
    path.write_text(json.dumps(asdict(holder)))
    now = time.time()
    os.utime(path, (now - age_s, now - age_s))


@pytest.mark.parametrize("age_s", [0.0, 130.0, -130.0], ids=["equal", "behind", "ahead"])
def test_a_container_of_the_same_name_and_number_holds_its_lock_under_any_clock(
    tmp_path, age_s
):
    path = tmp_path / "lock"
    write(path, container(), age_s)
    end = threading.Event()

    def beat():
        while not end.wait(0.02):
            os.utime(path, (time.time() - age_s,) * 2)

    threading.Thread(target=beat).start()
    try:
        with pytest.raises(LockHeldError, match=rf"process {os.getpid()} on .* is writing to"):
            FileLock(path, silent_s=5.0).acquire()
    finally:
        end.set()
    assert json.loads(path.read_text())["token"] == "another"


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"pid": 1, "host": "elsewhere"}', None, "\xff\xfe"]
)
def test_a_holder_that_gives_no_sign_of_life_is_dead_and_so_is_one_that_cannot_be_read(
    tmp_path, content, caplog
):
    path = tmp_path / "lock"
    write(path, container(), age_s=-130.0)
    if content is not None:
        path.write_text(content, encoding="latin-1")
    began_s = time.monotonic()
    with FileLock(path, silent_s=0.2):
        assert time.monotonic() - began_s >= 0.2
        assert json.loads(path.read_text()) == asdict(Holder.current())
    assert "cannot see whether it is alive" in caplog.text
    assert "taking over the lock of dead process" in caplog.text
    assert not list(tmp_path.iterdir())


def hold(path, is_ready):
    lock = FileLock(path)
    lock.acquire()
    is_ready.touch()
    time.sleep(60)


def test_a_holder_in_the_same_namespace_is_looked_up_without_waiting(tmp_path):
    path, is_ready = tmp_path / "lock", tmp_path / "ready"
    child = fork(lambda: hold(path, is_ready))
    while not is_ready.exists():
        time.sleep(0.01)
    with pytest.raises(LockHeldError, match=f"process {child} on"):
        FileLock(path).acquire()
    os.kill(child, 9)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # a zombie, as without an init process
    holder = Holder.parse(path.read_text())
    assert holder.is_alive() is False
    with FileLock(path):
        pass
    kill(child)
    assert holder.is_alive() is False
    # The number may belong to another process by now.
    assert replace(Holder.current(), started="1").is_alive() is False


def test_what_a_kill_within_taking_a_lock_left_goes_when_the_lock_is_taken_again(tmp_path):
    dead = replace(Holder.current(), started="1")  # this number, of an earlier process
    for name, holder in (
        ("lock.dead", dead),
        ("lock.other", container()),
        ("lock2.dead", dead),
    ):
        write(tmp_path / name, holder)
    with FileLock(tmp_path / "lock"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"lock.other", "lock2.dead"}


def acquire_again(path):
    with pytest.raises(LockHeldError):
        FileLock(path).acquire()


def test_a_process_shares_its_lock_and_a_forked_child_does_not(tmp_path):
    path = tmp_path / "lock"
    with FileLock(path) as lock:
        with FileLock(path):
            pass
        assert exit_code(fork(lambda: acquire_again(path))) == 0
        assert exit_code(fork(lock.release)) == 0
        lock.check()
        write(path, container())
        with pytest.raises(LockHeldError, match="was lost: process"):
            lock.check()
    assert path.exists()  # what another took is not given back in its name


def test_a_lock_beats_on_after_a_file_server_was_away(tmp_path, monkeypatch):
    monkeypatch.setattr(file_lock, "BEAT_S", 0.01)
    lock, touched, failures = FileLock(tmp_path / "lock"), threading.Event(), [1, 2]

    def touch():
        if failures:
            raise OSError(errno.ESTALE, f"stale file handle {failures.pop()}")
        touched.set()

    monkeypatch.setattr(lock, "_touch", touch)
    with lock:
        assert touched.wait(10.0)


def test_a_file_system_without_links_has_locks_too(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with FileLock(tmp_path / "lock"):
        assert exit_code(fork(lambda: acquire_again(tmp_path / "lock"))) == 0
    assert not list(tmp_path.iterdir())
