"""Triton kernels without a GPU: interpreted, against their references."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("interpreted_kernels.py")
UNDER_THE_HOOK = f"""
import runpy, sys
sys.path.append({str(SCRIPT.parents[4] / "tests")!r})
from mcore_parallel.testing.shape_checks import install_shape_checks
install_shape_checks()
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_interpreted_kernels_equal_their_plain_twins():
    # A process of its own: Triton decides when it is imported.
    done = subprocess.run(
        [sys.executable, "-c", UNDER_THE_HOOK],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": equal") == 18, done.stdout
