"""Finds slow ranks by scores of their GEMMs, links, steps and data loading.

A score is a rank's rate over the median of comparable ranks: 1 is usual, 0.5 half as fast. A
rank that is below the threshold in two consecutive reports of a kind is logged with its host
(``SlowRanks``); a single slow step is not logged. Scores have two sources. The waterfall scores
the work of one step. With ``--log-straggler`` each rank also times its waits for data and, on a
CPU, the share of a step in which it did not wait for other ranks; at an interval all ranks
multiply a matrix, exchange a message with a neighbour, and gather the four numbers. The
interval grows until these reports take less than ``MAX_SHARE`` of the time.
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

MAX_SHARE = 0.003
"""Largest share of a report in the time between two reports."""
GEMM_SIDE = {"cuda": 4096, "cpu": 256}
MESSAGE_BYTES = {"cuda": 1 << 22, "cpu": 1 << 16}
SAMPLES = 50
"""Samples of the stack in one step."""
KINDS = ("gemm", "link", "step", "data")
"""Kinds of scores: a GEMM, the exchange with a neighbour, the time of a step without waits for
other ranks, and the share of a step without waits for data."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that was slow in two reports in a row."""

    rank: int
    host: str
    kind: str
    """One of ``KINDS``."""
    score: float
    """Rate over the median rate; 1 is usual."""

    def __str__(self) -> str:
        """Describe the rank for the log."""
        activity = {
            "gemm": "multiplies matrices",
            "link": "exchanges messages",
            "step": "computes its part of a step",
            "data": "gets its batches",
        }[self.kind]
        rate = f"{self.score:.2f} of the usual rate"
        return f"rank {self.rank} on {self.host} {activity} at {rate}"


def scores(numbers: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Divide each rank's rates by the median over ranks; a rank without a rate scores 1.

    Args:
        numbers: rates by kind, one for each rank; NaN for a rank without a rate.
    """
    by_kind = {}
    for kind, rates in numbers.items():
        known = [rate for rate in rates if math.isfinite(rate) and rate > 0]
        median = statistics.median_high(known) if known else 1.0
        by_kind[kind] = [rate / median if math.isfinite(rate) else 1.0 for rate in rates]
    return by_kind


class SlowRanks:
    """Finds ranks whose scores are below a threshold twice in a row.

    Attributes:
        found: stragglers by the newest scores of each kind.
    """

    def __init__(self, hosts: Sequence[str], threshold: float) -> None:
        """Begin without scores.

        Args:
            hosts: host name of each rank.
            threshold: score below which a rank is slow.
        """
        self.found: list[Straggler] = []
        self._hosts, self._threshold = hosts, threshold
        self._low: dict[str, set[int]] = {}
        self._scored_at: dict[str, int] = {}

    def add(self, step: int, scores: Mapping[str, Sequence[float]]) -> None:
        """Compare new scores with the threshold; log ranks that became slow or recovered.

        Args:
            step: step of the scores.
            scores: scores by kind, one for each rank.
        """
        for kind, by_rank in scores.items():
            before = {each.rank for each in self.found if each.kind == kind}
            low = {rank for rank, score in enumerate(by_rank) if score < self._threshold}
            twice = low & self._low.get(kind, set())
            slow = [Straggler(r, self._hosts[r], kind, by_rank[r]) for r in sorted(twice)]
            for straggler in slow:
                if straggler.rank not in before:
                    log.warning("%s, since step %d", straggler, self._scored_at[kind])
            for rank in sorted(before - low):
                host = self._hosts[rank]
                log.info("rank %d on %s is as fast as others again (%s)", rank, host, kind)
            self.found = [each for each in self.found if each.kind != kind] + slow
            self._low[kind], self._scored_at[kind] = low, step


class StragglerWatch:
    """Measures the scores of all ranks of a run; every method is collective.

    Attributes:
        interval: current number of steps between reports.
        slow_ranks: finds slow ranks by their scores.
    """

    def __init__(self, ctx: ParallelContext, config: WatchConfig, reporter: Reporter) -> None:
        """Gather host names; without ``--log-straggler`` only ``add_work`` has an effect.

        Args:
            ctx: axes of all ranks.
            config: interval and threshold.
            reporter: writes each report as a record ``stragglers``.
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
        """Add the waterfall's scores of the work in one step.

        Without ``--log-straggler`` only scores of GPUs are used: on a CPU other processes of
        the host make single steps slow.
        """
        if self.is_on or self._ctx.device.type == "cuda":
            self.slow_ranks.add(step, {"step": scores})

    def timed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yield the batches of an iterator, and measure the time to get them."""
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
        """Context of step ``number``; reports after the last step of an interval.

        Raises:
            RuntimeError: if another rank is lost.
        """
        if not self.is_on:
            yield
            return
        began_s, data_s = time.perf_counter(), self._data_s
        is_last = number >= self._due
        is_first = not self._last_s
        # On a GPU the host runs ahead of the device, so its stack does not show the device's
        # work.
        on_cpu = self._ctx.device.type == "cpu"
        sampler = (
            _Sampler(self._last_s / SAMPLES) if is_last and on_cpu and not is_first else None
        )
        try:
            yield
        finally:
            share = sampler.stop() if sampler is not None else math.nan
        self._last_s = elapsed_s = time.perf_counter() - began_s
        self._step_s += elapsed_s
        if is_first:  # the first step loads kernels and files
            self._step_s = self._data_s = 0.0
        if is_last:
            self._busy_s = elapsed_s * share - (self._data_s - data_s)
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
        by_kind = scores(dict(zip(KINDS, columns, strict=True)))
        self.slow_ranks.add(number, by_kind)
        # Costs of the previous report. The smallest counts: the last rank waited for no other.
        if min(costs) > MAX_SHARE:
            self.interval = math.ceil(self.interval * min(costs) / MAX_SHARE)
            log.info(
                "straggler reports take too much time: the interval is now %d steps",
                self.interval,
            )
        self._due = number + self.interval
        self._data_s = self._step_s = self._busy_s = 0.0
        self._reported_s = time.perf_counter()
        self._cost_s = self._reported_s - began_s
        worst = {
            f"{kind}_{name}": value
            for kind, by_rank in by_kind.items()
            for name, value in (
                ("lowest_score", min(by_rank)),
                ("lowest_rank", by_rank.index(min(by_rank))),
            )
        }
        self._reporter.record("stragglers", number, {**worst, "cost_ms": 1e3 * self._cost_s})


class _Sampler:
    """Thread that samples the stack of its creator, and counts samples without a wait."""

    def __init__(self, period_s: float) -> None:
        self._period_s = max(period_s, 1e-3)
        self._sampled_thread = threading.get_ident()
        self._ended = threading.Event()
        self._num_samples = self._num_busy = 0
        self._thread = threading.Thread(target=self._run, name="stragglers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            self._num_samples += 1
            self._num_busy += not is_waiting(sys._current_frames(), self._sampled_thread)

    def stop(self) -> float:
        """Return the share of samples without a wait; NaN if there are fewer than five."""
        self._ended.set()
        self._thread.join()
        if self._num_samples < 5:
            return math.nan
        return max(self._num_busy, 1) / self._num_samples
