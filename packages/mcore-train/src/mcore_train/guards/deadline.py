"""Computes when a run must save and end: after some minutes, or before its job ends."""

import os
import time
from pathlib import Path

from mcore_train.config import RunConfig

SLURM_END = "SLURM_JOB_END_TIME"
"""Environment variable with the end of a Slurm job, in seconds since 1970."""

RESERVE_S = 300.0
"""Time reserved for the last save; at most a tenth of the job's time."""


class Deadline:
    """Time at which a run must save and end, by ``--exit-duration-in-mins``."""

    def __init__(self, config: RunConfig) -> None:
        """Compute the end; ``auto`` reads it from the environment.

        Raises:
            ValueError: if ``auto`` finds no end time in the environment.
        """
        minutes, age_s = config.exit_duration_in_mins, process_age_s()
        self._end_s = float("inf")
        self._reserve_s = self._save_share = 0.0
        if minutes == "auto":
            left_s = _slurm_end_s() - time.time()
            self._end_s = time.monotonic() + left_s
            self._reserve_s = min(RESERVE_S, 0.1 * (left_s + age_s))
            self._save_share = 2.0
        elif minutes:
            self._end_s = time.monotonic() - age_s + 60.0 * minutes

    def is_over(self, longest_save_s: float = 0.0) -> bool:
        """Whether to save and end now.

        Args:
            longest_save_s: longest time of a save so far; ``auto`` reserves twice this time.
        """
        reserve_s = max(self._reserve_s, self._save_share * longest_save_s)
        return time.monotonic() >= self._end_s - reserve_s


def process_age_s() -> float:
    """Return the time since this process started; 0.0 without /proc."""
    try:
        text = Path("/proc/self/stat").read_text()
    except OSError:
        return 0.0
    # The second field is the name in parentheses, which may contain blanks and parentheses;
    # the start time is field 22, the 20th after the name.
    started_ticks = int(text.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def _slurm_end_s() -> float:
    text = os.environ.get(SLURM_END, "")
    if not text.isdecimal():
        raise ValueError(
            f"--exit-duration-in-mins auto needs {SLURM_END}, which Slurm sets in a job; it is "
            f"{text!r}. Give a number of minutes."
        )
    return float(text)
