"""The check that runs everything: complete, and failing when any of its parts fails."""

import json
import os
import re
import stat
import subprocess

import pytest
import yaml
from house.sources import ROOT
from warm_ranks import run_command

SCRIPT = ROOT / ".ci/run"
STEPS = ["lint", "types", "contracts", "house", "wheels", "tests"]


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


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        (
            [{"name": "a", "skip_reason": "not found"}] * 2,
            "not audited: the package index has no",
        ),
        ([{"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1"}]}], "a 1: PYSEC-1"),
        ([{"name": "a", "version": "1", "vulns": []}], ""),
        ([], "not audited: pip-audit wrote no report"),
    ],
)
def test_an_audit_without_advisories_is_not_a_finding(tmp_path, packages, message):
    report = json.dumps({"dependencies": packages})
    writes = f"while [ $1 != --output ]; do shift; done\necho '{report}' > $2\n"
    for name, text in (("uv", "true"), ("uvx", f"{writes if packages else ''}exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = run_command(
        *("nox", "-f", ROOT / "noxfile.py", "--envdir", tmp_path / "envs", "-s", "audit"),
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert (done.returncode == 0) == (not message), done.stdout + done.stderr
    assert message in done.stdout + done.stderr


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


def workflow(name: str) -> dict:
    """Return a workflow of the forge."""
    return yaml.safe_load((ROOT / ".github/workflows" / name).read_text())


def test_the_forge_runs_sessions_that_exist_on_the_oldest_and_the_newest_python():
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.M))
    jobs = workflow("ci.yml")["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    named = {word for run in steps for word in re.findall(r"nox -s ([a-z_ ]+)", run)}
    assert set(" ".join(named).split()) == {
        "lint",
        "types",
        "contracts",
        "automation",
        "wheels",
    }
    matrix = jobs["tests"]["strategy"]["matrix"]["session"]
    assert matrix == ["house", "tests", "tests_newest-3.11", "tests_newest-3.13"]
    assert {name.partition("-")[0] for name in (*matrix, *" ".join(named).split())} <= sessions
    assert any("pytest -q tests/docs" in run for run in steps)


def test_both_images_and_both_environments_are_tested():
    image = workflow("gpu.yml")["jobs"]["image"]
    assert image["strategy"]["matrix"]["image_type"] == ["dev", "lts"]
    assert "docker/.ngc_version.$IMAGE_TYPE" in image["steps"][1]["run"]
    (environment,) = workflow("ci.yml")["jobs"]["golden"]["strategy"]["matrix"]["environment"]
    assert re.search(r"'container::lts'\) && 'lts' \|\| 'dev'", environment)


def test_labels_choose_the_tier_that_the_page_gives():
    page = (ROOT / "docs/golden-runs.md").read_text()
    rows = dict(re.findall(r"^\| (?:`(Run [a-z ]+)`|none) \| `(--tier [^`]+)`", page, re.M))
    choice = workflow("ci.yml")["jobs"]["golden"]["env"]["GOLDEN"]
    labels = dict(re.findall(r"name, '(Run [a-z ]+)'\) && '([^']+)'", choice))
    default = re.search(r"\|\| '([^']+)' \}\}", choice)
    assert default
    assert labels | {"": default[1]} == rows
    assert len(rows) == 3
    assert "github.event_name != 'pull_request' && '--tier golden'" in choice
