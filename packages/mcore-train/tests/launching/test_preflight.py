"""Hosts compare themselves before ranks start; each host here is a process of its own."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from warm_ranks import run_command

from mcore_train.diagnosis import doctor
from mcore_train.diagnosis.doctor import DoctorConfig, judge, measure_host
from mcore_train.launching.preflight import CHECKS, facts_of_ranks


def hosts(folder, *changes, words=(), num_hosts=2):
    """Run the preflight of several hosts at once; return what each ended with."""

    def start(rank):
        place = {
            "NNODES": str(num_hosts),
            "NODE_RANK": str(rank),
            "SLURMD_NODENAME": f"n{rank}",
            "MASTER_ADDR": "localhost",
        }
        env = {**os.environ, **place, **(changes[rank] if rank < len(changes) else {})}
        options = ["--num-ranks", 2, "--no-has-gpus", "--timeout-s", 20, *words]
        command = ["launch", "preflight", "--logs", folder, *options]
        done = run_command("mcore_train", *command, env=env)
        return done.returncode, done.stderr

    with ThreadPoolExecutor(num_hosts) as pool:
        return list(pool.map(start, range(num_hosts)))


def test_equal_hosts_pass_and_leave_their_facts_among_the_logs(tmp_path):
    for code, text in hosts(tmp_path / "logs", words=("--save", tmp_path / "run")):
        assert code == 0, text
    facts = json.loads((tmp_path / "logs/preflight/host-1.json").read_text())
    assert facts["versions"]["torch"]
    assert facts["program"] == sys.executable
    assert list((tmp_path / "run").iterdir()) == []  # no mark is left


def test_every_host_reports_all_faults_with_advice_and_ends_with_two(tmp_path):
    changes = {"MASTER_ADDR": "127.0.0.1", "NNODES": "2"}
    for code, text in hosts(tmp_path, {}, changes, words=("--save", "/proc/run")):
        assert code == 2
        assert "one worker group: " in text
        assert "MASTER_ADDR 127.0.0.1, elsewhere localhost" in text
        assert "folder: n0: /proc/run: " in text
        assert "folder: n1: /proc/run: " in text
        assert "Give the job's user write permission" in text


def test_a_host_that_does_not_come_or_shares_no_logs_is_named(tmp_path):
    ((code, text),) = hosts(tmp_path, {"NNODES": "3"}, words=("--timeout-s", "1"), num_hosts=1)
    assert code == 2
    assert "2 of 3 hosts (NODE_RANK 1, 2) wrote nothing" in text
    assert "storage that all hosts share" in text


def test_the_rows_are_those_of_doctor_and_find_what_differs():
    assert set(CHECKS) <= {check.name for check in doctor.CHECKS}
    first = {
        **measure_host("cuda"),
        "num_ranks": 2,
        "gpus": [{}, {}],
        "folders": [],
        "xids": [],
    }
    first |= {"names": {"host": "n0"}, "num_gpus": 2}
    other = {**first, "names": {"host": "n1"}, "working_folder": "/elsewhere", "num_gpus": 4}
    other |= {"versions": {**first["versions"], "torch": "0.1"}, "source": "other"}
    facts = facts_of_ranks([first, {**first, "names": {"host": "n2"}}, other])
    found = {r.check.name: r for r in judge(facts, DoctorConfig(), CHECKS) if r.problems}
    assert "torch 0.1" in found["same versions"].problems[0].value
    assert found["same folder"].problems[0].value.startswith("folder /elsewhere, elsewhere ")
    assert "rank 4 on n1" in found["same source"].problems[0].where
    assert [(p.where, p.value) for p in found["GPUs of a host"].problems] == [
        ("n1", "2 ranks and 4 GPUs")
    ]
