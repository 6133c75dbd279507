"""The site's source: pages, the files that they link to, and pages of the public names.

``python tests/docs/site.py FOLDER`` lays them out under FOLDER for ``zensical build``, with the
paths of the repository; `nox -s docs` does both. docs/zensical.toml has the navigation. Public
names come from the tables of the packages' fronts, their texts from docstrings.
"""

import ast
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.public_api import front_of, public_names
from house.sources import PACKAGES, ROOT

CONFIG = ROOT / "docs/zensical.toml"
SINGLE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "SKILL.md")
FOLDERS = ("docs/**/*.md", "recipes/*.md", "examples/*.md", "benchmarks/*.md")
WHEELS = ("packages/*/README.md", "packages/*/CHANGELOG.md")
_LINK = re.compile(r"(\[[^\]]*\])\(([^)#:\s]+)(#[^)\s]*)?\)")
_API = """# {module}

{about}

The names below are public: `from {module} import NAME`. [What the wheel is]({readme}).

"""


def pages() -> dict[str, str]:
    """Return the text of every page, by its path in the repository."""
    files = [ROOT / name for name in SINGLE]
    files += [path for pattern in (*FOLDERS, *WHEELS) for path in sorted(ROOT.glob(pattern))]
    return {
        str(path.relative_to(ROOT)): path.read_text() for path in dict.fromkeys(files)
    } | dict(api_pages())


def api_pages() -> Iterator[tuple[str, str]]:
    """Yield the path and text of a page of public names for each package."""
    for package in PACKAGES:
        front = front_of(package)
        names = public_names(front)
        module = f"mcore_{package}"
        about = (ast.get_docstring(front.tree) or "").split("\n\n", maxsplit=1)[0]
        head = _API.format(
            module=module,
            about=about.replace("``", "`"),
            readme=f"../packages/mcore-{package}/README.md",
        )
        entries = [f"::: {module}.{names[name]}.{name}\n" for name in sorted(names)]
        yield f"api/mcore-{package}.md", head + "\n".join(entries)


def navigation(known: dict[str, str]) -> list[Any]:
    """Return the navigation of the site with every ``*`` replaced by its pages."""
    return _expanded(tomllib.loads(CONFIG.read_text())["project"]["nav"], sorted(known))


def _expanded(entry: Any, known: list[str]) -> Any:
    if isinstance(entry, list):
        found = []
        for each in entry:
            below = _expanded(each, known)
            found += below if isinstance(below, list) else [below]
        return found
    if isinstance(entry, dict):
        return {title: _expanded(below, known) for title, below in entry.items()}
    if "*" not in entry:
        return entry
    pattern = re.compile(re.escape(entry).replace(r"\*", "([^/]*)"))
    matches = [match for path in known if (match := pattern.fullmatch(path))]
    # Pages of a wheel or program have its name, others their own title.
    is_named = entry.startswith(("packages/", "api/", "docs/flags/"))
    return [{m[1]: m[0]} if is_named else m[0] for m in matches]


def linked_files(path: str, text: str) -> Iterator[Path]:
    """Yield the files of the repository that a page links to or shows."""
    for _, target, _ in _LINK.findall(text):
        file = (ROOT / path).parent / target
        if file.is_file():
            yield file.resolve()


def for_site(path: str, text: str) -> str:
    """Return a page with its links to folders led to their pages, or taken out."""

    def mended(link: re.Match[str]) -> str:
        folder = (ROOT / path).parent / link[2]
        if not folder.is_dir():
            return link[0]
        page = f"{link[2].rstrip('/')}/README.md"
        return f"{link[1]}({page})" if (folder / "README.md").exists() else link[1][1:-1]

    return re.sub(r"^---\n.*?\n---\n", "", _LINK.sub(mended, text), flags=re.DOTALL)


def write_site(folder: Path) -> None:
    """Lay out the site's source under ``folder``, which is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    known = pages()
    sources = folder / "pages"
    copied = {ROOT / "docs/site.css"}
    for path, text in known.items():
        target = sources / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(for_site(path, text))
        copied |= {file for file in linked_files(path, text) if file.suffix != ".md"}
    for file in copied:
        target = sources / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    project = tomllib.loads(CONFIG.read_text())["project"]
    handler = project["plugins"]["mkdocstrings"]["handlers"]["python"]
    handler["paths"] = [str(ROOT / f"packages/mcore-{name}/src") for name in PACKAGES]
    project |= {"docs_dir": "pages", "site_dir": "site", "nav": navigation(known)}
    (folder / "zensical.toml").write_text(f"project = {_toml(project)}\n")


def _toml(value: Any) -> str:
    """Write a value as TOML on one line."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items())
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


if __name__ == "__main__":
    write_site(Path(sys.argv[1]))
