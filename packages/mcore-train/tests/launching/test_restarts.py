"""What follows an attempt, and a local job that is started again."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from threading import Timer

import pytest
from e2e.fake_schedulers import NCCL, RUN, fake_python

from mcore_models.kernels import availability
from mcore_train.launching.config import LAUNCHER, TURN
from mcore_train.launching.restarts import Attempt, decide, read_history
from mcore_train.launching.standby import wait_for_turn


def failed(fault, step=4, **more):
    return Attempt(status=1, step=step, fault=fault, **more)


def answer(attempt, *before, last_step=10, max_restarts=3):
    found = decide(attempt, before, last_step, max_restarts, 10.0)
    return found.word, found.number


def test_an_attempt_that_ended_well_is_finished_or_was_stopped():
    assert answer(Attempt(status=0, step=10)) == ("finished", 0)
    assert answer(Attempt(status=0, step=-1)) == ("finished", 0)
    assert answer(Attempt(status=0, step=4)) == ("requeue", 0)
    assert answer(Attempt(status=0, step=4), last_step=0) == ("finished", 0)
    assert answer(failed("killed", step=10)) == ("finished", 0)  # after its last save


@pytest.mark.parametrize("fault", ["collective_timeout", "hardware", "crash", "killed"])
def test_failures_that_may_pass_are_retried_with_longer_and_longer_pauses(fault):
    before = []
    for pause_s in (10.0, 20.0, 40.0):
        assert answer(failed(fault), *before) == ("retry", pause_s)
        before.append(failed(fault))
    assert answer(failed(fault), *before) == ("stop", 1)
    assert answer(failed(fault, step=6), *before) == ("retry", 10.0)
    assert answer(failed(fault), max_restarts=0) == ("stop", 1)


@pytest.mark.parametrize(("fault", "code"), [("config", 12), ("data", 18), ("nan", 17)])
def test_failures_that_need_a_person_end_the_job_with_their_classs_code(fault, code):
    assert answer(failed(fault)) == ("stop", code)


def test_the_same_failure_after_the_same_step_is_not_tried_a_third_time():
    same = failed("unknown", logged_step=5, message="assert x")
    assert answer(same) == ("retry", 10.0)
    assert answer(same, same) == ("stop", 1)
    other = failed("unknown", logged_step=5, message="assert y")
    assert answer(same, other) == ("retry", 20.0)


def start_local(folder, *words):
    command = [sys.executable, "-m", "mcore_train", "launch", "local", "--nodes", "2"]
    options = ["--python", folder / "bin/fakepython", "--restart-backoff-s", "0", *words]
    line = [*command, *options, "--", *RUN, "--save", "run"]
    return subprocess.Popen(
        list(map(str, line)),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def history_of(folder):
    (file,) = folder.glob("run/logs/*/attempts.jsonl")
    return [json.loads(line)["word"] for line in file.read_text().splitlines()]


def test_a_local_job_is_retried_and_all_it_started_is_gone_at_its_end(tmp_path):
    fake_python(tmp_path, [(1, NCCL, 2), (0, "", 6)])
    text = (tmp_path / "bin/fakepython").read_text()
    # An orphan of each host, as ranks are whose agent was killed.
    orphan = f"(setsid sleep 98{os.getpid()} > /dev/null 2>&1 &)"
    (tmp_path / "bin/fakepython").write_text(
        text.replace("exit $code", f"{orphan}\nexit $code")
    )
    job = start_local(tmp_path)
    printed, _ = job.communicate(timeout=60)
    assert job.returncode == 0, printed
    assert history_of(tmp_path) == ["retry", "finished"]
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert f"sleep 98{os.getpid()}" not in listed.stdout


def test_a_standby_becomes_the_next_attempt_and_the_last_one_leaves_nothing(tmp_path):
    fake_python(tmp_path, [(1, NCCL, 2), (0, "", 6), (1, "never begun", 6)])
    file = tmp_path / "bin/fakepython"
    # An attempt ends once the hosts of the next one wait.
    waiting = f"""number=$(basename "$MCORE_LOGS" | cut -d- -f2)
        if [ -n "${{MCORE_TURN:-}}" ]; then
            echo $$ >> {tmp_path}/waiting.$number.$NODE_RANK
            until [ -e "$MCORE_TURN" ]; do sleep 0.05; done
        fi
        next={tmp_path}/waiting.$((number + 1))
        until [ -e $next.0 ] && [ -e $next.1 ]; do sleep 0.05; done
        source """
    file.write_text(file.read_text().replace("source ", waiting, 1))
    job = start_local(tmp_path, "--standby-after-s", "0.2")
    printed, _ = job.communicate(timeout=60)
    assert job.returncode == 0, printed
    assert history_of(tmp_path) == ["retry", "finished"]
    waited = {f.name: f.read_text().split() for f in tmp_path.glob("waiting.*")}
    assert sorted(waited) == ["waiting.1.0", "waiting.1.1", "waiting.2.0", "waiting.2.1"]
    assert all(len(pids) == 1 for pids in waited.values())  # no host was started twice
    assert not any(Path("/proc", *pids).exists() for pids in waited.values())
    assert len(list(tmp_path.glob("run/logs/*/attempt-?"))) == 2


def test_a_rank_of_a_standby_imports_kernels_and_waits_for_its_turn(
    tmp_path, monkeypatch, caplog
):
    cache = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    monkeypatch.setattr(os, "environ", {**os.environ})
    os.environ.pop(cache, None)
    package = tmp_path / "flash_attn/cute/interface.py"
    package.parent.mkdir(parents=True)
    package.write_text(f"import os\nCACHE_ENABLED = os.environ[{cache!r}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(availability, "is_installed", lambda name: name == "flash-attn-4")
    assert not wait_for_turn(uses_gpus=True)
    os.environ[TURN] = str(tmp_path / "turn")
    ended = subprocess.Popen(["true"])
    ended.wait()
    os.environ[LAUNCHER] = str(ended.pid)
    with pytest.raises(RuntimeError, match="launcher of this standby is gone"):
        wait_for_turn(uses_gpus=False)
    os.environ[LAUNCHER] = str(os.getpid())
    begin = Timer(0.2, (tmp_path / "turn").touch)
    with caplog.at_level("INFO"):
        begin.start()
        assert wait_for_turn(uses_gpus=True)
    assert (tmp_path / "turn").exists()
    assert "has imported its modules and waits" in caplog.text
    assert sys.modules.pop("flash_attn.cute.interface").CACHE_ENABLED == "1"
    assert not wait_for_turn(uses_gpus=True)


def test_sigterm_lets_the_ranks_of_a_local_job_save_and_restarts_nothing(tmp_path):
    fake_python(tmp_path, [(1, NCCL, 2)])
    # Bash cannot trap a signal that it inherits as ignored, as ranks do here.
    (tmp_path / "rank.py").write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    open('saved', 'a').write('saved ')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "open('saved.' + os.environ['NODE_RANK'], 'w')\n"
        "time.sleep(100)\n"
    )
    ranks = f"LOCAL_RANK=0 {sys.executable} -S rank.py"
    text = (tmp_path / "bin/fakepython").read_text().replace("exit $code", ranks)
    (tmp_path / "bin/fakepython").write_text(text)
    job = start_local(tmp_path)
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"saved.{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    try:
        printed, _ = job.communicate(timeout=30)
    finally:
        job.kill()
        job.communicate()
    assert job.returncode == 0, printed
    assert (tmp_path / "saved").read_text().split() == ["saved", "saved"]
    assert len(list(tmp_path.glob("run/logs/*/attempt-*"))) == 1


def test_damaged_lines_of_the_history_are_left_out_and_named(tmp_path, caplog):
    row = {"attempt": "attempt-1", **asdict(failed("crash"))}
    lines = [json.dumps(row), json.dumps(row), *("{}", "null", "[[", "7", '{"attempt": "a"}')]
    content = "\n".join([*lines, json.dumps(row | {"attempt": "attempt-2"})]).encode()
    history = tmp_path / "attempts.jsonl"
    history.write_bytes(content + b"\n\xff\xfe\n" + content[:40])
    assert read_history(history) == [failed("crash"), failed("crash")]
    assert [r.args for r in caplog.records] == [(history, n) for n in (3, 4, 5, 6, 7, 9, 10)]
