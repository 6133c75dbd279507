"""Reading a launcher's environment, and ranks started on this host."""

import fcntl
import os
import signal
import socket
import sys
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
from warm_ranks import run_command

from mcore_parallel.launch.launcher import (
    KERNEL_CACHES,
    RankEnvironment,
    free_port,
    initialize,
    launch_local,
    num_cores,
    prepare_kernel_packages,
    read_environment,
    shut_down,
)

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in (*LAUNCHED, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_no_launcher_is_one_rank_whatever_else_is_set():
    assert read_environment({}) == RankEnvironment(
        rank=0, world_size=1, local_rank=0, is_launched=False
    )
    assert not read_environment({"MASTER_PORT": "1", "LOCAL_RANK": "3"}).is_launched


def test_a_launched_rank_knows_its_place():
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert read_environment({**LAUNCHED, **local}) == RankEnvironment(
        rank=1, world_size=4, local_rank=0, local_world_size=2, is_launched=True
    )
    assert read_environment(LAUNCHED).local_world_size == 4
    assert read_environment(LAUNCHED).local_rank == 1
    assert read_environment(LAUNCHED).launcher_pid == 0
    under_torchrun = {**LAUNCHED, "TORCHELASTIC_RUN_ID": "none"}
    assert read_environment(under_torchrun).launcher_pid == os.getppid()


@pytest.mark.parametrize("missing", list(LAUNCHED))
def test_half_an_environment_is_refused_and_names_what_is_missing(missing):
    env = {name: value for name, value in LAUNCHED.items() if name != missing}
    with pytest.raises(ValueError, match=f"not \\['{missing}'\\]: start with torchrun"):
        read_environment(env)


def test_values_that_contradict_or_are_no_integers_are_refused():
    with pytest.raises(ValueError, match="RANK=4 is not within WORLD_SIZE=4"):
        read_environment({**LAUNCHED, "RANK": "4"})
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        with pytest.raises(ValueError, match=f"{name}='one': it must be an integer"):
            read_environment({**LAUNCHED, name: "one"})


def test_a_single_process_joins_nothing():
    assert initialize("cpu") == torch.device("cpu")
    assert not dist.is_initialized()
    shut_down()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of a host without GPUs")
def test_cuda_where_there_is_none_is_refused():
    assert initialize() == torch.device("cpu")
    with pytest.raises(ValueError, match=r"this host shows 0\. Use --device cpu"):
        initialize("cuda")


@pytest.mark.parametrize("owner", ["this user", "another user"])
def test_compiled_kernels_are_kept_in_a_folder_that_no_other_user_can_write(
    owner, tmp_path, monkeypatch
):
    names = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", *KERNEL_CACHES
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUACK_CACHE_DIR", "chosen by the user")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"mcore-kernels-{os.getuid()}"
    if owner == "another user":
        monkeypatch.setattr(os, "getuid", lambda: folder.parent.stat().st_uid + 1)
        folder = tmp_path / f"mcore-kernels-{os.getuid()}"
    prepare_kernel_packages()
    assert folder.stat().st_mode & 0o777 == 0o700
    expected = ["1", str(folder / "flash-attn-4"), "chosen by the user"]
    if owner == "another user":
        expected[:2] = [None, None]
    assert [os.environ.get(name) for name in names] == expected
    for name in names:  # not restored by monkeypatch, which did not set them
        os.environ.pop(name, None)


def test_free_ports_differ_and_can_be_bound():
    ports = {free_port() for _ in range(4)}
    assert len(ports) > 1
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", port))


def test_cores_are_counted_where_the_system_does_not_limit_a_process(monkeypatch):
    if hasattr(os, "sched_getaffinity"):
        assert num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert num_cores() == os.cpu_count()


def python(code):
    return [sys.executable, "-S", "-c", code]


WHO = "import os, sys, time; rank = int(os.environ['RANK'])\n"


def test_ranks_get_their_environment_and_only_rank_0_keeps_the_output(capfd):
    code = WHO + (
        "assert os.environ['LOCAL_RANK'] == os.environ['RANK']\n"
        "assert os.environ['WORLD_SIZE'] == '3'\n"
        "assert os.environ['MASTER_ADDR'] == '127.0.0.1'\n"
        "print('out of', rank, os.environ['MASTER_PORT'])\n"
        "os.write(2, f'error of {rank}\\n'.encode())"  # one write: print's pieces may mix
    )
    ports = set()
    for _ in range(3):
        assert launch_local(python(code), 3) == 0
        out, error = capfd.readouterr()
        *words, port = out.split()
        assert words == ["out", "of", "0"]
        assert sorted(error.splitlines()) == ["error of 0", "error of 1", "error of 2"]
        ports.add(port)
    assert len(ports) > 1  # so that two launches at the same time do not meet


def test_the_first_rank_that_fails_ends_all_the_others_and_gives_its_code():
    start = time.monotonic()
    code = WHO + "sys.exit(7) if rank == 1 else time.sleep(600)"
    assert launch_local(python(code), 3, poll_s=0.02) == 7
    assert time.monotonic() - start < 250


def test_a_rank_ended_by_a_signal_is_named_with_its_cause_and_gives_128_and_the_signal(caplog):
    code = WHO + f"os.kill(os.getpid(), {signal.SIGBUS:d}) if rank == 0 else time.sleep(600)"
    assert launch_local(python(code), 2, poll_s=0.02) == 128 + signal.SIGBUS
    assert "rank 0 was ended by SIGBUS (a memory-mapped file was truncated, or" in caplog.text


SAVES_WHEN_ASKED = """
import os, signal, sys, time
from pathlib import Path
mine = Path(sys.argv[1]) / os.environ["RANK"]
def save(number, frame):
    time.sleep(0.5)
    mine.with_suffix(".saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
signal.signal(signal.SIGINT, lambda *_: None)
mine.with_suffix(".ready").touch()
time.sleep(600)
"""
# A launcher, run by `run_command`: its ranks are cold processes, so few of them load torch.
LAUNCHES = """
import os, sys, threading, time
from pathlib import Path
from mcore_parallel.launch.launcher import launch_local
folder, code, *numbers = sys.argv[1:]
def end_the_job():  # as timeout does: the process, then its group, in which it is itself
    while len(list(Path(folder).glob("*.ready"))) < 2:
        time.sleep(0.02)
    for number in map(int, numbers):
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        os.killpg(0, number)
os.setsid()
threading.Thread(target=end_the_job, daemon=True).start()
sys.exit(launch_local([sys.executable, "-c", code, folder], 2, poll_s=0.02))
"""


def launch(code, folder, monkeypatch, *numbers):
    """Launch two ranks of a program in a process of its own, which gets these signals."""
    (folder / "launches.py").write_text(LAUNCHES)
    monkeypatch.syspath_prepend(folder)
    numbers = [int(number) for number in numbers]
    return run_command("launches", folder, code, *numbers, is_ours=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_and_their_end_is_waited_for(number, tmp_path, monkeypatch):
    done = launch(SAVES_WHEN_ASKED, tmp_path, monkeypatch, number)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("*.saved")} == {"0.saved", "1.saved"}


# The log of a rank outlives its launcher, so it is a file, locked until the rank ends.
JOINS = """
import fcntl, os, signal, sys, time
from pathlib import Path
import torch
from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch.launcher import initialize, shut_down
from mcore_parallel.mesh import ParallelContext
folder, rank, launcher = Path(sys.argv[1]), os.environ["RANK"], os.getppid()
device = initialize("cpu")
assert initialize("cpu") == device
world = ParallelContext.build(ParallelConfig(), device).world
total = all_reduce(torch.tensor([world.rank + 1.0]), world)
assert total.tolist() == [3.0]
shut_down()
log = open(folder / f"{rank}.log", "w")
fcntl.flock(log, fcntl.LOCK_EX)
os.dup2(log.fileno(), 2)
(folder / f"{rank}.left").write_text(str(launcher))
if rank == "0":
    while not (folder / "1.left").exists():
        time.sleep(0.02)
    os.kill(launcher, signal.SIGKILL)
time.sleep(60)
"""


def test_ranks_join_and_leave_one_world_and_end_with_a_killed_launcher(tmp_path, monkeypatch):
    done = launch(JOINS, tmp_path, monkeypatch)
    assert done.returncode == -signal.SIGKILL, done.stderr
    started_s = time.monotonic()
    for rank in (0, 1):
        launcher = (tmp_path / f"{rank}.left").read_text()
        with (tmp_path / f"{rank}.log").open() as log:
            fcntl.flock(log, fcntl.LOCK_EX)  # once the rank has ended
            reason = f"process {launcher}, which started all ranks, is gone"
            assert f"rank {rank} ends: {reason}" in log.read()
    assert time.monotonic() - started_s < 45


def test_bad_numbers_and_a_launch_inside_a_launch_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="--nproc 0 must be 1 or more"):
        launch_local(python("pass"), 0)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="--nproc cannot be used under torchrun"):
        launch_local(python("pass"), 2)
