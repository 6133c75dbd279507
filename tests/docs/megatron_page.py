"""The page that lists what happens here to every option of megatron-core's training parser.

Made from the tables of ``mcore_train.options.megatron_flags``; megatron_options.toml holds the
options of the parser. `uv run python tests/docs/megatron_page.py` writes
docs/megatron-flags.md anew; in an environment with megatron-core (`nox -s megatron`),
`python tests/docs/megatron_page.py options` writes megatron_options.toml anew.
"""

import argparse
import inspect
import json
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.sources import ROOT

from mcore_base.command_line import Option, canonical, list_options
from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.options.megatron_flags import INSTEAD, NOTES, SPELLINGS, VALUES, matching
from mcore_train.options.parsing import LAYERS_PER_STAGE

PAGE = ROOT / "docs/megatron-flags.md"
OPTIONS = Path(__file__).parent / "megatron_options.toml"
_HEAD = """# Megatron's flags

Every option of the training parser of megatron-core 0.19, and what `mcore-train` does with it.
Written by `uv run python tests/docs/megatron_page.py` from the tables by which commands are
read; `nox -s megatron` compares the list with megatron-core's own parser.

- *same*: an option of ours of the same meaning; where the default is another, it is in the
  table, and [defaults.md](defaults.md) has all of these. `--megatron-defaults` takes the
  model's.
- *becomes*: read as the flags that follow.
- *noted*: taken with its values, changes nothing, and is named in one line with the reason.
- *refused*: the command stops and names what to use instead.

Values that are spelled otherwise: {values}. `--sequence-parallel` with one tensor rank is noted
and off. `--fp8-amax-history-len` and `--fp8-amax-compute-algo` without a recipe mean
`--fp8-recipe delayed`. `--num-query-groups` counts without `--group-query-attention`, which
alone is one group.

| option | Megatron's default | here |
| --- | --- | --- |
"""
_ABSENT = "--help"
"""The parser's own."""


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """One option of megatron-core's parser."""

    flag: str
    takes: int | str
    """Values that follow it: a number, or "+" or "*"."""
    default: str
    """As Python writes it; "" where the flag itself turns something on or off."""


def foreign_options() -> Iterator[ForeignOption]:
    """Yield the committed options, sorted."""
    for flag, row in tomllib.loads(OPTIONS.read_text()).items():
        yield ForeignOption(flag, row["takes"], row.get("default", ""))


def parser_options() -> list[ForeignOption]:
    """List the options of the parser that is installed; needs megatron-core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.training.arguments import add_megatron_arguments

        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found = {}
    for action in parser._actions:
        takes = {None: 1}.get(action.nargs, action.nargs)
        default = "" if takes == 0 else _spelled(action.default)
        for name in action.option_strings:
            flag = canonical(name)
            if name.startswith("--") and flag != _ABSENT:
                found[flag] = ForeignOption(flag, takes, default)
    return [found[flag] for flag in sorted(found)]


def _spelled(default: object) -> str:
    """Write a default as it would be given; enumerations by the names of their members."""
    if hasattr(default, "name"):
        return str(getattr(default, "name"))  # noqa: B009 - a member of any enumeration
    return "none" if default is None else str(default)


@cache
def own_options() -> dict[str, Option]:
    """Map flags, with the ``--no-`` form of switches, to options of the training commands."""
    found: dict[str, Option] = {}
    for command in FAMILY_COMMANDS.values():
        for option in list_options(command.run):
            found.setdefault(option.flag, option)
            if option.kind is bool:
                found.setdefault(f"--no-{option.flag[2:]}", option)
    return found


def answer(flag: str, default: str = "") -> str:
    """Return what happens here to one flag of Megatron's; "" if it is unknown."""
    own, spelling = own_options().get(flag), SPELLINGS.get(flag)
    if flag == LAYERS_PER_STAGE:
        return "becomes `--num-virtual-stages-per-pipeline-rank`, counted from `--num-layers`"
    if own is not None:
        ours = own.default
        is_switch = own.kind is bool or ours is inspect.Parameter.empty
        shown = "" if is_switch or ours in ("", 0, (), -1) else f", default {_spelled(ours)}"
        return "same" + (shown if _spelled(ours) != default else "")
    if spelling is not None:
        what = f"becomes `{' '.join(spelling.becomes)}`" if spelling.becomes else "noted"
        what += f", {spelling.only} alone" if spelling.only else ""
        return what + (f": {spelling.note}" if spelling.note else "")
    if note := matching(flag, NOTES):
        return f"noted: {note}"
    instead = matching(flag, INSTEAD)
    return f"refused: {instead.removesuffix('.')}" if instead else ""


def render() -> str:
    """Return the text of the page."""
    values = ", ".join(
        f"`{name} {value}` is `{' '.join(becomes)}`"
        for (name, value), becomes in VALUES.items()
    )
    rows = [
        f"| `{option.flag}` | {option.default} | {answer(option.flag, option.default)} |\n"
        for option in foreign_options()
    ]
    return _HEAD.format(values=values) + "".join(rows)


def write_options() -> None:
    """Write the options of the parser that is installed."""
    lines = [
        "# Options of megatron-core 0.19's training parser: values that follow, default.\n"
    ]
    for option in parser_options():
        default = f", default = {json.dumps(option.default)}" if option.default else ""
        lines.append(f'"{option.flag}" = {{ takes = {json.dumps(option.takes)}{default} }}\n')
    OPTIONS.write_text("".join(lines))


if __name__ == "__main__":
    if sys.argv[1:] == ["options"]:
        write_options()
    PAGE.write_text(render())
