"""The commands of docs/containers.md: installing beside a torch, images, scripts, logs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from docs.blocks import blocks_of
from e2e.run_dockerfile import stages
from house.sources import PACKAGES, ROOT
from warm_ranks import run_command

PAGE = (ROOT / "docs/containers.md").read_text()
UV = shutil.which("uv")
NEEDS_UV = pytest.mark.skipif(UV is None, reason="GPU hosts may have no uv")


def command_of(test: str) -> list[str]:
    """Return the page's blocks that a test of this file runs."""
    node = f"tests/e2e/test_containers.py::{test}"
    return [b.code for b in blocks_of(PAGE, "containers") if b.run_by == node]


def fake(folder: Path, name: str, text: str) -> None:
    """Put a program on a folder's PATH."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def wheel(folder: Path, name: str, version: str, requires=(), extras=()) -> None:
    """Write a wheel that holds nothing but its metadata."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    with zipfile.ZipFile(
        folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w"
    ) as z:
        z.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        z.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        z.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder with our wheels by their real metadata, a newer torch and the rest."""
    folder = tmp_path_factory.mktemp("index")
    needed = set()
    for package in PACKAGES:
        text = (ROOT / f"packages/mcore-{package}/pyproject.toml").read_text()
        project = tomllib.loads(text)["project"]
        wheel(
            folder,
            project["name"],
            project["version"],
            project["dependencies"],
            project.get("optional-dependencies", ()),
        )
        needed |= {re.split(r"[\[><=]", line)[0] for line in project["dependencies"]}
    for name in needed - {f"mcore-{package}" for package in PACKAGES} - {"torch"}:
        wheel(folder, name, "99.0")
    wheel(folder, "triton", "9.0")
    wheel(folder, "torch", "2.13.0", ["triton"])
    wheel(folder, "torch", "2.11.0", ["triton"])
    return folder


def container(folder: Path, index: Path, torch: str) -> dict[str, str]:
    """Return the environment of a shell in a container that has a torch and uses our index."""
    environment = {
        **os.environ,
        "VIRTUAL_ENV": str(folder / "venv"),
        "UV_NO_CONFIG": "1",
        "UV_OFFLINE": "1",
        "UV_FIND_LINKS": str(index),
        "UV_CACHE_DIR": str(folder / "cache"),
    }
    words = ["uv", "venv", "--quiet", "--python", sys.executable, str(folder / "venv")]
    subprocess.run(words, env=environment, check=True)
    own = folder / "image"
    own.mkdir()
    wheel(own, "torch", torch)
    wheel(own, "triton", "3.6.0+git9844da95.nvinternal")
    words = ["uv", "pip", "install", "--quiet", "--no-deps", *map(str, own.iterdir())]
    subprocess.run(words, env=environment, check=True)
    return environment


def installed(environment: dict[str, str]) -> dict[str, str]:
    """Return the versions that an environment has."""
    words = ["uv", "pip", "list", "--format", "freeze"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return dict(line.split("==") for line in done.stdout.splitlines())


@NEEDS_UV
def test_installing_in_a_container_keeps_its_torch(tmp_path, index):
    """Even where everything that is installed is brought to its newest version."""
    own = "2.12.0a0+0f9a2bd1c.nv26.5"
    environment = container(tmp_path, index, own)
    (code,) = command_of("test_installing_in_a_container_keeps_its_torch")
    for script in (code, code.replace("install", "install --upgrade")):
        subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=environment, check=True)
        found = installed(environment)
        assert found["torch"] == own
        assert found["triton"] == "3.6.0+git9844da95.nvinternal"
        assert set(found) >= {f"mcore-{package}" for package in PACKAGES}
    words = ["uv", "pip", "install", "--upgrade", "mcore-train"]
    subprocess.run(words, env=environment, check=True, capture_output=True)
    assert installed(environment)["torch"] == "2.13.0"  # what the constraints prevent


@NEEDS_UV
def test_a_container_with_a_torch_that_is_too_old_is_refused_and_keeps_it(tmp_path, index):
    environment = container(tmp_path, index, "2.8.0a0+5228986c39.nv25.4")
    (code,) = command_of("test_installing_in_a_container_keeps_its_torch")
    done = subprocess.run(
        ["bash", "-euc", code], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode
    assert "torch==2.8.0a0+5228986c39.nv25.4" in done.stderr
    assert re.search(r"torch\s*>=2.11", done.stderr)
    assert installed(environment) == {
        "torch": "2.8.0a0+5228986c39.nv25.4",
        "triton": "3.6.0+git9844da95.nvinternal",
    }


def run_script(script: str, *words: str, cwd: Path, path: Path, **variables: str):
    """Run a script of the repository with programs of ``path`` first."""
    env = {"PATH": f"{path}:/usr/bin:/bin", "HOME": str(path), **variables}
    return subprocess.run(
        ["bash", script, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture
def checkout(tmp_path):
    """A copy of the scripts and the lock, with a uv that writes down its arguments."""
    for name in ("docker/common/install.sh", "tools/autoformat.sh", "uv.lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "venv/bin").mkdir(parents=True)
    fake(tmp_path / "bin", "uv", f'echo "$@" >> {tmp_path}/uv.log')
    fake(tmp_path / "venv/bin", "python", "echo checked")
    fake(tmp_path / "bin", "python3", "exit 1")  # has no torch
    return tmp_path


def install(checkout, *words):
    done = run_script(
        "docker/common/install.sh", *words, "--venv", str(checkout / "venv"),
        cwd=checkout, path=checkout / "bin",
    )  # fmt: skip
    log = checkout / "uv.log"
    return done, log.read_text().splitlines() if log.exists() else []


def test_the_installer_takes_the_groups_of_an_environment_from_the_lock(checkout):
    done, (venv, sync) = install(checkout, "--environment", "dev")
    assert done.returncode == 0, done.stderr
    assert venv == f"venv --quiet --allow-existing {checkout}/venv"
    assert "sync --locked" in sync
    for group in ("dev", "test", "training", "mlm"):
        assert f"--group {group}" in sync
    assert "--no-install-package" not in sync
    (checkout / "uv.log").unlink()
    _, (_, sync) = install(checkout, "--environment", "lts")
    assert "--no-default-groups --group lts --group test" in sync
    assert "--group dev" not in sync


def test_the_installer_leaves_a_torch_that_is_there(checkout):
    fake(checkout / "bin", "python3", "echo 2.12.0a0+nv26.5")
    done, (venv, sync) = install(checkout, "--environment", "dev")
    assert "keeping torch 2.12.0a0+nv26.5" in done.stdout
    assert "--system-site-packages --python" in venv
    left_out = set(re.findall(r"--no-install-package (\S+)", sync))
    assert left_out >= {"torch", "triton"}
    assert any(name.startswith("nvidia-cudnn") for name in left_out)
    assert not left_out & {"numpy", "pytest", "mcore-train"}


@pytest.mark.parametrize("words", [(), ("--environment", "prod"), ("--base-image", "x")])
def test_the_installer_refuses_what_it_does_not_know(checkout, words):
    done, commands = install(checkout, *words)
    assert (done.returncode, commands) == (2, [])
    assert "--environment dev|lts" in done.stderr


def test_autoformat_checks_or_mends_the_files_that_differ(checkout):
    def git(*words):
        name = ("-c", "user.name=x", "-c", "user.email=x@x")
        subprocess.run(["git", *name, *words], cwd=checkout, check=True, capture_output=True)

    def ran(**variables):
        (checkout / "uv.log").unlink(missing_ok=True)
        place = {"cwd": checkout, "path": checkout / "bin"}
        done = run_script("tools/autoformat.sh", **place, **variables)
        log = checkout / "uv.log"
        return done, log.read_text().splitlines() if log.exists() else []

    (checkout / "old.py").write_text("old = 1\n")
    git("init", "--initial-branch", "main")
    git("add", "old.py")
    git("commit", "-m", "old")
    assert ran()[0].stdout == "no Python file differs from main\n"
    git("checkout", "-b", "work")
    (checkout / "new.py").write_text("new = 1\n")
    (code,) = command_of("test_autoformat_checks_or_mends_the_files_that_differ")
    variables = dict(word.split("=") for word in code.split() if "=" in word)
    assert variables == {"BASE_REF": "main", "CHECK_ONLY": "true", "SKIP_DOCS": "false"}
    _, commands = ran(**variables)
    assert commands[:2] == [
        "run --locked ruff check new.py",
        "run --locked ruff format --check new.py",
    ]
    assert [line.split()[2] for line in commands[2:]] == ["lint-imports", "pyrefly", "pytest"]
    _, commands = ran(SKIP_DOCS="true")
    assert commands[0] == "run --locked ruff check --fix --ignore D new.py"
    assert commands[1] == "run --locked ruff format new.py"
    assert not [line for line in commands if "pytest" in line]
    fake(checkout / "bin", "uv", 'case "$*" in *format*) exit 1; esac')
    assert ran()[0].returncode == 1
    assert ran(BASE_REF="nonesuch")[0].returncode == ran(CHECK_ONLY="yes")[0].returncode == 2


def docker_calls(tmp_path: Path) -> list[list[str]]:
    """Run the page's docker commands with a fake docker; return what it was given."""
    fake(tmp_path, "docker", f'for word in "$@"; do echo "$word"; done >> {tmp_path}/log; echo >> {tmp_path}/log')  # fmt: skip # noqa: E501
    code = "\n".join(command_of("test_the_docker_commands_of_the_page_fit_their_files"))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "-euc", code], cwd=ROOT, env=env, check=True)
    return [call.splitlines() for call in (tmp_path / "log").read_text().split("\n\n") if call]


def test_the_docker_commands_of_the_page_fit_their_files(tmp_path):
    calls = docker_calls(tmp_path)
    builds = [call for call in calls if call[0] == "build"]
    runs = [call for call in calls if call[0] == "run"]
    assert (len(builds), len(runs)) == (5, 2)
    tags = set()
    for call in builds:
        options = dict(zip(call[1:-1:2], call[2:-1:2], strict=True))
        file = ROOT / options["-f"]
        parsed = stages(file.read_text())
        assert "--secret" not in call
        assert "type=secret" not in file.read_text()
        known = {arg.split("=")[0] for s in parsed.values() for w, arg in s.steps if w == "ARG"}
        given = {call[i + 1] for i, word in enumerate(call) if word == "--build-arg"}
        assert {pair.split("=")[0] for pair in given} <= known
        assert options.get("--target", "linting") in parsed
        for pair in given:
            name, value = pair.split("=")
            assert value, name
            if name == "FROM_IMAGE_NAME":
                assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:2\d\.\d\d-py3", value)
        tags.add(options["-t"])
    assert tags == {"mcore-dev", "mcore-lts", "mcore-linting", "mcore", "mcore-cpu"}
    for call in runs:
        assert call[1:4] == ["--rm", "--gpus", "all"]
        assert f"{ROOT}:/workspace" in call
        assert call[call.index("-w") + 1] == "/workspace"
        assert "mcore-dev" in call
    mounts = [runs[1][i + 1] for i, word in enumerate(runs[1]) if word == "-v"]
    assert mounts[1:] == ["/data/corpus:/data", "/data/checkpoints:/checkpoints"]
    program, *training = runs[1][runs[1].index("mcore-dev") + 1 :]
    assert training[-2:] == ["--save", "/checkpoints/tiny"]
    planned = run_command(program.replace("-", "_"), *training, "--dry-run")
    assert planned.returncode == 0, planned.stderr


def test_images_install_by_the_script_and_copy_what_exists():
    for file in sorted((ROOT / "docker").glob("Dockerfile*")):
        for stage in stages(file.read_text()).values():
            for word, rest in stage.steps:
                if word == "COPY" and "--from" not in rest:
                    assert (ROOT / rest.split()[0]).exists()
    main = stages((ROOT / "docker/Dockerfile.ci.dev").read_text())["main"]
    assert ("RUN", 'bash docker/common/install.sh --environment "${IMAGE_TYPE}"') in main.steps
    assert main.base == "${FROM_IMAGE_NAME}"


@pytest.mark.timeout(120)
def test_unit_tests_run_on_ranks_with_a_log_for_each(tmp_path):
    """The script beside a test without torch, since each rank would load it for seconds."""
    (code,) = command_of("test_unit_tests_run_on_ranks_with_a_log_for_each")
    own = tmp_path / "tests/unit_tests"
    own.mkdir(parents=True)
    shutil.copy(ROOT / "tests/unit_tests/run_unit_tests.sh", own)
    (own / "test_rank.py").write_text(
        "import os, pathlib, time\n"
        "def test_rank():\n"
        "    here, rank = pathlib.Path(__file__).parent, os.environ['RANK']\n"
        "    print('rank', rank, 'ran', flush=True)\n"
        "    (here / f'ran-{rank}').touch()\n"
        "    if rank == os.environ.get('FAIL'):  # its end ends the others\n"
        "        while len(list(here.glob('ran-*'))) < 4:\n"
        "            time.sleep(0.05)\n"
        "    assert rank != os.environ.get('FAIL')\n"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(**variables):
        return subprocess.run(
            ["bash", "-euc", f"{code.rstrip()} -s --rootdir {own}"],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": path,
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                **variables,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    done = run(FAIL="2")
    assert done.returncode == 1
    shown = set(re.findall(r"rank (\d) ran", done.stdout + done.stderr))
    assert shown == {"0", "3"}
    logs = tmp_path / "assets/logs/1"
    assert sorted(path.name for path in logs.iterdir()) == ["0", "1", "2", "3"]
    for rank in range(4):
        assert f"rank {rank} ran" in (logs / f"{rank}/stdout.log").read_text()
    words = ["bash", "tests/unit_tests/run_unit_tests.sh", "--nnodes", "2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "needs --master-addr" in done.stderr) == (2, True)
