"""Writes docs/compatibility.md: `uv run python tests/docs/compatibility_page.py`."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/compatibility.md"

_TEXT = """# Which versions fit together

Generated from the wheels' metadata by `tests/docs/compatibility_page.py`. A wheel asks for
its siblings by the ranges in its row, so that an installer chooses versions that fit.

| wheel | version | Python | torch | siblings |
| --- | --- | --- | --- | --- |
{rows}

Checkpoints and datasets that a released version has written load in all later versions.

| system | state |
| --- | --- |
| Linux, x86-64 and arm64 | supported; tested on x86-64 |
| macOS | not run there; its missing calls are hidden in a test of the data tools |
| Windows | refused at import with a line that names WSL 2, where the wheels run |

`nox -s tests_newest` runs the default suite on Python 3.11 and 3.13 with the newest torch. Last
run on Python 3.13.0, torch 2.15 and Triton 3.9, without the tests of house and docs: 4 937 of
4 938 pass. One fails because torch.compile warns that Python 3.13.0 must be 3.13.1 or later.
"""


def render() -> str:
    """Return the page."""
    rows = []
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        asked = dict(
            re.fullmatch(r"([a-z-]+)(?:\[.*\])?(.*)", line).groups()
            for line in project["dependencies"]
        )
        siblings = [f"{name[6:]} {asked[name]}" for name in asked if name.startswith("mcore-")]
        cells = (
            *(project["name"], project["version"], project["requires-python"]),
            asked.get("torch", "none"),
            "; ".join(siblings) or "none",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return _TEXT.format(rows="\n".join(rows))


if __name__ == "__main__":
    PAGE.write_text(render())
