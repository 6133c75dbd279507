"""The eight packages as packages: metadata, ranges, extras, and what the lock holds."""

import ast
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from house.sources import PACKAGES, ROOT, Source, package_sources, parse

EXTRAS = {
    "te": ({"models"}, "transformer-engine"),
    "flash4": ({"models"}, "flash-attn-4"),
    "resiliency": ({"ckpt", "train"}, r"(nvidia-resiliency-ext|mcore-ckpt\[resiliency\])"),
    "tensorboard": ({"train"}, "tensorboard"),
    "training": ({"train"}, "tensorboard"),
    "mlm": ({"train"}, r"mcore-infer\[server\]"),
    "lts": ({"train"}, "pyyaml"),
    "dev": ({"train"}, r"mcore-moe\[quack\]"),
    "s3": ({"base", "ckpt", "data"}, r"(s3fs|mcore-base\[s3\])"),
    "check": ({"ckpt"}, "transformers"),
}
# Each group with what shows that it is that one.
GROUPS = {
    "dev": {"nox", "pytest", "ruff", "pyrefly", "import-linter", "tensorboard"},
    "test": {"pytest", "hypothesis", "beartype", "transformers", "tensorboard"},
    "linting": {"ruff", "pyrefly", "import-linter"},
    "training": {"tensorboard"},
    "mlm": {"tensorboard"},
    "build": {"build"},
    "lts": set(),
    "s3": {"moto", "s3fs", "pytest"},
    "engines": {"datatrove", "ray", "pytest"},
    "lm-eval": {"lm-eval", "pytest"},
    "browser": {"playwright", "pytest"},
    "loaders": {"compressed-tensors", "nvidia-modelopt", "pytest"},
    "resiliency": {"nvidia-resiliency-ext", "pytest"},
}
KERNELS = {
    "flash-attn-4",
    "transformer-engine",
    "quack-kernels",
    "nvidia-resiliency-ext",
    "s3fs",
}

# What a distribution is imported as, where that is not its own name.
IMPORTED_AS = {
    "flash-attn-4": "flash_attn",
    "nvidia-resiliency-ext": "nvidia_resiliency_ext",
    "quack-kernels": "quack",
    "nvidia-ml-py": "pynvml",
    "pyyaml": "yaml",
    "tensorboard": "torch.utils.tensorboard",
    "mlflow-skinny": "mlflow",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    "s3fs": "fsspec",  # which finds it by the protocol of a URL
}
# Required without an import, each with its reason.
NOT_IMPORTED = {("parallel", "numpy"): "torch warns at import without it"}


def project_of(package: str) -> dict:
    """Return the `project` table of a wheel."""
    text = (ROOT / f"packages/mcore-{package}/pyproject.toml").read_text()
    return tomllib.loads(text)["project"]


def locked() -> dict[str, list[dict]]:
    """Return the packages of uv.lock by name; some are locked in several versions."""
    found: dict[str, list[dict]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        found.setdefault(package["name"], []).append(package)
    return found


def installed_by_sync(lock: dict[str, list[dict]]) -> set[str]:
    """Return what a plain ``uv sync`` may install: the root, its groups, what these ask for."""
    root = lock["mcore-workspace"][0]
    todo = [*root["dependencies"], *root.get("dev-dependencies", {}).get("dev", [])]
    seen: set[tuple[str, str]] = set()
    while todo:
        wanted = todo.pop()
        for extra in ["", *wanted.get("extra", [])]:
            if (wanted["name"], extra) in seen:
                continue
            seen.add((wanted["name"], extra))
            for package in lock[wanted["name"]]:
                optional = package.get("optional-dependencies", {})
                todo += optional.get(extra, []) if extra else package.get("dependencies", [])
    return {name for name, _ in seen}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_complete(package):
    folder = ROOT / f"packages/mcore-{package}"
    project = project_of(package)
    assert project["name"] == f"mcore-{package}"
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"
    assert not [c for c in project["classifiers"] if c.startswith("License")]
    assert "Typing :: Typed" in project["classifiers"]
    for name in ("README.md", "CHANGELOG.md", "LICENSE", f"src/mcore_{package}/py.typed"):
        assert (folder / name).is_file(), name
    assert project["version"] in (folder / "CHANGELOG.md").read_text()
    assert version(f"mcore-{package}") == project["version"]


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_asked_for_by_compatible_ranges(package):
    project = project_of(package)
    optional = project.get("optional-dependencies", {}).values()
    for line in [*project["dependencies"], *(line for extra in optional for line in extra)]:
        if line.startswith("mcore-"):
            asked = r"mcore-[a-z]+(\[[a-z0-9,]+\])?>=0\.\d+(\.\d+rc\d+)?,<0\.\d+"
            assert re.fullmatch(asked, line), line
        if line.startswith("torch"):
            assert line == "torch>=2.11,<3"


@pytest.mark.parametrize(
    ("version", "wheels", "asked"),
    [
        ("0.2.0rc1", [f"mcore-{package}" for package in PACKAGES], ">=0.2.0rc1,<0.3"),
        ("0.1.3", ["mcore-moe"], ">=0.1,<0.2"),
    ],
)
def test_a_version_is_written_where_it_counts_and_the_lock_fits(
    version, wheels, asked, tmp_path
):
    """In a copy: metadata, ranges of siblings, lock and changelogs."""
    release = load_release()
    kept = [ROOT / "pyproject.toml", ROOT / "uv.lock"]
    kept += [*ROOT.glob("packages/*/*.toml"), *ROOT.glob("packages/*/*.md")]
    for path in kept:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
        if copy.name == "CHANGELOG.md" and "(unreleased)" not in copy.read_text():
            copy.write_text(
                copy.read_text().replace("\n## ", "\n## 9.9.9 (unreleased)\n\n## ", 1)
            )
    changelog = tmp_path / "packages" / wheels[0] / "CHANGELOG.md"
    with pytest.raises(ValueError, match=r"\(unreleased\)'\. Write a version and a date"):
        release.release_notes(changelog, version)
    assert set(wheels) <= set(release.unreleased_wheels(tmp_path))
    release.prepare(tmp_path, version, wheels, "2026-12-01")
    assert not set(wheels) & set(release.unreleased_wheels(tmp_path))
    assert "\n## " not in release.release_notes(changelog, version)
    for wheel in wheels:
        folder = tmp_path / "packages" / wheel
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["version"] == version
        assert f"\n## {version} (2026-12-01)\n" in (folder / "CHANGELOG.md").read_text()
    others = tomllib.loads((tmp_path / "packages/mcore-models/pyproject.toml").read_text())
    assert f"mcore-moe{asked}" in others["project"]["dependencies"]
    command = ["uv", "lock", "--check", "--offline"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ValueError, match=r"no section with '\(unreleased\)'"):
        release.prepare(tmp_path, version, wheels, "2026-12-01")


@pytest.mark.parametrize("version", ["0.2", "v0.2.0", "0.2.0-rc1"])
def test_a_version_of_another_form_is_refused(version):
    with pytest.raises(ValueError, match="use MAJOR"):
        load_release().sibling_range(version)


def load_release():
    """Load tools/release.py, which is a script."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools/release.py")))


def required(project: dict) -> set[str]:
    """Return the distributions that a wheel asks for in its base and all its extras."""
    extras = project.get("optional-dependencies", {}).values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    return {re.split(r"[\[><=~!; ]", line)[0] for line in lines}


def mentions(source: Source, module: str) -> bool:
    """Whether a file imports a module or a part of it, by statement or by a string."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        else:
            continue
        if any(name == module or name.startswith(f"{module}.") for name in names):
            return True
    return False


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_asks_for_is_what_it_imports(package):
    unused = {
        name
        for name in required(project_of(package))
        if not any(
            mentions(source, IMPORTED_AS.get(name, name.replace("-", "_")))
            for source in package_sources(package)
        )
    }
    assert unused <= {name for owner, name in NOT_IMPORTED if owner == package}


def imported_at_start(source: Source) -> set[str]:
    """Return the top packages that a file imports whenever it is imported itself."""
    found = set()
    for node in source.tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_imports_comes_with_it(package):
    """Rooms that a base install cannot import are those of an extra, or bring torch's own."""
    project = project_of(package)
    known = {IMPORTED_AS.get(n, n.replace("-", "_")) for n in required(project)}
    known |= {f"mcore_{package}", "triton", *sys.stdlib_module_names}  # torch brings Triton
    unknown = {
        f"{source.name} imports {name}"
        for source in package_sources(package)
        for name in imported_at_start(source) - known
    }
    assert unknown == set()


def test_nothing_that_a_wheel_needs_is_compiled_at_install():
    base = {name for package in PACKAGES for name in required(project_of(package))}
    lock = locked()
    for package in PACKAGES:
        text = (ROOT / f"packages/mcore-{package}/pyproject.toml").read_text()
        assert tomllib.loads(text)["build-system"]["build-backend"] == "uv_build"
    assert [
        n
        for n in base
        if "editable" not in lock[n][0]["source"] and not lock[n][0].get("wheels")
    ] == ["flash-attn"]  # of an extra that says so: its project publishes no wheels


def test_the_import_rule_sees_statements_and_strings():
    assert mentions(parse("from rich.progress import Progress"), "rich")
    assert mentions(parse("import_module('flash_attn.cute.interface')"), "flash_attn")
    assert not mentions(parse("import richer\nsays = 'rich text'"), "rich")


def test_wheels_have_keywords_of_their_own():
    keywords = [frozenset(project_of(package)["keywords"]) for package in PACKAGES]
    assert len(set(keywords)) == len(PACKAGES)
    assert frozenset.intersection(*keywords) == frozenset()


def test_licences_name_their_owner():
    for file in (ROOT / "LICENSE", *ROOT.glob("packages/*/LICENSE")):
        assert "Copyright 2026 The mcore developers" in file.read_text(), file


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_stands_where_it_is_used(extra):
    packages, brings = EXTRAS[extra]
    having = {
        package: project_of(package)["optional-dependencies"][extra]
        for package in PACKAGES
        if extra in project_of(package).get("optional-dependencies", {})
    }
    assert set(having) == packages
    assert all(
        any(re.match(rf"{brings}(?![\w-])", line) for line in lines)
        for lines in having.values()
    )


def test_the_root_has_the_known_groups_and_is_no_package():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(root["dependency-groups"]) == set(GROUPS)
    uv = root["tool"]["uv"]
    assert uv["package"] is False
    assert uv["workspace"]["members"] == ["packages/*"]
    wheels = {f"mcore-{package}" for package in PACKAGES}
    assert uv["sources"] == {name: {"workspace": True} for name in wheels}
    assert {line.split("[")[0] for line in root["project"]["dependencies"]} == wheels


def test_extras_are_locked_and_a_plain_sync_installs_none_of_them():
    lock = locked()
    assert set(lock) >= KERNELS
    installed = installed_by_sync(lock)
    assert installed >= {f"mcore-{p}" for p in PACKAGES} | {"torch", "pytest", "ruff", "nox"}
    assert installed & KERNELS == set()


def test_attention_kernels_are_compiled_for_the_cuda_of_the_locked_torch():
    lock = locked()
    asked = {
        item["name"]: item
        for item in lock["mcore-models"][0]["optional-dependencies"]["flash4"]
    }
    cuda = {
        item["name"].rpartition("-")[2]
        for item in lock["torch"][0]["dependencies"]
        if item["name"].startswith("nvidia-")
    }
    assert set(asked["flash-attn-4"]["extra"]) == cuda & {"cu12", "cu13", "cu14"} != set()


def test_what_exists_only_as_source_is_locked_without_a_build():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    written = {e["name"] for e in root["tool"]["uv"].get("dependency-metadata", [])}
    only_source = {
        package["name"]
        for packages in locked().values()
        for package in packages
        if "sdist" in package and not package.get("wheels")
    }
    assert only_source == written


def test_the_markers_of_the_field_are_known(pytestconfig):
    known = {line.split(":")[0] for line in pytestconfig.getini("markers")}
    assert known >= {"internal", "flaky", "experimental", "gpu", "slow"}


def test_nothing_comes_from_a_git_source():
    sources = {key for ps in locked().values() for p in ps for key in p["source"]}
    assert sources <= {"registry", "editable", "virtual"}


def test_the_sync_walk_follows_extras_and_no_further():
    lock = {
        "mcore-workspace": [{"dependencies": [{"name": "a", "extra": ["x"]}]}],
        "a": [{"optional-dependencies": {"x": [{"name": "b"}], "y": [{"name": "c"}]}}],
        "b": [{"dependencies": [{"name": "d"}]}],
        "c": [{}],
        "d": [{}],
    }  # fmt: skip
    assert installed_by_sync(lock) == {"a", "b", "d"}


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_chosen_groups_can_be_exported_from_the_lock(group):
    """What `uv sync --locked --only-group` would install follows from the lock alone."""
    if shutil.which("uv") is None:
        pytest.skip("hosts that bring their own torch may have no uv")
    command = ["uv", "export", "--locked", "--offline", "--only-group", group, "--no-hashes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    named = set(re.findall(r"^([a-z0-9-]+)==", done.stdout, re.MULTILINE))
    assert named >= GROUPS[group]
    assert not named & {"ruff", "nox", "build", "moto"} - GROUPS[group]


def test_files_of_tests_that_are_handed_out_first_are_there():
    listed = re.findall(r'"(\S+/test_\w+\.py)"', (ROOT / "conftest.py").read_text())
    assert listed
    assert [file for file in listed if not (ROOT / file).is_file()] == []


def page_faults(package: str, page: str, siblings: set[str]) -> list[str]:
    """Name what a reader of a package's page, without the repository, cannot follow.

    Args:
        package: import name.
        page: text of its README.
        siblings: import names of what its wheel brings along.
    """
    found = [f"link {link}" for link in re.findall(r"\]\((\.\.[^)]*)\)", page)]
    for block in re.finditer(r"```python\n(.*?)```", page, re.DOTALL):
        for node in ast.walk(ast.parse(block[1])):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            )
            for name in (name.partition(".")[0] for name in names if name):
                wheel = name.replace("_", "-")
                is_named = f"pip install {wheel}" in page[: block.start()]
                if name.startswith("mcore_") and name not in siblings | {package}:
                    found += [] if is_named else [f"import of {name}"]
    for path in set(re.findall(r"`(mcore_\w+(?:\.\w+)+)", page)):
        try:
            pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            found.append(f"name {path}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_page_can_be_followed_without_the_repository(package):
    page = (ROOT / f"packages/mcore-{package}/README.md").read_text()
    needed, siblings = [package], set()
    while needed:
        for text in project_of(needed.pop())["dependencies"]:
            if (name := re.match(r"mcore-(\w+)", text)) and f"mcore_{name[1]}" not in siblings:
                siblings.add(f"mcore_{name[1]}")
                needed.append(name[1])
    assert page_faults(f"mcore_{package}", page, siblings) == []


def test_a_fault_of_a_package_page_is_found():
    page = (
        "[figures](../../docs/x.md) and `mcore_parallel.no_such`\n"
        "```python\nfrom mcore_ckpt.save_load import saving\nimport mcore_moe\n```"
    )
    assert page_faults("mcore_parallel", page, {"mcore_moe"}) == [
        *("link ../../docs/x.md", "import of mcore_ckpt", "name mcore_parallel.no_such"),
    ]
