"""The tour, where it does not go to its end; its whole way is in tests/e2e."""

import os
import signal

import pytest

from mcore_train.cli import main
from mcore_train.quickstart import tour

STEPS = 20
"""As few as there may be."""


@pytest.mark.parametrize(
    ("stopped_call", "number"),
    [
        pytest.param(1, signal.SIGINT, id="long"),
        pytest.param(2, signal.SIGTERM, id="last", marks=pytest.mark.parity_long),
        pytest.param(3, signal.SIGTERM, id="again", marks=pytest.mark.parity_long),
    ],
)
def test_a_tour_that_is_asked_to_stop_ends_and_says_so(
    tmp_path, monkeypatch, capfd, stopped_call, number
):
    train, calls = tour.train, []

    def stopped(run, reporter, **options):
        calls.append(run.iteration)
        if len(calls) == stopped_call:
            monkeypatch.setattr(reporter, "advance", ask_once)
        return train(run, reporter, **options)

    def ask_once(*_):  # after a step, when training listens
        if not asked:
            asked.append(number)
            os.kill(os.getpid(), number)

    asked = []
    monkeypatch.setattr(tour, "train", stopped)
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        words = ["--steps", str(STEPS), "--output", str(tmp_path / "tour"), "--device", "cpu"]
        assert main(["quickstart", *words]) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [0, 10, 10][:stopped_call]
    assert "The tour was asked to stop and ends here." in capfd.readouterr().out
