"""Fronts, configs and commands start without torch; importing a room changes nothing."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from house.sources import PACKAGES, ROOT, Source, all_sources, package_sources, parse
from warm_ranks import run_command

# Run in a bare process: import the modules named in argv, then say what that did.
_PROBE = """
import json, logging, os, sys, threading
before = dict(os.environ), threading.active_count()
for name in sys.argv[1:]:
    __import__(name)
torch = sys.modules.get("torch")
print(json.dumps({
    "torch": torch is not None,
    "environment": dict(os.environ) != before[0],
    "threads": threading.active_count() - before[1],
    "handlers": len(logging.getLogger().handlers),
    "cuda": torch is not None and torch.cuda.is_initialized(),
    "process group": torch is not None and torch.distributed.is_initialized(),
    "dtype": torch is not None and str(torch.get_default_dtype()) != "torch.float32",
}))
"""


def effects_of_importing(modules: list[str]) -> dict[str, int | bool]:
    """Import modules in a bare process and return what that changed."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *modules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


PURE = (
    "mcore_base.options",
    "mcore_models.encoder_shapes",
    "mcore_models.layer_patterns",
    "mcore_models.logical_tensors",
    "mcore_models.mup",
    "mcore_models.parameter_kinds",
)
"""Modules that config files and mcore-ckpt may import: what follows from a config's fields."""


def light_modules(package: str) -> list[str]:
    """Return a package's front, and its config and command modules wherever they are."""
    return [
        _module(source)
        for source in package_sources(package)
        if source.room == "" or source.is_config or source.is_command or _module(source) in PURE
    ]


def rooms(package: str) -> list[str]:
    """Return every module of a package but its ``__main__``."""
    return [_module(s) for s in package_sources(package) if s.file != "__main__.py"]


def _module(source: Source) -> str:
    return source.name.removesuffix(".py").replace("/__init__", "").replace("/", ".")


def foreign_imports(source: Source) -> list[str]:
    """Return what a config file imports beyond the standard library, configs and ``PURE``."""
    found = []
    for node in source.nodes:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue
        found += [
            f"{source.name}:{node.lineno} {module}"
            for module in modules
            if module.split(".")[0] not in sys.stdlib_module_names
            and not (module.startswith("mcore_") and module.endswith((".config", "_config")))
            and module not in PURE
        ]
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_fronts_configs_and_commands_import_without_torch(package):
    effects = effects_of_importing(light_modules(package))
    assert {name for name, changed in effects.items() if changed} == set()


def imported_by(name: str) -> set[str]:
    """Return the modules that importing one of ours imports, through our other modules."""
    sources = {_module(source): source for source in all_sources()}
    seen, ahead = set(), [name]
    while ahead:
        if (name := ahead.pop()) in seen:
            continue
        seen.add(name)
        # Imports within functions and under TYPE_CHECKING are not top-level statements.
        for node in sources[name].tree.body if name in sources else ():
            if isinstance(node, ast.ImportFrom):
                ahead.append(node.module or "")
    return seen


def test_a_training_loop_imports_no_serving_engine_before_it_is_asked_for():
    seen = imported_by("mcore_train.loop")
    assert "mcore_train.assembly" in seen
    assert not {name for name in seen if name.startswith("mcore_infer")}


@pytest.mark.parametrize("name", ["mcore_train.loop", "mcore_infer.engine.engine"])
def test_a_program_imports_no_dtensors_before_it_is_asked_for(name):
    """They import sympy: a second of each start and restart."""
    slow = ("torch.distributed.tensor", "torch.distributed.fsdp", "sympy")
    seen = imported_by(name)
    assert "mcore_parallel.mesh" in seen
    assert not {module for module in seen if module.startswith(slow)}


def effects_beyond_torch(modules: list[str], folder: Path) -> set[str]:
    """Return what importing changes in a process that has torch, and nothing of ours."""
    (folder / "probe.py").write_text(_PROBE)
    done = run_command("probe", *modules)
    assert done.returncode == 0, done.stderr
    changed = {name for name, value in json.loads(done.stdout).items() if value}
    return changed - {"torch"}


def test_importing_every_room_changes_nothing_but_the_modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    modules = [room for package in PACKAGES for room in rooms(package)]
    assert effects_beyond_torch(modules, tmp_path) == set()


def test_the_probe_sees_what_an_import_does(tmp_path, monkeypatch):
    (tmp_path / "rude.py").write_text(
        "import logging, os, threading, torch\n"
        "os.environ['RUDE'] = '1'\n"
        "logging.basicConfig()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "torch.set_default_dtype(torch.float64)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    effects = effects_beyond_torch(["rude"], tmp_path)
    assert effects == {"environment", "threads", "handlers", "dtype"}


def test_config_files_import_the_standard_library_only():
    configs = [
        s
        for package in PACKAGES
        for s in package_sources(package)
        if s.is_config or _module(s) in PURE
    ]
    assert [line for source in configs for line in foreign_imports(source)] == []


def test_mcore_ckpt_may_import_of_the_models_only_what_needs_no_torch():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (
        contract
        for contract in contracts["contracts"]
        if contract["source_modules"] == ["mcore_ckpt"]
        and "mcore_models" in contract["forbidden_modules"]
    )
    allowed = {line.split(" -> ")[1] for line in contract["ignore_imports"]}
    configs = {name for name in allowed if name.endswith((".config", "_config"))}
    assert allowed - configs <= set(PURE)


def test_training_starts_without_triton():
    """torch for CPUs brings none: training kernels take the stand-in for it."""
    direct = {
        source.name
        for package in ("parallel", "moe", "models", "train")
        for source in package_sources(package)
        for node in source.tree.body
        if isinstance(node, ast.Import)
        and {a.name.split(".")[0] for a in node.names} & {"triton"}
    }
    assert direct == set()


def test_the_config_rule_sees_a_foreign_import():
    assert foreign_imports(parse("import torch", "mcore_x/config.py")) != []
    assert foreign_imports(parse("from mcore_x.mesh import Axis", "mcore_x/config.py")) != []
    assert foreign_imports(parse("from dataclasses import field", "mcore_x/config.py")) == []


def test_windows_is_refused_in_one_line_that_names_what_works():
    code = "import sys; sys.platform = 'win32'; import mcore_data"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: the mcore wheels run on Linux and macOS; on Windows use WSL 2."
    )


# What Linux has and macOS has not, of all that the sources of these two wheels call.
_AS_ON_MACOS = """
import os, signal, sys
for name in ("sched_getaffinity", "posix_fadvise", "posix_fallocate"):
    delattr(os, name)
sys.platform = "darwin"
from mcore_data.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_data_are_prepared_without_the_calls_that_macos_lacks(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "In the beginning"}\n' * 9)
    prefix = ["--input", "text.jsonl", "--output-prefix", "book", "--workers", "2"]
    for words in (
        ["preprocess", *prefix, "--tokenizer-type", "ByteTokenizer"],
        ["verify", "book_text_document"],
    ):
        command = [sys.executable, "-c", _AS_ON_MACOS, *words]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
