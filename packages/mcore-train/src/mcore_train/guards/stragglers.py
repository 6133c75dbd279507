"""Scores of every rank: which ranks are slow, and in what.

A score is a rank's rate over the median of comparable ranks: 1 is usual, 0.5 half as fast. A
rank below the threshold in two reports of one kind in a row is named with its host
(``SlowRanks``); one slow step names nobody. Two sources report scores. The waterfall scores the
work of one step. With ``--log-straggler`` each rank also times its waits for data and, on a
CPU, the share of a step in which it did not wait for other ranks; at an interval all ranks
multiply one matrix, exchange one message with a neighbour, and gather the four numbers. The
interval grows until these reports cost less than ``MOST_SHARE`` of the time.
"""

import logging
import math
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_parallel.collectives import all_gather
from mcore_parallel.launch import launcher
from mcore_parallel.launch.watchdog import is_waiting
from mcore_parallel.mesh import ParallelContext
from mcore_train.config import WatchConfig
from mcore_train.diagnosis import probes
from mcore_train.reporting.log import Reporter

log = logging.getLogger(__name__)

Item = TypeVar("Item")

MOST_SHARE = 0.003
"""Of the time between two reports that a report may take."""
GEMM_SIDE = {"cuda": 4096, "cpu": 256}
MESSAGE_BYTES = {"cuda": 1 << 22, "cpu": 1 << 16}
SAMPLES = 50
"""Looks at the stack in one step."""
KINDS = ("gemm", "link", "step", "data")
"""What is scored: a matrix product, the exchange with a neighbour, the part of a step in which
the rank waited for no other, and the part of a step in which it did not wait for data."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that was slow in two reports in a row."""

    rank: int
    host: str
    kind: str
    """One of ``KINDS``."""
    score: float
    """Of the median; 1 is usual."""

    def __str__(self) -> str:
        """Describe it for the log."""
        what = {
            "gemm": "multiplies matrices",
            "link": "exchanges messages",
            "step": "computes its part of a step",
            "data": "gets its batches",
        }[self.kind]
        return f"rank {self.rank} on {self.host} {what} at {self.score:.2f} of the usual rate"


def scores(numbers: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Divide each rank's rates by the median over ranks; a rank without a rate scores 1.

    Args:
        numbers: rates by kind, one for each rank; NaN where a rank has none.
    """
    found = {}
    for kind, rates in numbers.items():
        known = [rate for rate in rates if math.isfinite(rate) and rate > 0]
        usual = statistics.median_high(known) if known else 1.0
        found[kind] = [rate / usual if math.isfinite(rate) else 1.0 for rate in rates]
    return found


class SlowRanks:
    """Names ranks whose scores are below a threshold twice in a row.

    Attributes:
        found: stragglers of the newest scores of each kind.
    """

    def __init__(self, hosts: Sequence[str], threshold: float) -> None:
        """Begin without scores.

        Args:
            hosts: of each rank.
            threshold: score below which a rank is slow.
        """
        self.found: list[Straggler] = []
        self._hosts, self._threshold = hosts, threshold
        self._low: dict[str, set[int]] = {}
        self._scored_at: dict[str, int] = {}

    def add(self, step: int, scores: Mapping[str, Sequence[float]]) -> None:
        """Judge the scores of some kinds; log who is slow now, and who is no longer.

        Args:
            step: at which they were measured.
            scores: by kind, one for each rank.
        """
        for kind, by_rank in scores.items():
            before = {each.rank for each in self.found if each.kind == kind}
            low = {rank for rank, score in enumerate(by_rank) if score < self._threshold}
            twice = low & self._low.get(kind, set())
            named = [Straggler(r, self._hosts[r], kind, by_rank[r]) for r in sorted(twice)]
            for each in named:
                if each.rank not in before:
                    log.warning("%s, since step %d", each, self._scored_at[kind])
            for rank in sorted(before - low):
                host = self._hosts[rank]
                log.info("rank %d on %s is as fast as others again (%s)", rank, host, kind)
            self.found = [each for each in self.found if each.kind != kind] + named
            self._low[kind], self._scored_at[kind] = low, step


class StragglerWatch:
    """Scores ranks for one run; all ranks call every method together.

    Attributes:
        interval: steps between reports now.
        slow_ranks: judges the scores.
    """

    def __init__(self, ctx: ParallelContext, config: WatchConfig, reporter: Reporter) -> None:
        """Gather the hosts' names; without ``--log-straggler`` only ``add_work`` may act.

        Args:
            ctx: of all ranks.
            config: interval and threshold.
            reporter: gets each report as a record ``stragglers``.
        """
        self.is_on = config.log_straggler and ctx.world.size > 1
        self.interval = config.straggler_interval
        self._ctx, self._reporter = ctx, reporter
        self._due = self.interval
        self._data_s = self._busy_s = self._step_s = 0.0
        self._last_s = 0.0
        self._reported_s = time.perf_counter()
        self._cost_s = 0.0
        hosts = gather_json(
            [socket.gethostname(), launcher.read_environment().local_world_size], ctx.world
        )
        self._local_size = hosts[0][1]
        self.slow_ranks = SlowRanks([name for name, _ in hosts], config.straggler_threshold)

    def add_work(self, step: int, scores: Sequence[float]) -> None:
        """Judge the ranks' own work in one step, as the waterfall scores it.

        Without ``--log-straggler`` only work of GPUs is judged: on a CPU other processes on the
        host make single steps slow.
        """
        if self.is_on or self._ctx.device.type == "cuda":
            self.slow_ranks.add(step, {"step": scores})

    def timed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Pass batches on, and time the waits for them."""
        if not self.is_on:
            yield from batches
            return
        while True:
            began_s = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._data_s += time.perf_counter() - began_s
            yield batch

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context around step ``number``; after the last step of an interval, reports.

        Raises:
            RuntimeError: if a peer is lost.
        """
        if not self.is_on:
            yield
            return
        began_s, data_s = time.perf_counter(), self._data_s
        is_last = number >= self._due
        is_first = not self._last_s
        # The host runs ahead of a GPU: the stack of the host does not show the device's work.
        on_cpu = self._ctx.device.type == "cpu"
        sampler = (
            _Sampler(self._last_s / SAMPLES) if is_last and on_cpu and not is_first else None
        )
        try:
            yield
        finally:
            share = sampler.stop() if sampler is not None else math.nan
        self._last_s = took_s = time.perf_counter() - began_s
        self._step_s += took_s
        if is_first:  # it loads kernels and files
            self._step_s = self._data_s = 0.0
        if is_last:
            self._busy_s = took_s * share - (self._data_s - data_s)
            self._report(number)

    def _report(self, number: int) -> None:
        began_s = time.perf_counter()
        device = self._ctx.device
        distances = dict.fromkeys(d for d in (1, self._local_size) if d < self._ctx.world.size)
        links = [probes.pair_gbs(self._ctx, d, MESSAGE_BYTES[device.type]) for d in distances]
        rates = torch.tensor(
            [
                probes.gemm_tflops(device, GEMM_SIDE[device.type]),
                min((rate for rate in links if rate is not None), default=math.nan),
                1.0 / self._busy_s if self._busy_s > 0 else math.nan,
                1.0 - self._data_s / self._step_s if self._step_s else math.nan,
                self._cost_s / max(began_s - self._reported_s, 1e-9),
            ],
            dtype=torch.float64,
            device=device,
        )
        *columns, costs = all_gather(rates[None], self._ctx.world).t().tolist()
        found = scores(dict(zip(KINDS, columns, strict=True)))
        self.slow_ranks.add(number, found)
        # Of the last report. The rank that came last waited for no other: its cost counts.
        if min(costs) > MOST_SHARE:
            self.interval = math.ceil(self.interval * min(costs) / MOST_SHARE)
            log.info("straggler reports cost too much: every %d steps from now", self.interval)
        self._due = number + self.interval
        self._data_s = self._step_s = self._busy_s = 0.0
        self._reported_s = time.perf_counter()
        self._cost_s = self._reported_s - began_s
        worst = {
            f"{kind}_{what}": value
            for kind, by_rank in found.items()
            for what, value in (
                ("lowest_score", min(by_rank)),
                ("lowest_rank", by_rank.index(min(by_rank))),
            )
        }
        self._reporter.record("stragglers", number, {**worst, "cost_ms": 1e3 * self._cost_s})


class _Sampler:
    """A thread that looks at the stack of its maker and counts when it is not waiting."""

    def __init__(self, period_s: float) -> None:
        self._period_s = max(period_s, 1e-3)
        self._maker = threading.get_ident()
        self._ended = threading.Event()
        self._num_looks = self._num_busy = 0
        self._thread = threading.Thread(target=self._run, name="stragglers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            self._num_looks += 1
            self._num_busy += not is_waiting(sys._current_frames(), self._maker)

    def stop(self) -> float:
        """Return the share of looks at which the maker did not wait; NaN: too few."""
        self._ended.set()
        self._thread.join()
        if self._num_looks < 5:
            return math.nan
        return max(self._num_busy, 1) / self._num_looks
