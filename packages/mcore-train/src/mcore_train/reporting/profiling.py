"""``--profile``: torch's profiler, or a range for nsys, around some steps of chosen ranks.

Phases are ranges of the trace: each step, reading of data, compute with the actions of the
pipeline schedule, waits by group of ranks, the optimizer. They are the spans of ``StepClock``.
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
"""Of traces, in the folder of ``--save``."""
_NSYS = "NSYS_PROFILING_SESSION_ID"
"""Set by nsys in the processes that it starts."""


class StepProfiler:
    """Profiles the steps of a run that the options name: a context manager."""

    def __init__(self, run: Run) -> None:
        """Profile nothing yet."""
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
        """End a profile that the run did not come to the end of."""
        if self._profile is not None:
            self._stop()

    def before(self, step: int) -> None:
        """Begin to profile after ``--profile-step-start``; name the step."""
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
        """End the step, and the profile after ``--profile-step-end``."""
        if self._step is None:
            return
        self._step.__exit__(None, None, None)
        self._step = None
        self._clock.show(None)
        if step >= self._options.profile_step_end:
            self._stop()

    def _start(self) -> None:
        if self._is_nsys:  # which takes what lies between start and stop, by its own option
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
        log.info("the profile of rank %d is in %s: mcore-train profile FILE", self._rank, file)
