"""mcore-train alone: the command trains a small model on mock data, saves and resumes."""

import tempfile
from pathlib import Path

from mcore_train import __version__
from mcore_train.cli import main

assert __version__[0].isdigit(), __version__

with tempfile.TemporaryDirectory() as folder:
    flags = [
        *("gpt", "--mock-data", "--vocab-size", "64", "--num-layers", "2"),
        *("--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
        *("--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-3"),
        *("--save", folder, "--log-interval", "1"),
    ]
    assert main([*flags, "--train-iters", "2"]) in (0, None)
    assert main(
        [*flags, "--train-iters", "3", "--load", folder, "--override-opt-param-scheduler"]
    ) in (0, None)
    tracker = Path(folder) / "latest_checkpointed_iteration.txt"
    assert tracker.read_text().strip() == "3"
