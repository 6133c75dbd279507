"""The import contracts fail when a package imports what the graph forbids."""

import shutil
import subprocess
import sys

import pytest
from house.sources import PACKAGES, ROOT

LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]


@pytest.mark.parametrize(
    ("package", "line", "broken"),
    [
        ("base", "import mcore_parallel", "mcore-base imports no sibling"),
        ("parallel", "import mcore_moe", "mcore-parallel imports mcore-base only"),
        ("data", "import mcore_parallel", "mcore-data imports mcore-base only"),
        ("data", "import torch", "mcore-data needs torch in its loader only"),
        ("moe", "import mcore_models", "mcore-moe imports mcore-base and mcore-parallel only"),
        (
            "models",
            "import mcore_ckpt",
            "mcore-models imports mcore-base, mcore-parallel and mcore-moe",
        ),
        (
            "ckpt",
            "import mcore_data",
            "mcore-ckpt imports configs and shape tables, no model class",
        ),
        (
            "ckpt",
            "import mcore_parallel",
            "mcore-ckpt imports shards, axes, collectives and digests of mcore-parallel",
        ),
        ("infer", "import mcore_train", "mcore-infer does not know mcore-train"),
        ("train", "import transformers", "transformers is for tests and parity"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(tmp_path, package, line, broken):
    done = _lint_bare_packages(tmp_path, package, line)
    assert done.returncode == 1, done.stdout
    assert f"{broken}" in done.stdout
    assert "1 broken" in done.stdout


def test_bare_packages_keep_every_contract(tmp_path):
    done = _lint_bare_packages(tmp_path, "train", "import mcore_infer")
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout


def _lint_bare_packages(folder, package, line):
    """Check the workspace's contracts on empty packages, one of which has one import."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in PACKAGES:
        (folder / f"mcore_{name}").mkdir()
        code = line if name == package else ""
        (folder / f"mcore_{name}" / "__init__.py").write_text(code + "\n")
    return subprocess.run(
        [*LINT, "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
