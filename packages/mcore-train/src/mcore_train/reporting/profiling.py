"""``--profile``: profiles some steps of selected ranks with torch's profiler or nsys.

The trace has a range for each step and each span of ``StepClock``: reading of data, compute
with the actions of the pipeline schedule, waits by process group, and the optimizer.
"""

import logging
import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from mcore_train.assembly import Run
from mcore_train.reporting.kernel_split import STEP

log = logging.getLogger(__name__)

FOLDER = "profiles"
"""Folder of traces in the ``--save`` folder."""
_NSYS = "NSYS_PROFILING_SESSION_ID"
"""Environment variable that nsys sets in the processes that it starts."""


class StepProfiler:
    """Context manager that profiles the steps of a run that the options select."""

    def __init__(self, run: Run) -> None:
        """Read the options; profiling begins in ``before``."""
        config, rank = run.plan.config, run.ctx.global_rank
        self._options, self._clock, self._rank = config.profiling, run.ctx.clock, rank
        self._folder = Path(config.saving.save) / FOLDER
        self._is_on = self._options.profile and rank in self._options.profile_ranks
        self._has_device = run.ctx.device.type == "cuda"
        self._is_nsys = self._has_device and _NSYS in os.environ
        self._profile: Any = None
        self._step: AbstractContextManager | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End a profile that is still active."""
        if self._profile is not None:
            self._stop()

    def before(self, step: int) -> None:
        """Start the profiler after ``--profile-step-start``; open the step's range."""
        options = self._options
        if not self._is_on or not options.profile_step_start < step <= options.profile_step_end:
            return
        if self._profile is None:
            self._start()
        annotate = torch.cuda.nvtx.range if self._is_nsys else torch.profiler.record_function
        self._clock.show(annotate)
        self._step = annotate(f"{STEP}{step}")
        self._step.__enter__()

    def after(self, step: int) -> None:
        """Close the step's range; stop the profiler after ``--profile-step-end``."""
        if self._step is None:
            return
        self._step.__exit__(None, None, None)
        self._step = None
        self._clock.show(None)
        if step >= self._options.profile_step_end:
            self._stop()

    def _start(self) -> None:
        if self._is_nsys:  # nsys --capture-range=cudaProfilerApi records from start to stop
            self._profile = cudart = torch.cuda.cudart()
            cudart.cudaProfilerStart()  # pyrefly: ignore
            return
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, kinds.CUDA] if self._has_device else [kinds.CPU]
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.__enter__()

    def _stop(self) -> None:
        profile, self._profile = self._profile, None
        if self._has_device:
            torch.cuda.synchronize()
        if self._is_nsys:
            profile.cudaProfilerStop()
            return
        profile.__exit__(None, None, None)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"rank{self._rank}.json.gz"
        profile.export_chrome_trace(str(file))
        log.info("rank %d wrote %s: read it by mcore-train profile FILE", self._rank, file)
