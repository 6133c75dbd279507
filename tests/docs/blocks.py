"""The code blocks of the documents, and what each says about being run."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*?) -->\n)?"
    r"```(?P<language>python|bash|toml|text)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a document."""

    document: str
    line: int
    language: str
    code: str
    run_by: str
    """Node id of the test that runs it; empty: ``tests/docs`` does."""
    not_run: str
    """Why it cannot be run here; empty: it is."""
    file: str = ""
    """Name under which a tutorial's reader saves it."""

    @property
    def place(self) -> str:
        """Where it is: ``README.md:12``."""
        return f"{self.document}:{self.line}"


def documents() -> list[Path]:
    """Return README, the guides and the packages' pages."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SKILL.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "recipes").glob("*.md")),
        *sorted((ROOT / "examples").glob("*.md")),
        *sorted((ROOT / "packages").glob("*/README.md")),
        *sorted((ROOT / "packages").glob("*/SKILL.md")),
    ]


def blocks_of(text: str, document: str) -> list[Block]:
    """Return the blocks of one document.

    Raises:
        ValueError: if the comment before a block is none of ``run by: test``,
            ``not run: reason`` and ``file: name``.
    """
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        said = {"run by": "", "not run": "", "file": ""}
        if match["note"]:
            key, _, value = match["note"].partition(": ")
            if key not in said or not value:
                raise ValueError(f"{document}:{line}: {match['note']!r} is no note on running")
            said[key] = value
        found.append(
            Block(
                document,
                line,
                match["language"],
                match["code"],
                said["run by"],
                said["not run"],
                said["file"],
            )
        )
    return found


def all_blocks() -> list[Block]:
    """Return the blocks of every document."""
    return [
        block
        for path in documents()
        for block in blocks_of(path.read_text(), str(path.relative_to(ROOT)))
    ]
