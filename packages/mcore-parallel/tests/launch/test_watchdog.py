"""A rank that dies, hangs, raises or disagrees ends all ranks in time, and is named."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from warm_ranks import run_command

from mcore_parallel.launch import launcher, watchdog
from mcore_parallel.launch.call_checks import Agreement, DisagreementError
from mcore_parallel.launch.launcher import free_port
from mcore_parallel.launch.watchdog import Watch, call_site, where_in
from mcore_parallel.mesh import Axis
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear

HERE = Path(__file__).parent
WORLD_SIZE = 3
SLACK_S = 60.0
"""For starting and ending processes on a busy host, beyond the collectives' timeout."""


def run_world(fault, timeout_s, frozen=None):
    """Run three ranks of faulty_rank.py; return code and text of each, and the time.

    Rank 0 is killed once the others have ended, where it is to leave its id in ``frozen``.
    """
    world = {
        "WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "FROZEN": str(frozen),
    }

    def run(rank):
        env = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return run_command(
            "faulty_rank",
            fault,
            timeout_s,
            env=env,
            cwd=HERE,
            timeout_s=timeout_s + 2 * SLACK_S,
            is_ours=True,
        )

    started_s = time.monotonic()
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        ranks = [pool.submit(run, rank) for rank in range(WORLD_SIZE)]
        if frozen is not None:
            wait(ranks[1:])
            os.kill(int(frozen.read_text()), signal.SIGKILL)
        done = [rank.result() for rank in ranks]
    took_s = time.monotonic() - started_s
    return [d.returncode for d in done], [d.stdout + d.stderr for d in done], took_s


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield


@pytest.fixture(scope="module")
def worlds(scripts):
    """The worlds that need no short timeout, side by side, as they wait most of the time."""
    timeouts_s = {"none": 120.0, "dies": 20.0, "raises": 20.0, "shape": 20.0}
    with ThreadPoolExecutor(len(timeouts_s)) as pool:
        running = {name: pool.submit(run_world, name, s) for name, s in timeouts_s.items()}
        return {name: world.result() for name, world in running.items()}


def test_a_world_without_faults_ends_well(worlds):
    codes, texts, _ = worlds["none"]
    assert codes == [0, 0, 0], texts


@pytest.mark.parametrize(
    ("fault", "timeout_s", "told"),
    [
        (
            "dies",
            20.0,
            ("rank 1 is gone: its process", "in all_reduce over dp (ranks 0, 1, 2)", "(total)"),
        ),
        ("sleeps", 5.0, ("rank 1 at", "(dream)", "in all_reduce over dp (ranks 0, 1, 2)")),
        ("raises", 20.0, ("rank 1 failed at", "(complain)", "sample 7 is empty")),
        ("shape", 20.0, ("ranks 0 and 1 disagree on call 2", "(send_other_shape)", "(total)")),
    ],
)
def test_a_fault_of_one_rank_ends_all_in_time_and_names_it(worlds, fault, timeout_s, told):
    codes, texts, took_s = worlds.get(fault) or run_world(fault, timeout_s)
    assert 0 not in codes, texts
    assert took_s < min(timeout_s, 30.0) + SLACK_S
    for rank in (0, 2):
        assert all(words in texts[rank] for words in told), texts[rank]


def test_a_step_that_hangs_is_found_long_before_the_timeout(scripts, tmp_path, monkeypatch):
    monkeypatch.setenv(launcher.FLIGHT_RECORDER_FILE, str(tmp_path / "nccl_trace_rank_"))
    codes, texts, _ = run_world("late step", 600.0)
    assert 0 not in codes, texts
    for rank in (0, 2):
        (late,) = re.findall(r"rank 1 holds up step 7, which takes (\d+) s", texts[rank])[:1]
        assert int(late) <= 30  # two steps of no length and 10 s; a busy host takes longer
        assert "(dream)" in texts[rank]
        assert "ranks 0, 2 in all_reduce over dp (ranks 0, 1, 2)" in texts[rank]
    # Every rank wrote what it had called: triage finds the rank that did not come.
    absent = pickle.loads((tmp_path / "nccl_trace_rank_1").read_bytes())["entries"]
    present = pickle.loads((tmp_path / "nccl_trace_rank_0").read_bytes())["entries"]
    assert len(present) == len(absent) + 1


def test_a_step_is_late_after_twice_the_longest_one_and_some_seconds(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    watch = Watch(dist.HashStore(), 0, 2, 600.0)
    for took_s in (0.0, 900.0, 900.0, 3.0, 4.0):  # the first ones load kernels
        now_s += took_s
        watch.step_ended()
    now_s += 12.9
    assert watch._steps.late_s() == 0.0
    now_s += 0.2
    assert watch._steps.late_s() == pytest.approx(13.1)
    with watch.between_steps():
        now_s += 1000.0
        assert watch._steps.late_s() == 0.0
    assert watch._steps.late_s() == 0.0


def test_ranks_end_when_the_one_that_holds_the_store_stands_still(scripts, tmp_path):
    codes, texts, _ = run_world("freezes", 5.0, frozen=tmp_path / "process")
    assert 0 not in codes, texts
    for rank in (1, 2):
        assert "in all_reduce over dp (ranks 0, 1, 2)" in texts[rank]
        assert "the store has not answered for" in texts[rank]


@pytest.mark.parametrize("last", ["at step.py:1 (one_step)", "left"])
def test_a_killed_rank_of_this_host_is_found_within_seconds(last):
    class Watched(Watch):
        def _exit(self, fault, place):
            raise AssertionError("nothing ends the test")

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    store, faults = dist.HashStore(), []
    beat = {"count": 1, "place": last, "process": child.pid}
    store.set("watch/beat/1", json.dumps(beat))
    with Watched(store, 0, 2, 5.0, faults.append, host_ranks=(0, 1)) as watch:
        deadline = time.monotonic() + SLACK_S
        while not watch._processes.get(1) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not faults
        child.kill()  # not waited for: it is a zombie, as until torchrun looks
        killed_s = time.monotonic()
        while not faults and 1 in watch._processes and time.monotonic() < deadline:
            time.sleep(0.05)
        assert time.monotonic() - killed_s < 4.0
    child.communicate()
    assert faults == (
        [] if last == "left" else [f"rank 1 is gone: its process was ended, last {last}"]
    )


def test_a_rank_without_news_is_silent():
    watch = Watch(dist.HashStore(), 0, 2, 5.0)
    watch._store.set("watch/beat/1", json.dumps({"count": 1, "place": "at step.py:1 (f)"}))
    assert watch.places(wait_s=0.01) == {1: "SILENT, last at step.py:1 (f)"}


def test_a_rank_alone_is_watched_for_late_steps_if_it_reports_them(monkeypatch, caplog):
    with Watch.of_world(0, 1, 1.0) as watch:
        assert watch._thread is None
    monkeypatch.setattr(watchdog, "STEP_SLACK_S", 0.2)
    monkeypatch.setattr(watchdog, "POLL_S", 0.05)
    with Watch.of_world(0, 1, 0.01, reports_steps=True) as watch:
        for _ in range(6):
            watch.step_ended()
        deadline = time.monotonic() + SLACK_S
        while "holds up" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "rank 0 holds up step 7" in caplog.text
    # Its errors are the caller's: no timer ends the process.
    monkeypatch.setattr(threading, "Timer", None)
    with pytest.raises(ValueError, match="mine"), Watch.of_world(0, 1, 1.0, reports_steps=True):
        raise ValueError("mine")


def test_a_place_is_the_line_of_the_own_program():
    here = where_in({1: sys._getframe()}, 1)
    assert here.startswith("at ")
    assert "(test_a_place_is_the_line_of_the_own_program)" in here
    assert "test_watchdog.py" in call_site()


def test_a_line_of_this_package_is_followed_by_the_one_that_called_it():
    first, second = (Agreement(dist.HashStore(), "g", (0, 1), i, timeout_s=0.2) for i in (0, 1))
    second.store = first.store
    first.check("all_gather", torch.ones(3, 1, 4))
    axis = Axis("tp", 2, 1, None, (0, 1), second)
    layer = ColumnParallelLinear(4, 4, axis=axis, sequence_parallel=True, init_std=0.0)
    with pytest.raises(DisagreementError) as caught:
        layer(torch.ones(2, 1, 4))
    told = str(caught.value)
    assert "mcore_parallel/tensor_parallel/linear_autograd.py" in told
    assert "(forward), for launch/test_watchdog.py" in told


def test_who_waits_for_what_it_began_is_told_with_the_axis_of_its_caller():
    names = {}
    code = "def wait(look):\n    return look()"
    exec(compile(code, "/somewhere/mcore_parallel/collectives.py", "exec"), names)

    def look():
        return where_in({1: sys._getframe(1)}, 1)

    def begin(axis):
        return names["wait"](look)

    told = begin(Axis("tp", 2, 0, None, (4, 6)))
    assert told.startswith("in wait over tp (ranks 4, 6) at launch/test_watchdog.py")
    assert told.endswith("(begin)")


def test_a_host_that_waits_for_its_gpu_is_told_so():
    names = {}
    code = "def synchronize(look):\n    return look()"
    exec(compile(code, "/somewhere/torch/cuda/streams.py", "exec"), names)
    found = names["synchronize"](lambda: where_in({1: sys._getframe(1)}, 1))
    assert found.startswith("waiting for its device at launch/test_watchdog.py")


def test_a_rank_that_ends_is_not_told_by_a_line_of_the_watch():
    class Watched(Watch):
        def _stop(self):
            places.append(where_in({1: sys._getframe()}, 1))

    places = []
    with Watched(dist.HashStore(), 0, 1, 600.0) as watch:
        ...
    watch._ended.set()
    assert places == ["ending too"]
