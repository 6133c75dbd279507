"""Reading a launcher's environment, and ranks started on this host."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from mcore_parallel.launch.launcher import (
    RankEnvironment,
    free_port,
    initialize,
    launch_local,
    num_cores,
    python_command,
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
    assert read_environment({**LAUNCHED, "LOCAL_RANK": "0"}) == RankEnvironment(
        rank=1, world_size=4, local_rank=0, is_launched=True
    )
    assert read_environment(LAUNCHED).local_rank == 1


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
        "print('out of', rank); print('error of', rank, file=sys.stderr)"
    )
    assert launch_local(python(code), 3) == 0
    out, error = capfd.readouterr()
    assert out.splitlines() == ["out of 0"]
    assert sorted(error.splitlines()) == ["error of 0", "error of 1", "error of 2"]


def test_the_first_rank_that_fails_ends_all_the_others_and_gives_its_code():
    start = time.monotonic()
    code = WHO + "sys.exit(7) if rank == 1 else time.sleep(600)"
    assert launch_local(python(code), 3, poll_s=0.02) == 7
    assert time.monotonic() - start < 250


def test_a_rank_ended_by_a_signal_gives_128_and_the_signal():
    code = WHO + "os.kill(os.getpid(), 9) if rank == 0 else time.sleep(600)"
    assert launch_local(python(code), 2, poll_s=0.02) == 128 + signal.SIGKILL


SAVES_WHEN_ASKED = """
import os, signal, sys, time
from pathlib import Path
mine = Path(sys.argv[1]) / os.environ["RANK"]
def save(number, frame):
    time.sleep(0.5)
    mine.with_suffix(".saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, lambda *_: None)
mine.with_suffix(".ready").touch()
time.sleep(600)
"""
LAUNCHES = """
import sys
from mcore_parallel.launch.launcher import launch_local
sys.exit(launch_local([sys.executable, "-c", *sys.argv[1:]], 2, poll_s=0.02))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_rank_and_their_end_is_waited_for(number, tmp_path):
    command = [sys.executable, "-c", LAUNCHES, SAVES_WHEN_ASKED, str(tmp_path)]
    with subprocess.Popen(command, start_new_session=True) as launcher:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("*.ready"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        launcher.send_signal(number)  # as timeout does: to the process, then to its group
        time.sleep(0.1)
        os.killpg(launcher.pid, number)
        assert launcher.wait(120) == 0
    assert {path.name for path in tmp_path.glob("*.saved")} == {"0.saved", "1.saved"}


JOINS = """
import sys, time
from mcore_parallel.launch.launcher import initialize
initialize("cpu")
print("joined", file=sys.stderr, flush=True)
time.sleep(60)
"""


def test_ranks_whose_launcher_is_killed_end_and_say_why():
    command = [sys.executable, "-c", LAUNCHES, JOINS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        joined = 0
        for line in launcher.stderr:
            joined += line.count("joined")  # the two may write to one line
            if joined == 2:
                break
        launcher.kill()
        started_s = time.monotonic()
        told = launcher.stderr.read()  # to the end of the last rank
    assert time.monotonic() - started_s < 45
    for rank in (0, 1):
        gone = f"process {launcher.pid}, which started all ranks, is gone"
        assert f"rank {rank} ends: {gone}" in told


def test_bad_numbers_and_a_launch_inside_a_launch_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="--nproc 0 must be 1 or more"):
        launch_local(python("pass"), 0)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="--nproc cannot be used under torchrun"):
        launch_local(python("pass"), 2)


def test_python_command_runs_a_module_with_this_interpreter():
    assert python_command("mcore_train", ["gpt"]) == [
        sys.executable,
        "-m",
        "mcore_train",
        "gpt",
    ]


def test_launched_ranks_join_one_world_and_leave_it(tmp_path):
    script = tmp_path / "sum_ranks.py"
    script.write_text(
        "import torch\n"
        "from mcore_parallel.collectives import all_reduce\n"
        "from mcore_parallel.config import ParallelConfig\n"
        "from mcore_parallel.launch.launcher import initialize, shut_down\n"
        "from mcore_parallel.mesh import ParallelContext\n"
        "device = initialize('cpu')\n"
        "assert initialize('cpu') == device\n"
        "world = ParallelContext.build(ParallelConfig(), device).world\n"
        "total = all_reduce(torch.tensor([world.rank + 1.0]), world)\n"
        "assert total.tolist() == [3.0]\n"
        "shut_down()\n"
    )
    assert launch_local([sys.executable, str(script)], 2) == 0
