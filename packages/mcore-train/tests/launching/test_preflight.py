"""Hosts compare themselves before ranks start; each host here is a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from mcore_train.launching.preflight import count_gpus, differences, host_facts


def hosts(folder, *changes, words=(), num_hosts=2):
    """Run the preflight of several hosts at once; return what each ended with."""
    started = []
    for rank in range(num_hosts):
        place = {
            "NNODES": str(num_hosts),
            "NODE_RANK": str(rank),
            "SLURMD_NODENAME": f"n{rank}",
            "MASTER_ADDR": "n0",
        }
        env = {**os.environ, **place, **(changes[rank] if rank < len(changes) else {})}
        command = [sys.executable, "-m", "mcore_train", "launch", "preflight", "--logs", folder]
        options = ["--num-ranks", "2", "--no-has-gpus", "--timeout-s", "20", *words]
        started.append(
            subprocess.Popen(
                [str(word) for word in (*command, *options)],
                env=env,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    found = [host.communicate()[1] for host in started]
    return [(host.returncode, text) for host, text in zip(started, found, strict=True)]


def test_equal_hosts_pass_and_leave_their_facts_among_the_logs(tmp_path):
    for code, text in hosts(tmp_path / "logs", words=("--save", tmp_path / "run")):
        assert code == 0, text
    facts = json.loads((tmp_path / "logs/preflight/host-1.json").read_text())
    assert facts["packages"]["mcore-train"]
    assert facts["interpreter"] == sys.executable


def test_every_host_reports_all_differences_and_ends_with_two(tmp_path):
    changes = {"MASTER_ADDR": "n7", "NNODES": "2"}
    for code, text in hosts(tmp_path, {}, changes, words=("--save", "/proc/run")):
        assert code == 2
        assert "(MASTER_ADDR): n0 on n0; n7 on n1" in text
        assert "n0: --save /proc/run cannot be written" in text
        assert "n1: --save /proc/run cannot be written" in text


def test_a_host_that_does_not_come_or_shares_no_logs_is_named(tmp_path):
    ((code, text),) = hosts(tmp_path, {"NNODES": "3"}, words=("--timeout-s", "1"), num_hosts=1)
    assert code == 2
    assert "2 of 3 hosts (NODE_RANK 1, 2) wrote nothing" in text
    assert "storage that all hosts share" in text


def test_packages_and_folders_that_differ_are_listed_once():
    first = {**host_facts(2), "host": "n0", "faults": [], "save": "a"}
    other = {**first, "host": "n1", "folder": "/elsewhere", "save": "b"}
    other["packages"] = {**first["packages"], "torch": "0.1"}
    lines = differences({0: first, 1: other, 2: {**first, "host": "n2"}})
    assert len(lines) == 3
    assert lines[0].startswith("ranks start in different folders, give --workdir: /elsewhere")
    assert any(line.startswith("torch: 0.1 on n1;") for line in lines)
    assert any("--save is not one folder" in line for line in lines)


@pytest.mark.parametrize(("visible", "count"), [("0,1,2", 3), ("", 0), ("-1", 0), ("7", 1)])
def test_gpus_are_counted_as_cuda_sees_them(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count
