"""Planting the silent bugs of tests/mutations.toml in a copy of the sources."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from house.rows import MUTATIONS, read_rows
from house.sources import PACKAGES, ROOT

Row = dict[str, str]

COMPARISON = r"AssertionError|DID NOT RAISE|^E +assert "
"""How pytest shows that a test saw something."""


def mutants() -> list[Row]:
    """Return the rows that have a mutant."""
    return [row for row in read_rows(MUTATIONS) if "file" in row]


def source_of(row: Row) -> Path:
    """Return the file that a mutant changes."""
    package = row["file"].split("/")[0].replace("_", "-")
    return ROOT / "packages" / package / "src" / row["file"]


def killer_of(row: Row) -> str:
    """Return the test that kills a mutant."""
    return row["test"]


def planted(row: Row) -> str:
    """Return the text of the file with the bug in.

    Raises:
        ValueError: if the text to be replaced does not stand there exactly once.
    """
    text = source_of(row).read_text()
    count = text.count(row["replace"])
    if count != 1:
        raise ValueError(
            f"{row['id']}: {row['replace']!r} stands {count} times in {row['file']}"
        )
    return text.replace(row["replace"], row["by"])


def is_seen(row: Row, output: str) -> bool:
    """Whether a test ended by a comparison, and not by a crash on the way to it."""
    sign = re.escape(row["sees"]) if "sees" in row else COMPARISON
    return re.search(sign, output, re.MULTILINE) is not None


def run_with(row: Row, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the row's test on sources that have the bug; the working tree is not touched."""
    options = ["-x", "-q", "-p", "no:cacheprovider"]
    return _run_planted(row, folder, "pytest", *options, killer_of(row))


def verify_with(row: Row, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``mcore-train verify gpt`` with the row's flags on sources that have the bug."""
    return _run_planted(row, folder, "mcore_train", "verify", "gpt", *row["verify"].split())


def _run_planted(row: Row, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    for package in PACKAGES:
        shutil.copytree(
            ROOT / f"packages/mcore-{package}/src",
            folder,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    (folder / row["file"]).write_text(planted(row))
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
