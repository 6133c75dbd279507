"""Triton kernels without a GPU: interpreted, against their plain twins."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("interpreted_kernels.py")


def test_interpreted_kernels_equal_their_plain_twins():
    # A process of its own: Triton decides when it is imported.
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": equal") == 6, done.stdout
