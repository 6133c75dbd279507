"""Writes the reports of a run as lines of text, as JSON lines and to loggers.

Only the reporting rank opens files; the other ranks only log warnings. Lines have Megatron's
format, so tools that parse Megatron's logs can parse them. On a terminal a progress bar is
shown below the lines.
"""

import json
import logging
import math
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mcore_train.reporting.health import Health
from mcore_train.reporting.loggers.background import warn_of_failure
from mcore_train.reporting.loggers.protocol import Attempt, Header, Logger

if TYPE_CHECKING:
    from mcore_train.reporting.alarms import Alarm
    from mcore_train.reporting.waterfall import Waterfall

log = logging.getLogger(__name__)

ROOT = "mcore_train"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
SPIKES = "spikes.jsonl"
TENSORBOARD = "tensorboard"
"""Names in the ``--save`` folder. A line of samples has iteration, prompt and text; a line of
spikes is a step that was left out."""


class LineHandler(logging.StreamHandler):
    """Stream handler that stops writing when the reader of a pipe, such as ``head``, has ended.

    If SIGTERM has a handler, it is raised, so that a run saves and ends. Other programs
    continue without lines.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's name
        """Stop writing after a broken pipe; handle other errors as logging does."""
        if not isinstance(sys.exception(), BrokenPipeError):
            super().handleError(record)
            return
        logging.getLogger().removeHandler(self)
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            signal.raise_signal(signal.SIGTERM)


def set_up(is_reporter: bool) -> Console:
    """Configure logging: the reporting rank logs to standard output, the others only warnings.

    Other ranks log to standard error, which launchers store for every rank. They leave out
    warnings of this package, which all ranks would repeat.

    Returns:
        The console for a progress bar.
    """
    console = Console(soft_wrap=True, highlight=False)
    handler: logging.Handler = LineHandler(sys.stdout if is_reporter else sys.stderr)
    if is_reporter and console.is_terminal:
        handler = RichHandler(
            console=console, show_time=False, show_level=False, show_path=False, markup=False
        )
    handler.setFormatter(logging.Formatter("%(message)s"))
    top = logging.getLogger()
    top.handlers[:] = [handler]
    top.setLevel(logging.INFO if is_reporter else logging.WARNING)
    logging.getLogger(ROOT).setLevel(logging.NOTSET if is_reporter else logging.ERROR)
    return console


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Numbers of the steps between two reports; averages unless stated otherwise.

    Losses are averaged over the steps that were not skipped.
    """

    iteration: int
    train_iters: int
    consumed_train_samples: int
    consumed_train_tokens: int
    step_ms: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float
    """Share of the device's peak, 0 to 1; 0 if the peak is not known."""
    lr: float
    """Learning rate of the last update; 0 if all steps were skipped."""
    global_batch_size: int
    loss: float
    """Nats per token."""
    aux_loss: float
    """Auxiliary losses of experts times their coefficients; 0 without experts."""
    grad_norm: float
    """Gradient norm of the last step, before clipping."""
    peak_gib: float
    """Peak of allocated memory on this device; 0 on a CPU."""
    loss_scale: float = 0.0
    """Factor of the loss under --fp16; 0 in other formats."""
    skipped_steps: int = 0
    """Steps without an update: their scaled gradients overflowed, or they were spikes."""
    expert_imbalance: float = 0.0
    """Rows of the busiest expert over the mean, largest value over the layers; 1 is perfect
    balance, 0 without experts."""
    load_balancing_loss: float = 0.0
    """Mean over the layers of experts, without coefficient."""
    z_loss: float = 0.0
    """Router z-loss: mean over the layers of experts, without coefficient."""
    loss_name: str = "lm loss"
    """Name of the main loss in the line."""
    other_losses: Mapping[str, float] = field(default_factory=dict)
    """Means of the other losses and metrics, by name, without coefficients."""
    experts: Mapping[str, float] = field(default_factory=dict)
    """Router statistics (``SUMMARY_COLUMNS``) by layer, such as ``imbalance/layer_3``."""

    def line(self) -> str:
        """Format the report as one line in Megatron's format."""
        parts = [
            f"iteration {self.iteration:8d}/{self.train_iters:8d}",
            f"consumed samples: {self.consumed_train_samples:12d}",
            f"elapsed time per iteration (ms): {self.step_ms:.1f}",
            f"tokens/s: {self.tokens_per_s:.0f}",
            f"tokens/s/GPU: {self.tokens_per_s_per_gpu:.0f}",
            f"throughput per GPU (TFLOP/s/GPU): {self.tflops_per_gpu:.1f}",
            f"MFU: {100 * self.mfu:.1f}%" if self.mfu else "",
            f"learning rate: {self.lr:.6E}",
            f"global batch size: {self.global_batch_size:5d}",
            f"{self.loss_name}: {self.loss:.6E}",
            *(f"{name}: {value:.6E}" for name, value in self.other_losses.items()),
            f"load_balancing_loss: {self.load_balancing_loss:.6E}"
            if self.load_balancing_loss
            else "",
            f"z_loss: {self.z_loss:.6E}" if self.z_loss else "",
            f"expert imbalance: {self.expert_imbalance:.2f}" if self.experts else "",
            f"loss scale: {self.loss_scale:.1f}" if self.loss_scale else "",
            f"number of skipped iterations: {self.skipped_steps:3d}"
            if self.loss_scale or self.skipped_steps
            else "",
            f"grad norm: {self.grad_norm:.3f}",
            f"memory (GiB): {self.peak_gib:.1f}" if self.peak_gib else "",
        ]
        return " " + " | ".join(part for part in parts if part) + " |"

    def numbers(self) -> dict[str, float | int]:
        """Return the report as a flat table with stable keys, without numbers by layer."""
        excluded = ("experts", "other_losses", "loss_name")
        table = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in excluded}
        return table | {n.replace(" ", "_"): value for n, value in self.other_losses.items()}


class Reporter:
    """Context manager that writes the reports of a run; no effect on other ranks.

    A run that continues appends to the existing files. Each JSON line has the number of its
    attempt and the step from which the attempt continues, so that ``read_metrics`` can leave
    out later steps of earlier attempts.
    """

    def __init__(
        self,
        console: Console | None,
        *,
        metrics_file: Path | None = None,
        samples_file: Path | None = None,
        spikes_file: Path | None = None,
        loggers: Iterable[Logger] = (),
        with_lines: bool = True,
        continues_from: int = 0,
        health: Health | None = None,
    ) -> None:
        """Store the options; ``__enter__`` opens the files.

        Args:
            console: console for a progress bar; None on ranks that do not report.
            metrics_file: file of JSON lines to append to.
            samples_file: file for texts that the model generates, as JSON lines.
            spikes_file: file for steps that were left out, as JSON lines.
            loggers: loggers of every number; a logger that fails is removed.
            with_lines: whether to log a line for each report.
            continues_from: number of steps before this attempt.
            health: state of the health endpoint, on a rank that serves it.
        """
        self.is_active = console is not None
        self._health = health
        self.with_lines = with_lines
        self.continues_from = continues_from
        self._attempt = 1
        self._alarms: dict[str, str] = {}
        self._metrics_file = metrics_file if self.is_active else None
        self._samples_file = samples_file if self.is_active else None
        self._spikes_file = spikes_file if self.is_active else None
        self._metrics: IO[str] | None = None
        self._progress = None
        self._task: Any = None
        if console is not None and console.is_terminal:
            self._progress = _progress_bar(console)
        self.loggers = list(loggers) if self.is_active else []
        self._reported, self._run_id = 0, uuid.uuid4().hex[:12]

    def __enter__(self) -> "Reporter":
        if self._metrics_file is not None:
            self._metrics_file.parent.mkdir(parents=True, exist_ok=True)
            self._begin_attempt(self._metrics_file)
            self._metrics = _open_to_append(self._metrics_file)
        attempt = Attempt(
            run_id=self._run_id,
            number=self._attempt,
            continues_from=self.continues_from,
            reported=self._reported,
            folder=None if self._metrics_file is None else self._metrics_file.parent,
        )
        self._call_loggers(lambda logger: logger.begin(attempt))
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._metrics is not None:
            self._metrics.close()
        self._call_loggers(lambda logger: logger.close())

    def _begin_attempt(self, file: Path) -> None:
        """Determine the number of this attempt; log the abandoned steps of earlier attempts."""
        for row in _rows(file):
            self._attempt = max(self._attempt, row.get("attempt", 1) + 1)
            self._run_id = row.get("run_id", self._run_id)
            if row.get("kind") == "train":
                self._reported = max(self._reported, row["iteration"])
        kept = [row for row in read_metrics(file) if row["kind"] == "train"]
        newest = max((row["iteration"] for row in kept), default=0)
        if newest > self.continues_from:
            log.info(
                "attempt %d continues from step %d: rows of earlier attempts in %s for the "
                "steps %d to %d are ignored from now on",
                *(self._attempt, self.continues_from, file),
                *(self.continues_from + 1, newest),
            )

    def advance(self, iteration: int, train_iters: int, status: str = "") -> None:
        """Update the progress bar, without reading numbers from the device."""
        if self._health is not None:
            self._health.step(iteration)
        if self._progress is None:
            return
        if self._task is None:
            self._task = self._progress.add_task("", total=train_iters, status="")
        changes: dict[str, Any] = {"completed": iteration}
        if status:
            changes["status"] = status
        self._progress.update(self._task, **changes)

    def beat(self) -> None:
        """Record progress other than a step, for the health endpoint."""
        if self._health is not None:
            self._health.beat()

    def saved(self, iteration: int) -> None:
        """Record that the checkpoint of a step is durable, for the health endpoint."""
        if self._health is not None:
            self._health.checkpoint(iteration)

    def report_header(self, iteration: int, header: Header) -> None:
        """Write the description of a run as lines, as a JSON line and to loggers."""
        if self.with_lines:
            for line in header.lines:
                log.info("%s", line)
        if self._metrics is not None:
            row = {"kind": "run", **header.row, "iteration": iteration, **self._origin()}
            self._metrics.write(_json_line({**row, "run_id": self._run_id}))
            self._metrics.flush()
        self._call_loggers(lambda logger: logger.describe(header))

    def report(self, report: StepReport) -> None:
        """Write one training report to all outputs."""
        if self._health is not None:
            self._health.report(report.numbers())
        if not self.is_active:
            return
        if self.with_lines:
            log.info("%s", report.line())
        self.advance(report.iteration, report.train_iters, f"loss {report.loss:.3f}")
        self.record("train", report.iteration, report.numbers())
        if report.experts:
            self.record("experts", report.iteration, report.experts)

    def report_waterfall(self, waterfall: "Waterfall", alarms: "Sequence[Alarm]") -> None:
        """Write the waterfall of a step; log each new alarm as a warning."""
        if self.with_lines:
            log.info("%s", waterfall.line())
        self.record("waterfall", waterfall.iteration, waterfall.numbers())
        for alarm in alarms:
            if self._alarms.get(alarm.name) != alarm.flag:
                log.warning("%s", alarm.line())
            if self._metrics is not None:
                row = {"kind": "alarm", **asdict(alarm), "iteration": waterfall.iteration}
                self._metrics.write(_json_line({**row, **self._origin()}))
                self._metrics.flush()
        self._alarms = {alarm.name: alarm.flag for alarm in alarms}

    def record(self, kind: str, iteration: int, numbers: Mapping[str, float | int]) -> None:
        """Write numbers to the metrics file and to loggers.

        Args:
            kind: ``train``, ``valid`` or another word; lines of one kind have the same keys.
            iteration: steps done.
            numbers: stable keys, units in the keys.
        """
        if self._metrics is not None:
            row = {"kind": kind, **numbers, "iteration": iteration, **self._origin()}
            self._metrics.write(_json_line(row))
            self._metrics.flush()
        is_repeated = iteration <= self._reported
        self._call_loggers(
            lambda logger: logger.log(kind, iteration, numbers),
            to=[each for each in self.loggers if each.takes_back or not is_repeated],
        )

    def _call_loggers(
        self, call: Callable[[Logger], None], to: Sequence[Logger] | None = None
    ) -> None:
        """Call loggers; a logger that raises is removed with a warning."""
        for logger in list(self.loggers if to is None else to):
            try:
                call(logger)
            except Exception as error:  # noqa: BLE001 - clients of services may raise anything
                self.loggers.remove(logger)
                warn_of_failure(logger, error)

    def report_texts(self, iteration: int, texts: Iterable[tuple[str, str]]) -> None:
        """Log and write prompts and the texts that the model generated for them."""
        if not self.is_active:
            return
        rows = []
        for prompt, text in texts:
            log.info(" sample at iteration %d | %s%s", iteration, prompt, text)
            row = {"iteration": iteration, "prompt": prompt, "text": text, **self._origin()}
            rows.append(_json_line(row))
        _append(self._samples_file, rows)

    def report_spike(self, iteration: int, row: Mapping[str, Any]) -> None:
        """Write a step that was left out to the ledger of spikes."""
        _append(
            self._spikes_file, [_json_line({**row, "iteration": iteration, **self._origin()})]
        )

    def _origin(self) -> dict[str, float | int]:
        return {
            "attempt": self._attempt,
            "continues_from": self.continues_from,
            "time": round(time.time(), 3),
        }


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a ``metrics.jsonl`` or ``spikes.jsonl``, without repeated steps.

    If a run was killed after its last checkpoint, or continued from an earlier step, later
    attempts repeat steps; rows of earlier attempts for these steps are left out.
    """
    rows = list(_rows(file))
    begins: dict[int, int] = {}
    for row in rows:
        attempt = row.get("attempt", 1)
        begins[attempt] = min(row.get("continues_from", 0), begins.get(attempt, sys.maxsize))

    def is_kept(row: dict[str, Any]) -> bool:
        attempt = row.get("attempt", 1)
        return all(row["iteration"] <= begins[later] for later in begins if later > attempt)

    return [row for row in rows if is_kept(row)]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of JSON lines; skip a line that was cut by a kill."""
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and "iteration" in row:
                yield row


def _json_line(row: Mapping[str, Any]) -> str:
    """Return a row as a JSON line; nan and infinity, which JSON lacks, become null."""
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return json.dumps(plain, ensure_ascii=False) + "\n"


def _append(path: Path | None, lines: Sequence[str]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _open_to_append(path) as file:
            file.writelines(lines)


def _open_to_append(file: Path) -> IO[str]:
    """Open a file of JSON lines to append; end the last line if a kill has cut it."""
    opened = file.open("a+", encoding="utf-8")
    if opened.tell() > 0:
        with file.open("rb") as written:
            written.seek(-1, 2)
            if written.read() != b"\n":
                opened.write("\n")
    return opened


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
