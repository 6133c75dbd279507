"""The check that runs everything: complete, and failing when any of its parts fails."""

import os
import re
import stat
import subprocess

import pytest
from house.sources import ROOT
from warm_ranks import run_command

SCRIPT = ROOT / ".ci/run"
STEPS = ["lint", "types", "contracts", "wheels", "tests"]


def test_the_script_can_be_run_and_parses():
    assert SCRIPT.stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_every_step_is_a_nox_session():
    steps = re.findall(r"^step (\w+) .* nox -s (\w+)$", SCRIPT.read_text(), re.MULTILINE)
    assert steps == [(name, name) for name in STEPS]
    sessions = re.findall(
        r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE
    )
    assert set(STEPS) <= set(sessions)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], ["ruff check .", "ruff format --check ."]),
        (["--", "--fix"], ["ruff check --fix .", "ruff format ."]),
    ],
)
def test_one_command_checks_the_style_or_mends_it(tmp_path, words, wanted):
    fake = tmp_path / "uv"  # says what it would run
    # nox may look at uv's version first.
    fake.write_text('#!/bin/sh\n[ "$1" = run ] && shift 2 && echo "$@" >> "$0.log"\n')
    fake.chmod(0o755)
    done = run_command(
        *("nox", "-f", ROOT / "noxfile.py", "--envdir", tmp_path / "envs", "-s", "lint"),
        *words,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "uv.log").read_text().splitlines() == wanted


def test_the_readme_gives_the_test_command_that_the_script_runs():
    assert "uv run nox -s tests" in (ROOT / "README.md").read_text()
    assert "step tests uv run nox -s tests" in SCRIPT.read_text()


@pytest.mark.parametrize("broken", [*STEPS, ""])
def test_a_step_that_fails_fails_the_script_and_the_others_still_run(tmp_path, broken):
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_text(SCRIPT.read_text())
    fake = tmp_path / "uv"  # answers as uv would, without doing anything
    fake.write_text(
        f'#!/bin/sh\necho "$@"\ncase "$*" in *"nox -s {broken or "-"}"*) exit 1;; esac\n'
    )
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (1 if broken else 0), done.stderr
    assert [name for name in STEPS if f"nox -s {name}" in done.stdout] == STEPS
    assert (f"failed: {broken}" in done.stdout) is bool(broken)
