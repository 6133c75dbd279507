"""Prepares and checks releases of the wheels; CONTRIBUTING.md has the rules.

``prepare VERSION [WHEEL ...]`` writes versions, the ranges by which wheels ask for each other,
the lock and the headings of changelogs. ``check WHEEL`` builds a wheel, installs it alone with
the lowest and the newest versions that it allows, writes its bill of materials, and prints the
commands that sign and publish it. Neither publishes anything.
"""

import argparse
import datetime
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"(\d+)\.(\d+)\.\d+((?:a|b|rc)\d+)?")
UNRELEASED = re.compile(r"^## \S+ \(unreleased\)$", re.MULTILINE)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def sibling_range(version: str) -> str:
    """Return the range by which other wheels ask for a version: its minor version alone.

    A release candidate is named, since installers leave out candidates that no range names.
    """
    match = VERSION.fullmatch(version)
    if match is None:
        raise ValueError(f"{version} is no version: use MAJOR.MINOR.PATCH, or with rcN behind.")
    major, minor, candidate = match.groups()
    lowest = version if candidate else f"{major}.{minor}"
    return f">={lowest},<{major}.{int(minor) + 1}"


def prepare(root: Path, version: str, wheels: list[str], day: str) -> list[Path]:
    """Write a version of some wheels into their metadata, the lock and their changelogs.

    Args:
        root: folder of the workspace.
        version: the version.
        wheels: names of wheels, such as mcore-moe.
        day: date for the changelogs.

    Returns:
        The files that changed.

    Raises:
        ValueError: for a version of another form, or a changelog without an unreleased section.
    """
    wanted = sibling_range(version)
    lock = root / "uv.lock"
    texts = {path: path.read_text() for path in (*root.glob("packages/*/pyproject.toml"), lock)}
    before = dict(texts)
    for wheel in wheels:
        folder = root / "packages" / wheel
        changelog = folder / "CHANGELOG.md"
        before[changelog] = changelog.read_text()
        texts[changelog], count = re.subn(
            UNRELEASED, f"## {version} ({day})", before[changelog], count=1
        )
        if not count:
            raise ValueError(f"{changelog} has no section with '(unreleased)' in its heading.")
        own = folder / "pyproject.toml"
        texts[own] = re.sub(
            r'^version = ".*"$',
            f'version = "{version}"',
            texts[own],
            count=1,
            flags=re.MULTILINE,
        )
        texts[lock] = re.sub(
            rf'(name = "{wheel}"\nversion = )".*"', rf'\1"{version}"', texts[lock], count=1
        )
        for path, text in texts.items():
            if path.name == "pyproject.toml":
                asking = rf'"({wheel}(?:\[[a-z0-9,]+\])?)>=[^"]*"'
                texts[path] = re.sub(asking, rf'"\1{wanted}"', text)
    changed = [path for path, text in texts.items() if text != before[path]]
    for path in changed:
        path.write_text(texts[path])
    return changed


def unreleased_wheels(root: Path) -> list[str]:
    """Return the wheels whose changelog has an unreleased section."""
    changelogs = sorted(root.glob("packages/*/CHANGELOG.md"))
    return [file.parent.name for file in changelogs if UNRELEASED.search(file.read_text())]


def check(wheel: str, folder: Path) -> None:
    """Build a wheel and its siblings, use it in fresh environments, print what publishes it."""
    project = _project(wheel)
    version, package = project["version"], wheel.replace("-", "_")
    dist = folder / "dist"
    _check_tag(wheel, version)
    notes = release_notes(ROOT / "packages" / wheel / "CHANGELOG.md", version)
    run("rm", "-rf", str(folder))
    run("uv", "build", "-q", "--all-packages", "--out-dir", str(dist))
    file = next(dist.glob(f"{package}-{version}-*.whl"))
    sdist = next(dist.glob(f"{package}-{version}.tar.gz"))
    pythons = _pythons()
    first, *others = pythons
    # Lowest versions of dependencies have no wheels for later Pythons than the lowest.
    for python, resolution in (
        (first, "lowest-direct"),
        *((p, "highest") for p in [first, *others]),
    ):
        venv = folder / f"venv-{python[0]}-{resolution}"
        run("uv", "venv", "-q", "--python", python[1], str(venv))
        inside = venv / "bin/python"
        # --no-config: the workspace holds torch to one version.
        run(
            *("uv", "pip", "install", "-q", "--no-config", "--python", str(inside)),
            *("--find-links", str(dist), "--resolution", resolution, str(file)),
        )
        smoke = ROOT / f"tests/alacarte/smoke_{wheel.removeprefix('mcore-')}.py"
        run(str(inside), "-I", str(smoke), cwd=folder)
        for program in project.get("scripts", {}):
            run(str(venv / "bin" / program), "--help", quiet=True, cwd=folder)
        print(
            f"{file.name}: Python {python[0]}, {resolution} versions: imports and works alone"
        )
    bill = folder / f"{wheel}-{version}.cdx.json"
    run("uvx", "--from", "cyclonedx-bom", "cyclonedx-py", "environment", "--of", "JSON",
        "-o", str(bill), str(inside), quiet=True)  # fmt: skip
    notes_file = bill.with_name(f"{wheel}-{version}.md")
    notes_file.write_text(notes)
    files, tag = f"{file} {sdist}", f"{wheel}-{version}"
    print(f"bill of materials (CycloneDX): {bill}")
    print(f"release notes, from the changelog: {notes_file}")
    if unchecked := sorted(set(PYTHONS) - {python for python, _ in pythons}):
        print(f"not checked, for want of an interpreter: Python {', '.join(unchecked)}")
    print()
    print(f"to sign, with an identity of yours:\n  uvx sigstore sign {files}")
    print(f"to publish, with a token in UV_PUBLISH_TOKEN:\n  uv publish {files}")
    print(f"to tag:\n  git tag {tag} && git push origin {tag}")


def release_notes(changelog: Path, version: str) -> str:
    """Return the newest section of a changelog, which must be that of the version, dated.

    Raises:
        ValueError: if the newest section has another version or no date, so that the wheel
            holds changes which no released section names.
    """
    heading, _, section = changelog.read_text().partition("\n## ")[2].partition("\n")
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        raise ValueError(
            f"the wheel is {version}, the newest section of {changelog} is '{heading}'. Write "
            "a version and a date first: nox -s release -- prepare VERSION "
            f"{changelog.parent.name}"
        )
    return section.partition("\n## ")[0].strip() + "\n"


def run(*command: str, quiet: bool = False, cwd: Path = ROOT) -> None:
    """Run a command, shown by its words if it fails."""
    stdout = subprocess.DEVNULL if quiet else None
    subprocess.run(command, cwd=cwd, check=True, stdout=stdout)


def _check_tag(wheel: str, version: str) -> None:
    """Refuse a tag of this commit that names another version of the wheel."""
    command = ("git", "tag", "--points-at", "HEAD", "--list", f"{wheel}-*")
    tags = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    if others := set(tags.stdout.split()) - {f"{wheel}-{version}"}:
        raise ValueError(f"this commit has the tag {min(others)}, the wheel is {version}.")


def _pythons() -> list[tuple[str, str]]:
    """Return version and path of each supported Python on this machine; name the others."""
    found = []
    for version in PYTHONS:
        command = ("uv", "python", "find", "--no-project", "--no-python-downloads", version)
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"uv finds no Python {version}, on PATH or its own: not checked")
        else:
            found.append((version, done.stdout.strip()))
    return found


def _project(wheel: str) -> dict:
    file = ROOT / "packages" / wheel / "pyproject.toml"
    if not file.is_file():
        names = ", ".join(sorted(path.name for path in (ROOT / "packages").iterdir()))
        raise ValueError(f"{wheel} is no wheel of this workspace: use one of {names}.")
    return tomllib.loads(file.read_text())["project"]


def main() -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", help="write a version of some or all wheels")
    preparing.add_argument("version")
    preparing.add_argument("wheels", nargs="*", help="default: all with an unreleased section")
    checking = commands.add_parser("check", help="build a wheel and use it alone")
    checking.add_argument("wheel")
    checking.add_argument("--folder", type=Path, default=ROOT / ".nox/release")
    words = parser.parse_args()
    try:
        if words.command == "check":
            check(words.wheel, words.folder.resolve())
            return 0
        wheels = words.wheels or unreleased_wheels(ROOT)
        if not wheels:
            raise ValueError("no changelog has an unreleased section: nothing to prepare.")
        for wheel in wheels:
            _project(wheel)
        for path in prepare(ROOT, words.version, wheels, str(datetime.date.today())):
            print(path.relative_to(ROOT))
    except ValueError as error:
        sys.exit(f"release: error: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
