"""Rows that point at tests: what both registers, coverage and mutations, have in common."""

import ast
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from house.sources import ROOT

Row = dict[str, Any]

COVERAGE = ROOT / "docs/coverage.toml"
MUTATIONS = ROOT / "tests/mutations.toml"


def named_tests(row: Row) -> list[str]:
    """Return the tests that a row names: one, or several that show it together."""
    named = row.get("test", [])
    return [named] if isinstance(named, str) else named


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a register."""
    return tomllib.loads(path.read_text())["row"]


def topics() -> set[str]:
    """Return the names that `open` may give."""
    return set(tomllib.loads(COVERAGE.read_text())["topics"])


def faults(rows: Iterable[Row], outcomes: set[str], topics: set[str]) -> list[str]:
    """Return what is wrong with rows: no single outcome, an unknown topic, a missing test."""
    found = []
    for row in rows:
        given = outcomes & set(row)
        if len(given) != 1:
            found.append(f"{row['id']}: give one of {sorted(outcomes)}, not {sorted(given)}")
        elif not row[given.pop()] or not row.get("what"):
            found.append(f"{row['id']}: an empty value")
        elif "open" in row and row["open"] not in topics:
            found.append(f"{row['id']}: unknown topic {row['open']}")
        else:
            missing = [name for name in named_tests(row) if not is_collected(name)]
            found += [f"{row['id']}: no test {name}" for name in missing]
    return found


def is_collected(node: str) -> bool:
    """Whether pytest would collect a node, ``file.py::test_name`` or with ``[parameters]``."""
    file, _, name = node.partition("::")
    name, _, parameters = name.partition("[")
    tests = _tests_of(ROOT / file)
    return name in tests and (not parameters or "parametrize" in tests[name])


def is_in_default_suite(node: str) -> bool:
    """Whether no mark that the default suite leaves out is on a test or its whole file."""
    file, _, name = node.partition("::")
    return not _tests_of(ROOT / file)[name.partition("[")[0]] & _left_out()


@cache
def _tests_of(file: Path) -> dict[str, set[str]]:
    """Map the test functions of a file to their marks, with those of the file."""
    if not file.is_file() or not file.name.startswith("test_"):
        return {}
    body = ast.parse(file.read_text()).body
    of_all = [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return {
        node.name: {mark for each in (*of_all, *node.decorator_list) for mark in _marks(each)}
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _marks(node: ast.expr) -> list[str]:
    """Return the marks that an expression puts on a test, not those of single parameters."""
    if isinstance(node, ast.List):
        return [mark for each in node.elts for mark in _marks(each)]
    return re.findall(r"^pytest\.mark\.(\w+)", ast.unparse(node))


@cache
def _left_out() -> set[str]:
    """Return the marks whose tests the default suite does not run."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    options = config["tool"]["pytest"]["ini_options"]["addopts"]
    return set(re.findall(r"not (\w+)", " ".join(options)))
