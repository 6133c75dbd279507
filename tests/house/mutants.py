"""Planting the mutants of both registers in a copy of the repository, and running tests on it.

A mutant of tests/mutations.toml is a silent bug; one of docs/coverage.toml takes the feature of
its row out.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path

from house.rows import MUTATIONS, Row, named_tests, read_rows
from house.sources import PACKAGES, ROOT

COMPARISON = r"AssertionError|DID NOT RAISE|^E +assert "
"""How pytest shows that a test saw something."""


def mutants(register: Path = MUTATIONS) -> list[Row]:
    """Return the rows of a register that have a mutant."""
    return [row for row in read_rows(register) if "file" in row]


def source_of(row: Row) -> Path:
    """Return the file that a mutant changes: of a package, or any path of the repository."""
    top = row["file"].split("/")[0]
    if top.startswith("mcore_"):
        return ROOT / "packages" / top.replace("_", "-") / "src" / row["file"]
    return ROOT / row["file"]


def killer_of(row: Row) -> str:
    """Return the test that kills a mutant: the only one of its row, or the first."""
    return named_tests(row)[0]


def planted(row: Row) -> str:
    """Return the text of the file with the mutant in.

    Raises:
        ValueError: if the text to be replaced is not in the file exactly once.
    """
    text = source_of(row).read_text()
    count = text.count(row["replace"])
    if count != 1:
        raise ValueError(
            f"{row['id']}: {row['replace']!r} stands {count} times in {row['file']}"
        )
    return text.replace(row["replace"], row["by"])


def changes(row: Row) -> bool:
    """Whether a mutant changes its file; of Python, more than comments and layout.

    Raises:
        ValueError: as ``planted``.
        SyntaxError: if the mutant is no Python any more.
    """
    mutant, original = planted(row), source_of(row).read_text()
    if not row["file"].endswith(".py"):
        return mutant != original
    # Statements that end before the change are those of the original.
    line = original.count("\n", 0, original.index(row["replace"])) + 1
    pairs = zip_longest(*(_dumps(body, line) for body in (_body(mutant), _kept(original))))
    return any(changed != unchanged for changed, unchanged in pairs)


def _body(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


_kept = cache(_body)  # of files that several mutants change


def _dumps(body: list[ast.stmt], line: int) -> Iterator[str]:
    """Yield the syntax of each statement of a module that ends on a line or after it."""
    for node in body:
        if (node.end_lineno or 0) >= line:
            yield ast.dump(node)


def is_seen(row: Row, output: str) -> bool:
    """Whether a test ended by a comparison, and not by a crash on the way to it."""
    sign = re.escape(row["sees"]) if "sees" in row else COMPARISON
    return re.search(sign, output, re.MULTILINE) is not None


def run_with(row: Row, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the row's test on a repository with the mutant; the working tree is not touched."""
    options = ["-x", "-q", "-p", "no:cacheprovider"]
    return _run_planted(row, folder, "pytest", *options, killer_of(row))


def verify_with(row: Row, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``mcore-train verify gpt`` with the row's flags on sources that have the bug."""
    return _run_planted(row, folder, "mcore_train", "verify", "gpt", *row["verify"].split())


def _run_planted(row: Row, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # not one that was deleted and is not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / source_of(row).relative_to(ROOT)).write_text(planted(row))
    sources = [str(folder / f"packages/mcore-{package}/src") for package in PACKAGES]
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sources),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
