"""When a run ends by itself: minutes from the program's start, or the end of a batch job."""

import subprocess
import sys
import time

import pytest

from mcore_train.config import RunConfig
from mcore_train.guards.deadline import RESERVE_S, Deadline


def deadline(minutes):
    return Deadline(RunConfig(exit_duration_in_mins=minutes))


def test_the_time_before_the_first_import_counts():
    code = "import time; time.sleep(0.4); from mcore_train.guards.deadline import process_age_s"
    code += "; print(process_age_s())"
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0.4 < float(done.stdout) < time.monotonic() - began_s + 0.1


def test_a_job_that_ends_leaves_time_for_its_last_save(monkeypatch):
    assert not deadline(0.0).is_over(longest_save_s=1e9)
    for left_s, longest_save_s, is_over in (
        (2 * RESERVE_S, 0.0, False),
        (2 * RESERVE_S, 0.9 * RESERVE_S, False),
        (2 * RESERVE_S, 1.1 * RESERVE_S, True),
        (-1.0, 0.0, True),
    ):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + left_s)))
        assert deadline("auto").is_over(longest_save_s) == is_over
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    with pytest.raises(ValueError, match="auto needs SLURM_JOB_END_TIME, which Slurm sets"):
        deadline("auto")
