"""The health endpoint: what it answers in each state of a run, and that a run serves it."""

import json
import threading
import time
import urllib.error
import urllib.request

import pytest
from warm_ranks import run_command

from mcore_parallel.launch.launcher import free_port
from mcore_train.reporting.health import Health, HealthServer

PLACE = "http://127.0.0.1:{}{}"


def get(port, path):
    """Return the code and the text of an answer."""
    try:
        with urllib.request.urlopen(PLACE.format(port, path), timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_probes_are_answered_by_the_age_of_the_last_progress():
    clock = [100.0]
    health = Health(stale_s=60.0, now=lambda: clock[0], rank=8)
    health.begin(4, 10)
    with HealthServer(0, health) as server:
        clock[0] += 1000  # a run that loads may take its time
        code, text = get(server.port, "/health")
        assert (code, json.loads(text)["status"]) == (200, "starting")
        health.step(5)
        clock[0] += 30
        health.checkpoint(5)
        clock[0] += 20
        code, text = get(server.port, "/health")
        assert code == 200
        assert json.loads(text) == {
            "status": "training",
            "rank": 8,
            "iteration": 5,
            "train_iters": 10,
            "uptime_s": 1050.0,
            "progress_age_s": 20.0,
            "step_age_s": 50.0,
            "checkpoint_iteration": 5,
            "checkpoint_age_s": 20.0,
        }
        health.report({"loss": 2.5, "valid/loss": 3})
        code, text = get(server.port, "/metrics")
        assert code == 200
        assert 'mcore_step_age_s{rank="8"} 50.0\n' in text
        assert '# TYPE mcore_loss gauge\nmcore_loss{rank="8"} 2.5\n' in text
        assert 'mcore_valid_loss{rank="8"} 3.0\n' in text
        assert 'mcore_healthy{rank="8"} 1.0\n' in text
        clock[0] += 41
        assert get(server.port, "/health")[0] == 503
        assert 'mcore_healthy{rank="8"} 0.0\n' in get(server.port, "/metrics")[1]
        health.beat()
        assert get(server.port, "/health")[0] == 200
        assert get(server.port, "/")[0] == 404


def test_a_port_that_is_taken_is_refused():
    with HealthServer(0, Health(60.0)) as server:
        taken = f"--health-port {server.port} cannot be used"
        with pytest.raises(ValueError, match=taken):
            HealthServer(server.port, Health(60.0))


def test_a_run_serves_its_steps_and_saves(tmp_path):
    port = free_port()
    found = []
    is_over = threading.Event()

    def ask():
        while not is_over.is_set():
            try:
                state = json.loads(get(port, "/health")[1])
                found.append((state, get(port, "/metrics")[1]))
            except OSError:
                pass
            time.sleep(0.01)

    asking = threading.Thread(target=ask)
    asking.start()
    run_command(
        *("mcore_train", "gpt", "--num-layers", 1, "--hidden-size", 16),
        *("--num-attention-heads", 2, "--vocab-size", 64, "--seq-length", 8, "--mock-data"),
        *("--num-workers", 0, "--lr", 1e-3, "--train-iters", 60, "--log-interval", 1),
        *("--save", tmp_path, "--save-interval", 5, "--health-port", port),
    )
    is_over.set()
    asking.join()
    state, metrics = found[-1]
    assert state["status"] == "training"
    assert state["train_iters"] == 60
    assert state["iteration"] >= state["checkpoint_iteration"] > 0
    assert "mcore_loss{" in metrics
