"""The pages of all options of all commands, from the tables by which command lines are read.

``uv run python tests/docs/flags_page.py`` writes docs/flags anew. An option has the anchor to
which ``--help`` links.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, is_dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.sources import ROOT

import mcore_ckpt.cli
import mcore_data.cli
import mcore_infer.cli
import mcore_models.cli
import mcore_train.cli
from mcore_base import command_line
from mcore_base.command_line import Option, anchor_of, list_options, option_texts
from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.golden.cli import VERBS as GOLDEN_VERBS
from mcore_train.launching.cli import LAUNCHERS
from mcore_train.launching.cli import VERBS as JOB_VERBS

FOLDER = ROOT / "docs/flags"
PROGRAMS = {
    "mcore-train": mcore_train.cli,
    "mcore-data": mcore_data.cli,
    "mcore-ckpt": mcore_ckpt.cli,
    "mcore-infer": mcore_infer.cli,
    "mcore-models": mcore_models.cli,
}
VERBS: dict[str, Sequence[str]] = {
    "mcore-train launch": [*LAUNCHERS, *JOB_VERBS],
    "mcore-train golden": list(GOLDEN_VERBS),
    "mcore-train schedule": ["show"],
    "mcore-train plan": list(FAMILY_COMMANDS),
    "mcore-train verify": ["gpt", "bert", "t5"],
    "mcore-train doctor": ["", "RUN"],
    "mcore-models count": ["gpt", "bert", "t5"],
    "mcore-models show": ["llama-3-8b"],
}
"""Words behind a command that have options of their own."""
_HEAD = """# Options of {program}

Written by `uv run python tests/docs/flags_page.py` from the tables by which commands are read.
An option that several commands have is listed once, under its topic. Switches are turned off by
`--no-`; a recipe has the same names with underscores. Empty defaults are "none", "off" or 0.

| command | what it does | options |
| --- | --- | --- |
"""
_TABLE = "\n| option | default | what it does |\n| --- | --- | --- |\n"


@dataclass(frozen=True, slots=True)
class Listed:
    """A command and the options that it reads."""

    program: str
    """With its words: ``mcore-train launch slurm``."""
    kind: Any
    """Dataclass or function."""

    @property
    def options(self) -> list[Option]:
        """Its options, in the order of the help."""
        return list_options(self.kind)


@cache
def commands(program: str) -> list[Listed]:
    """List the commands of a program: each is asked for its help, which is not written."""
    found: dict[str, Listed] = {}

    def record(kind: Any, named: str, *_: Any) -> str:
        found.setdefault(named, Listed(named, kind))
        return ""

    module, write = PROGRAMS[program], command_line.help_text
    command_line.help_text = record
    try:
        with redirect_stdout(StringIO()):
            for command in module.COMMANDS:
                for verb in VERBS.get(f"{program} {command}", [""]):
                    assert module.main([command, *([verb] if verb else []), "--help-all"]) == 0
    finally:
        command_line.help_text = write
    return list(found.values())


def _default(option: Option) -> str:
    if option.is_required:
        return "required"
    if option.default is True:
        return "on"
    value = option.default
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    is_plain = value in ("", False, None) or (value == 0 and isinstance(value, int))
    return "" if is_plain else f"`{value}`"


def _text(text: str) -> str:
    """Write a help text as a cell of Markdown: flags as code, markup as plain characters."""
    text = text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("[", "\\[")
    return re.sub(r"(?<![\w`-])(--[a-z0-9][a-z0-9-]*)", r"`\1`", text)


def _summary(program: str, listed: Listed) -> str:
    """Return what a command does: a function's own words, else those of the program's help."""
    command = listed.program.split()[1]
    text = PROGRAMS[program].COMMANDS[command][0]
    if not is_dataclass(listed.kind) or command == "launch":
        text = (listed.kind.__doc__ or "").strip().split("\n\n", maxsplit=1)[0]
    return _text(" ".join(text.replace("``", "`").split()))


def _sections(listed: Listed) -> Iterator[tuple[str, list[Option]]]:
    """Yield the headings of a command's options and the options below each."""
    own = " ".join(listed.program.split()[1:])
    groups: dict[str, list[Option]] = {}
    for option in listed.options:
        is_shared = anchor_of(option, listed.program) == option.name.replace("_", "-")
        heading = option.topic.replace("_", "-") if is_shared and option.topic else own
        groups.setdefault(heading, []).append(option)
    yield from groups.items()


def render(program: str) -> str:
    """Return the text of a program's page."""
    rows, sections, anchors = [], {}, set()
    before: dict[str, dict[str, str]] = {}
    for listed in commands(program):
        links = {}
        for heading, options in _sections(listed):
            texts = option_texts(options)
            for option in options:
                anchor = anchor_of(option, listed.program)
                if anchor not in anchors:
                    anchors.add(anchor)
                    text = texts.get((option.owner, option.name), "")
                    row = _row(program, option, anchor, text)
                    sections.setdefault(heading, []).append(row)
            links[heading] = f"[{heading}](#{anchor_of(options[0], listed.program)})"
        # A command with all topics of an earlier one names that one.
        whole = [name for name, topics in before.items() if topics.items() <= links.items()]
        longest = max(whole, key=lambda name: len(before[name]), default="")
        shown = [
            link for heading, link in links.items() if heading not in before.get(longest, {})
        ]
        if len(before.get(longest, ())) > 4:
            shown = [f"all of `{longest}`", *shown]
        else:
            shown = list(links.values())
        before[listed.program] = links
        rows.append(
            f"| `{listed.program}` | {_summary(program, listed)} | {', '.join(shown)} |\n"
        )
    parts = [_HEAD.format(program=program), *rows]
    for heading, lines in sections.items():
        about = _about(program, heading)
        parts += [f"\n## {heading}\n", f"\n{about}\n" if about else "", _TABLE, *lines]
    return "".join(parts)


def _row(program: str, option: Option, anchor: str, text: str) -> str:
    """Write an option; of one that mcore-train has too, the place of its text."""
    if program != "mcore-train" and anchor in _training_anchors():
        shown = f"as of [mcore-train](mcore-train.md#{anchor})"
    else:
        shown = _text(text)
    invocation = option.invocation.replace("|", "\\|")
    return f'| <a id="{anchor}"></a>`{invocation}` | {_default(option)} | {shown} |\n'


@cache
def _training_anchors() -> set[str]:
    found = {
        anchor_of(option, listed.program): option
        for listed in commands("mcore-train")
        for option in listed.options
    }
    return {name for name, option in found.items() if name == option.name.replace("_", "-")}


def _about(program: str, topic: str) -> str:
    """Return what a topic is about: the first line of its config's docstring."""
    for listed in commands(program):
        for option in listed.options:
            if option.topic.replace("_", "-") == topic and is_dataclass(option.owner):
                return _text((option.owner.__doc__ or "").strip().splitlines()[0])
    return ""


def pages() -> dict[Path, str]:
    """Return the text of every page by its file."""
    return {FOLDER / f"{program}.md": render(program) for program in PROGRAMS}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
