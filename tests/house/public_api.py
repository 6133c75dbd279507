"""The pinned public names of every package.

`uv run python tests/house/public_api.py` writes them anew into public_api.toml: do so when a
change adds or removes a name on purpose, and say it in the package's changelog.
"""

import ast
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.sources import PACKAGES, Source, dotted, package_sources

PINNED = Path(__file__).with_name("public_api.toml")


def public_names(front: Source) -> dict[str, str]:
    """Return the lazy table of a package front: public name to room."""
    for node in front.tree.body:
        if isinstance(node, ast.AnnAssign) and node.value and dotted(node.target) == "_EXPORTS":
            return ast.literal_eval(node.value)
    raise ValueError(f"{front.name} has no _EXPORTS table")


def front_of(package: str) -> Source:
    """Return the front page of a package."""
    return next(s for s in package_sources(package) if s.room == "")


def pinned() -> dict[str, list[str]]:
    """Return the committed names of every package."""
    return tomllib.loads(PINNED.read_text())


def render() -> str:
    """Return the text of the file of pinned names."""
    lines = ["# Written by `uv run python tests/house/public_api.py`.\n"]
    for package in PACKAGES:
        names = sorted(public_names(front_of(package)))
        quoted = "".join(f'    "{name}",\n' for name in names)
        lines.append(
            f"mcore_{package} = [\n{quoted}]\n" if names else f"mcore_{package} = []\n"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    PINNED.write_text(render())
