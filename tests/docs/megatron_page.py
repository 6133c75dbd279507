"""The page that lists what happens here to every option of megatron-core's training parser.

Made from megatron_flags.toml of mcore-train. `uv run python tests/docs/megatron_page.py` writes
docs/megatron-flags.md anew; in an environment with megatron-core (`nox -s megatron`),
`python tests/docs/megatron_page.py options` prints the options whose rows in the table need
another number of values or another default.
"""

import argparse
import inspect
import sys
import warnings
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.sources import ROOT

from mcore_base.command_line import Option, canonical, list_options
from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.options.megatron_flags import find_foreign, parser_flags
from mcore_train.options.parsing import LAYERS_PER_STAGE

PAGE = ROOT / "docs/megatron-flags.md"
_HEAD = """# Megatron's flags

Every option of the training parser of megatron-core 0.19, and what `mcore-train` does with it.
Written by `uv run python tests/docs/megatron_page.py` from the table by which commands are
read, megatron_flags.toml of mcore-train; `nox -s megatron` compares the list with
megatron-core's own parser.

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


def options_of_parser() -> dict[str, tuple[int | str, str]]:
    """Return number of values and default of each option; needs megatron-core."""
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
                found[flag] = (takes, default)
    return dict(sorted(found.items()))


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
    own, row = own_options().get(flag), find_foreign(flag)
    if own is not None:
        ours = own.default
        is_switch = own.kind is bool or ours is inspect.Parameter.empty
        shown = "" if is_switch or ours in ("", 0, (), -1) else f", default {_spelled(ours)}"
        idle = f"; while its feature is off, noted: {row.idle}" if row and row.idle else ""
        return "same" + (shown if _spelled(ours) != default else "") + idle
    if row is None:
        return ""
    if flag == LAYERS_PER_STAGE:
        return f"becomes `{row.becomes}`, {row.note}"
    if row.refused:
        return f"refused: {row.refused}"
    what = f"becomes `{' '.join(row.flags)}`" if row.becomes else "noted"
    what += f", {row.only} alone" if row.only else ""
    return what + (f": {row.note}" if row.note else "")


def render() -> str:
    """Return the text of the page."""
    rows = parser_flags()
    values = ", ".join(
        f"`{name} {value}` is `{becomes}`"
        for name, row in rows.items()
        for value, becomes in row.values.items()
    )
    lines = [
        f"| `{name}` | {row.default} | {answer(name, row.default)} |\n"
        for name, row in rows.items()
    ]
    return _HEAD.format(values=values) + "".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["options"]:
        for name, option in options_of_parser().items():
            row = parser_flags().get(name)
            if row is None or (row.takes, row.default) != option:
                print(name, *option)
    PAGE.write_text(render())
