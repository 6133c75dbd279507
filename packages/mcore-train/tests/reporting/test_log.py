import io
import json
import logging
import os
import signal
import sys
import threading
import time

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore_train.composition import compose
from mcore_train.config import LogConfig
from mcore_train.reporting.log import (
    Header,
    LineHandler,
    Reporter,
    StepReport,
    read_metrics,
    set_up,
)
from mcore_train.reporting.loggers.background import BackgroundLogger
from mcore_train.reporting.loggers.tensorboard import TensorBoardLogger
from mcore_train.resolution import resolve
from mcore_train.running import build_reporter, named_loggers


def report(**changes):
    return StepReport(
        **{
            "iteration": 20,
            "train_iters": 100,
            "consumed_train_samples": 160,
            "consumed_train_tokens": 1280,
            "step_ms": 12.34,
            "tokens_per_s": 8000.0,
            "tokens_per_s_per_gpu": 4000.0,
            "tflops_per_gpu": 400.0,
            "mfu": 0.4045,
            "lr": 3e-4,
            "global_batch_size": 8,
            "loss": 2.5,
            "aux_loss": 0.0,
            "grad_norm": 1.25,
            "peak_gib": 0.0,
            **changes,
        }
    )


@pytest.fixture
def logging_of_before(monkeypatch):
    loggers = logging.getLogger(), logging.getLogger("mcore_train")
    levels = [logger.level for logger in loggers]
    monkeypatch.setattr(loggers[0], "handlers", [])
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize("is_reporter", [True, False])
def test_who_does_not_report_warns_where_a_launcher_listens(
    is_reporter, capsys, logging_of_before
):
    # launch_local keeps standard output of rank 0 alone, and standard error of all ranks.
    set_up(is_reporter)
    logging.getLogger("mcore_parallel.launch.watchdog").warning("rank 1 is gone")
    logging.getLogger("mcore_train.checkpoints.resuming").warning(
        "starting from initial weights"
    )
    logging.getLogger("mcore_train").info("fine")
    told = capsys.readouterr()
    if is_reporter:
        assert told.out == "rank 1 is gone\nstarting from initial weights\nfine\n"
    else:
        assert (told.out, told.err) == ("", "rank 1 is gone\n")


def test_a_line_reads_as_megatrons():
    line = report().line()
    assert line.startswith(" iteration       20/     100 | consumed samples:          160 | ")
    assert "elapsed time per iteration (ms): 12.3 | " in line
    assert "learning rate: 3.000000E-04 | global batch size:     8 | " in line
    assert "lm loss: 2.500000E+00 | grad norm: 1.250 |" in line
    assert (
        "tokens/s: 8000 | tokens/s/GPU: 4000 | throughput per GPU (TFLOP/s/GPU): 400.0" in line
    )
    assert "MFU: 40.5%" in line
    assert report(peak_gib=66.25).line().endswith(" | memory (GiB): 66.2 |")


def test_what_is_not_known_is_left_out():
    line = report(mfu=0.0).line()
    assert not any(word in line for word in ("MFU", "load_balancing", "imbalance", "memory"))
    full = report(
        load_balancing_loss=1.01,
        z_loss=7.5,
        peak_gib=70.0,
        expert_imbalance=1.5,
        experts={"imbalance/layer_0": 1.5},
    ).line()
    assert "expert imbalance: 1.50 | " in full
    assert "load_balancing_loss: 1.010000E+00 | z_loss: 7.500000E+00" in full
    assert "memory (GiB): 70.0" in full


def test_metrics_are_json_lines_with_stable_keys_and_are_appended(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    for iteration in (1, 2):
        with Reporter(
            Console(file=io.StringIO()), metrics_file=path, continues_from=iteration - 1
        ) as reporter:
            experts = {"imbalance/layer_1": 1.5} if iteration == 2 else {}
            reporter.report(report(iteration=iteration, experts=experts))
            reporter.record("valid", iteration, {"loss": 3.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["kind"], x["iteration"]) for x in lines] == [
        ("train", 1),
        ("valid", 1),
        ("train", 2),
        ("experts", 2),
        ("valid", 2),
    ]
    origin = {"attempt": 2, "continues_from": 1}
    assert set(lines[0]) == set(lines[2]) == {"kind", *report().numbers(), *origin, "time"}
    assert abs(time.time() - lines[3].pop("time")) < 60
    assert lines[3] == {"kind": "experts", "imbalance/layer_1": 1.5, "iteration": 2, **origin}


def write_attempt(folder, continues_from, steps, loss):
    """Report steps with a loss as an attempt that continues from a step."""
    with Reporter(
        Console(file=io.StringIO()),
        metrics_file=folder / "metrics.jsonl",
        samples_file=folder / "samples.jsonl",
        loggers=[TensorBoardLogger(folder / "tensorboard")],
        continues_from=continues_from,
    ) as reporter:
        for step in steps:
            reporter.report(report(iteration=step, loss=loss))
            reporter.record("valid", step, {"loss": loss + 1})
            reporter.report_texts(step, [("In", f" {loss}")])


def test_steps_that_an_attempt_repeats_are_named_and_count_once(tmp_path, caplog):
    write_attempt(tmp_path, 0, (1, 2, 3, 4, 5), 1.0)
    caplog.set_level(logging.INFO)
    write_attempt(tmp_path, 3, (4, 5, 6), 2.0)
    assert "attempt 2 continues from step 3: rows of earlier attempts in" in caplog.text
    assert "metrics.jsonl for the steps 4 to 5 are ignored" in caplog.text
    write_attempt(tmp_path, 6, (7,), 3.0)
    assert "attempt 3 continues" not in caplog.text  # nothing is repeated
    write_attempt(tmp_path, 1, (2,), 4.0)  # as --ckpt-step does
    assert "steps 2 to 7 are ignored" in caplog.text
    kept = {"train": [(1, 1.0), (2, 4.0)], "valid": [(1, 2.0), (2, 5.0)]}
    rows = read_metrics(tmp_path / "metrics.jsonl")
    for kind, wanted in kept.items():
        found = [(row["iteration"], row["loss"]) for row in rows if row["kind"] == kind]
        assert found == wanted == scalars(tmp_path / "tensorboard")[f"{kind}/loss"]
    texts = read_metrics(tmp_path / "samples.jsonl")
    assert [(row["iteration"], row["text"]) for row in texts] == [(1, " 1.0"), (2, " 4.0")]


def test_a_line_that_a_kill_has_cut_spoils_neither_what_follows_nor_what_was_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_attempt(tmp_path, 0, (1, 2), 1.0)
    path.write_text(path.read_text()[:-9])
    write_attempt(tmp_path, 1, (2,), 2.0)
    rows = read_metrics(path)
    assert [(r["kind"], r["iteration"], r["attempt"]) for r in rows] == [
        *(("train", 1, 1), ("valid", 1, 1)),
        *(("train", 2, 2), ("valid", 2, 2)),
    ]


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Reporter(Console(file=io.StringIO()), metrics_file=path) as reporter:
        reporter.report(report(grad_norm=float("inf"), loss=float("nan")))

    def refuse(name):
        raise AssertionError(name)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert (row["grad_norm"], row["loss"]) == (None, None)


def test_a_rank_that_does_not_report_writes_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Reporter(None, metrics_file=path) as reporter:
        reporter.report(report())
    assert not path.exists()


def scalars(folder):
    accumulator = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_shows_every_number_at_its_iteration(tmp_path):
    loggers = [TensorBoardLogger(tmp_path)]
    with Reporter(Console(file=io.StringIO()), loggers=loggers) as reporter:
        for iteration in (10, 20):
            reporter.report(report(iteration=iteration, loss=2.5 + iteration))
        reporter.record("valid", 20, {"loss": 3.0})
    found = scalars(tmp_path)
    assert found["train/loss"] == [(10, 12.5), (20, 22.5)]
    assert found["valid/loss"] == [(20, 3.0)]
    assert {tag.removeprefix("train/") for tag in found if tag.startswith("train/")} == {
        *report().numbers()
    }


def test_tensorboard_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install .mcore-train\[tensorboard\]"):
        named_loggers(LogConfig(tensorboard=True), str(tmp_path))


def test_a_rank_that_does_not_report_needs_no_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    options = {"save": str(tmp_path), "tensorboard": True, "mock_data": True, "lr": 1e-3}
    options |= {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    plan = resolve(compose({**options, "train_iters": 1, "vocab_size": 8}), 1)
    with build_reporter(plan, None) as reporter:
        reporter.report(report())
    assert not (tmp_path / "tensorboard").exists()


class Points:
    """Keeps what it is given, or raises after some points."""

    def __init__(self, takes_back, fails_after=None):
        self.takes_back, self.fails_after = takes_back, fails_after
        self.points, self.attempts, self.is_closed = [], [], False

    def begin(self, attempt):
        self.attempts.append(attempt)

    def describe(self, header):
        self.header = header

    def log(self, kind, iteration, numbers):
        if len(self.points) == self.fails_after:
            raise ConnectionError("the service is gone")
        self.points.append((kind, iteration, numbers["loss"]))

    def close(self):
        self.is_closed = True


def test_a_logger_that_fails_is_dropped_and_the_others_go_on(tmp_path, caplog):
    failing, well = Points(False, fails_after=1), Points(False)
    path, loggers = tmp_path / "metrics.jsonl", [failing, well]
    with Reporter(Console(file=io.StringIO()), metrics_file=path, loggers=loggers) as reporter:
        for iteration in (1, 2, 3):
            reporter.report(report(iteration=iteration))
    assert [step for _, step, _ in failing.points] == [1]
    assert [step for _, step, _ in well.points] == [1, 2, 3]
    assert (failing.is_closed, well.is_closed) == (False, True)
    assert [row["iteration"] for row in read_metrics(path)] == [1, 2, 3]
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    (warning,) = warnings
    assert warning.startswith("Points failed and gets no more numbers of this run (Connection")


def test_a_logger_that_blocks_holds_no_step_and_its_lost_points_are_counted(tmp_path, caplog):
    is_up = threading.Event()

    class Blocked(Points):
        def log(self, kind, iteration, numbers):
            is_up.wait(2)
            super().log(kind, iteration, numbers)

    failing, well = Points(False, fails_after=1), Points(False)
    blocked = Blocked(False)
    waits = BackgroundLogger(blocked, max_waiting=3, close_timeout_s=0.05)
    loggers = [waits, *map(BackgroundLogger, (failing, well))]
    began = time.monotonic()
    with Reporter(Console(file=io.StringIO()), loggers=loggers) as reporter:
        for iteration in range(1, 11):
            reporter.report(report(iteration=iteration))
    assert time.monotonic() - began < 5
    assert (blocked.points, blocked.is_closed, waits._thread.is_alive()) == ([], False, True)
    assert [step for _, step, _ in failing.points] == [1]
    assert ([step for _, step, _ in well.points], well.is_closed) == ([*range(1, 11)], True)
    found = sorted(r.message for r in caplog.records if r.levelno == logging.WARNING)
    lost, slow, failed = found
    assert lost == "Blocked did not take 10 of the 10 points of this run in time"
    assert slow.startswith("Blocked is slow or does not answer: 3 calls wait, further ones are")
    assert failed.startswith("Points failed and gets no more numbers of this run (Connection")
    is_up.set()
    waits.close()  # ends the thread


def test_a_run_that_crashed_and_resumed_sends_no_point_twice(tmp_path):
    path, kept, hidden = tmp_path / "metrics.jsonl", Points(False), Points(True)
    for attempt, (continues_from, last) in enumerate([(0, 5), (3, 7)], start=1):
        with Reporter(
            Console(file=io.StringIO()),
            metrics_file=path,
            loggers=[kept, hidden],
            continues_from=continues_from,
        ) as reporter:
            reporter.report_header(continues_from, Header(lines=("a run",), row={}))
            for iteration in range(continues_from + 1, last + 1):
                reporter.report(report(iteration=iteration, loss=float(attempt)))
    steps = [step for _, step, _ in kept.points]
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    # What takes steps back by itself gets them again.
    assert [step for _, step, _ in hidden.points] == [1, 2, 3, 4, 5, 4, 5, 6, 7]
    first, second = kept.attempts
    assert (first.number, second.number, second.reported) == (1, 2, 5)
    assert first.run_id == second.run_id
    assert first.folder == tmp_path


def test_a_reader_of_the_log_that_is_gone_ends_the_run_as_sigterm_does(capfd):
    reading, writing = os.pipe()
    os.close(reading)
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    with os.fdopen(writing, "w") as pipe, open(os.devnull, "w") as nowhere:
        line = logging.LogRecord("run", logging.INFO, "", 0, "loss 2.5", (), None)
        LineHandler(pipe).handle(line)
        os.dup2(nowhere.fileno(), writing)  # what is left in the buffer has a place to go
    signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    assert capfd.readouterr().err == ""
