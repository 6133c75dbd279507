"""One wheel from its built file, as a user installs it; `nox -s wheels` does all eight."""

import shutil
import subprocess
import sys

import pytest
from house.sources import ROOT


def run(*command, **kwargs):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_installs_and_works_alone(tmp_path):
    """mcore-data: no compiler, no torch, no sibling but mcore-base."""
    if shutil.which("uv") is None:
        pytest.skip("hosts that bring their own torch may have no uv")
    held, python = str(tmp_path / "held.txt"), str(tmp_path / "venv/bin/python")
    for package in ("mcore-base", "mcore-data"):
        run("uv", "build", "--package", package, "--out-dir", str(tmp_path), cwd=ROOT)
    exported = run("uv", "export", "--locked", "--no-hashes", "--no-emit-workspace", cwd=ROOT)
    (tmp_path / "held.txt").write_text(exported)
    run("uv", "venv", "--python", sys.executable, str(tmp_path / "venv"))
    wheels = [str(path) for path in tmp_path.glob("*.whl")]
    run("uv", "pip", "install", "--no-config", "--python", python, "-c", held, *wheels)
    scripts = ROOT / "tests/alacarte"
    run(python, "-I", str(scripts / "only_these.py"), "mcore_base", "mcore_data", cwd=tmp_path)
    run(python, "-I", "-W", "error", str(scripts / "smoke_data.py"), cwd=tmp_path)
