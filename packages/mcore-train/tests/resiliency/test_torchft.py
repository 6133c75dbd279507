"""TorchFT over loopback: a replica is killed, the other goes on, the killed one comes back."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_parallel.launch.launcher import free_port

torchft = pytest.importorskip("torchft")
EXAMPLE = Path(__file__).parents[4] / "examples/torchft_replicas.py"
STEPS = 60


def start(replica, lighthouse, log):
    """Start a replica of one rank, which holds the store of its own world."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(free_port()), "TORCHFT_LIGHTHOUSE": lighthouse}
    words = ["--replica", str(replica), "--steps", str(STEPS), "--pause-s", "0.2"]
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", str(EXAMPLE), *words],
            env={**os.environ, **place, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
        )


def wait_for(log, pattern, after=0, timeout_s=90.0):
    """Wait until a log has a line; return how much of the log was read."""
    deadline = time.monotonic() + timeout_s
    while True:
        text = log.read_text()
        if re.search(pattern, text[after:]):
            return len(text)
        assert "Traceback" not in text[after:], text[-3000:]
        assert time.monotonic() < deadline, text[-3000:]
        time.sleep(0.1)


@pytest.mark.timeout(300)
def test_a_replica_that_is_killed_leaves_the_other_training_and_catches_up(tmp_path):
    lighthouse = torchft._torchft.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000
    )
    address = re.sub(r"//[^:]+:", "//127.0.0.1:", lighthouse.address())
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    replicas = [start(0, address, first), start(1, address, second)]
    try:
        place = wait_for(first, r"step \d+ with 2 replicas")
        replicas[1].send_signal(signal.SIGKILL)
        replicas[1].wait()
        place = wait_for(first, r"step \d+ with 1 replicas", place)
        replicas[1] = start(1, address, second)
        place = wait_for(first, r"step \d+ with 2 replicas", place)
        assert [replica.wait(120) for replica in replicas] == [0, 0]
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        lighthouse.shutdown()
    texts = [log.read_text() for log in (first, second)]
    sums = [re.findall(r"weights (\S+)", text) for text in texts]
    assert sums[0] == sums[1]
    # The second one came back at the step of the first, not at its own.
    numbers = [int(n) for n in re.findall(r"step (\d+) with", texts[0])]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == STEPS
