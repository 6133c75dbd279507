"""Commands from functions and config dataclasses: flags, help and one-line errors.

Each field or parameter is a flag of the same name. Its type defines the accepted values, its
docstring is the help text, and the parameter that holds its dataclass is its topic in the help.
Positional-only parameters take the words without a flag. All faults of a command line are
collected and reported together. Imports are light, so that help is printed at once.
"""

import ast
import difflib
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from mcore_base.options import (
    OptionsError,
    describe_rules,
    find_argument_faults,
    rules_of,
    types_of,
)

Result = TypeVar("Result")
HELP_FLAGS = ("-h", "--help", "--help-all")
NUMBERS = {int: "a whole number", float: "a number"}
HELP_COLUMN = 34
PAGES = "docs/flags"
"""Folder of the pages of all options, in the repository and on its site."""
LIKENESS = 0.8
"""Smallest similarity (difflib) at which a name is suggested for an unknown name."""
LAYER_LETTERS = frozenset("M*-EGP[]|/")
"""Letters of ``--hybrid-override-pattern``: a word of them, such as ``--M*``, is a value."""
TYPO = 0.85
"""Similarity from which a name is preferred to names with all words of the unknown name."""


class FaultCollector:
    """Collects the faults of one command over several passes, a line each.

    A flag is unsettled once its value is faulty or unknown. Later passes compute with a default
    instead, so a later line that names an unsettled flag may be wrong and is dropped.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.unsettled: set[str] = set()

    def add(self, line: str, *flags: str) -> None:
        """Add one fault and mark ``flags`` as unsettled."""
        self.lines.append(line)
        self.unsettled.update(flags)

    def add_error(self, error: Exception) -> None:
        """Add the lines of an error, except duplicates and lines with unsettled flags."""
        for line in error.lines if isinstance(error, OptionsError) else (str(error),):
            if not flags_in(line) & self.unsettled and line not in self.lines:
                self.lines.append(line)

    def attempt(
        self, function: Callable[..., Result], *arguments: Any, unsettles: Iterable[str] = ()
    ) -> Result | None:
        """Return the result of a function, or add its error and return None.

        Args:
            function: raises ValueError or FileNotFoundError for bad input.
            arguments: arguments of the function.
            unsettles: flags that are unsettled without the function's result.
        """
        try:
            return function(*arguments)
        except (ValueError, FileNotFoundError) as error:
            self.add_error(error)
            self.unsettled.update(unsettles)
            return None

    def raise_all(self) -> None:
        """Raise ``OptionsError`` with all faults, if there are any."""
        if self.lines:
            raise OptionsError(self.lines)


@dataclass(frozen=True, slots=True)
class Option:
    """One flag, or one positional word, of a command."""

    name: str
    kind: Any
    """Type: bool, int, float, str, Path, a Literal, ``float | Literal``, a tuple of these."""
    default: Any
    """Default value; ``inspect.Parameter.empty``: the option is required."""
    owner: Any
    """Dataclass or function whose docstring has the help text."""
    topic: str = ""
    is_positional: bool = False

    @property
    def flag(self) -> str:
        """The option as it is typed on a command line."""
        return self.name if self.is_positional else "--" + self.name.replace("_", "-")

    @property
    def is_required(self) -> bool:
        """Whether the command requires the option."""
        return self.default is inspect.Parameter.empty

    @property
    def num_values(self) -> int | None:
        """Number of words after the flag; None: any number."""
        if get_origin(self.kind) is not tuple:
            return 0 if self.kind is bool else 1
        return None if get_args(self.kind)[-1] is ... else len(get_args(self.kind))

    @property
    def invocation(self) -> str:
        """The option with its values, as in help."""
        if self.kind is bool:
            return f"--[no-]{self.flag[2:]}"
        if self.is_positional:
            return f"{self.name.upper()} ..." if self.num_values is None else self.name.upper()
        kinds = get_args(self.kind) if get_origin(self.kind) is tuple else (self.kind,)
        shown = ("..." if kind is ... else _shown(kind) for kind in kinds)
        return " ".join([self.flag, *shown])


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to four known names that are similar to an unknown name."""
    known = sorted(known)
    parts = set(re.findall(r"[^-_ ]+", name))
    longer = [word for word in known if parts <= set(re.findall(r"[^-_ ]+", word))]
    is_negative = name.startswith("--no-")
    bare = {w.lstrip("-"): w for w in known if w.startswith("--no-") == is_negative}
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=TYPO)
    if not close and not 1 <= len(longer) <= 4:
        cutoff = LIKENESS if len(name) > 5 else 0.6
        close = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=cutoff)
    return [bare[word] for word in close] or (longer if len(longer) <= 4 else [])


def unknown(name: str, known: Iterable[str], kind: str = "option") -> str:
    """Return a message that a name is unknown, with the most similar known names."""
    near = nearest(name, known)
    return f"unknown {kind} {name}" + (f": did you mean {_and(near, 'or')}?" if near else ".")


def flags_in(text: str) -> set[str]:
    """Return the flags in a text; for ``--no-x`` also ``--x``."""
    names = {name.rstrip("-") for name in re.findall(r"--[a-z][a-z0-9-]*", text)}
    return names | {"--" + name[5:] for name in names if name.startswith("--no-")}


def parse(
    kind: Callable[..., Any],
    program: str,
    words: Sequence[str],
    *,
    usual: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Any:
    """Parse words; return the dataclass built from them, or the result of the called function.

    Args:
        kind: the dataclass or the function; dataclasses in it are topics of its help.
        program: program and command, for help and errors.
        words: arguments of the command.
        usual: names of the options that ``--help`` shows; empty: all of them.
        defaults: defaults by name, which override those of ``kind``.

    Raises:
        OptionsError: (a ValueError) with all unknown options, values of the wrong type, missing
            options and broken rules.
        SystemExit: after help.
    """
    if any(word in HELP_FLAGS for word in words):
        print(help_text(kind, program, words, list_options(kind), usual))
        raise SystemExit(0)
    faults = FaultCollector()
    call = read_options(kind, program, words, faults, defaults=defaults)
    faults.raise_all()
    assert call is not None
    return call()


def read_options(
    kind: Callable[..., Any],
    program: str,
    words: Sequence[str],
    faults: FaultCollector,
    *,
    defaults: Mapping[str, Any] | None = None,
    placeholders: Mapping[str, Any] | None = None,
) -> Callable[[], Any] | None:
    """Parse words into a call of a dataclass or function; add every fault to ``faults``.

    Args:
        kind: the dataclass or the function.
        program: program and command, for errors.
        words: arguments of the command.
        faults: collects the faults.
        defaults: defaults by name, which override those of ``kind``.
        placeholders: values by name for required options that are missing or faulty, so that
            other options can be checked; by default any value of the option's type.

    Returns:
        ``kind`` bound to its arguments; faulty options have their defaults. None if a
        dataclass cannot be built with the defaults either.
    """
    values = {**(defaults or {}), **read_words(list_options(kind), words, faults)}
    return build_options(kind, program, values, faults, placeholders=placeholders)


def build_options(
    kind: Callable[..., Any],
    program: str,
    values: Mapping[str, Any],
    faults: FaultCollector,
    *,
    placeholders: Mapping[str, Any] | None = None,
) -> Callable[[], Any] | None:
    """Bind values by name to a dataclass or function, as ``read_options`` does with words."""
    required = [o for o in list_options(kind) if o.is_required and o.name not in values]
    missing = [option.flag for option in required if option.flag not in faults.unsettled]
    if missing:
        faults.add(f"{program} needs {_and(missing)}: see {program} --help.", *missing)
    if is_dataclass(kind):
        built = _build(kind, values, faults, placeholders or {})
        return None if built is None else lambda: built
    arguments = _arguments(kind, values, faults, placeholders or {})
    if arguments is None:
        return None
    call = partial(kind, *arguments[0], **arguments[1])
    bound = inspect.signature(kind).bind(*call.args, **call.keywords).arguments
    for line in find_argument_faults(kind, bound):
        faults.add_error(ValueError(line))
    return call


def list_options(kind: Callable[..., Any]) -> list[Option]:
    """List the options of a dataclass or a function, including nested dataclasses."""
    return list(_options_of(kind))


@cache
def _options_of(kind: Callable[..., Any]) -> tuple[Option, ...]:
    options, types = [], types_of(kind)
    for parameter in _parameters_of(kind):
        name = parameter.name
        if is_dataclass(types[name]):
            options += [replace(option, topic=name) for option in _options_of(types[name])]
        else:
            is_positional = parameter.kind is parameter.POSITIONAL_ONLY
            options.append(
                Option(name, types[name], parameter.default, kind, is_positional=is_positional)
            )
    return tuple(options)


@cache
def _parameters_of(kind: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(kind).parameters.values())


def _arguments(
    kind: Callable[..., Any],
    values: Mapping[str, Any],
    faults: FaultCollector,
    placeholders: Mapping[str, Any],
) -> tuple[list[Any], dict[str, Any]] | None:
    """Return positional and named arguments; None if a dataclass cannot be built."""
    types, positional, named = types_of(kind), [], {}
    is_complete = True
    for parameter in _parameters_of(kind):
        name = parameter.name
        value = values.get(name, placeholders.get(name))
        if is_dataclass(types[name]):
            value = _build(types[name], values, faults, placeholders)
        elif name not in values and parameter.default is not parameter.empty:
            value = parameter.default
        elif value is None:  # required and missing: any value, to check the other options
            value = _placeholder(types[name])
        is_complete &= value is not None
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            named[name] = value
    return (positional, named) if is_complete else None


def _placeholder(kind: Any) -> Any:
    """Return any value of an option's type."""
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if get_origin(kind) is tuple:
        return tuple(_placeholder(each) for each in get_args(kind) if each is not ...)
    return kind("1")


def _build(
    kind: Any,
    values: Mapping[str, Any],
    faults: FaultCollector,
    placeholders: Mapping[str, Any],
) -> Any:
    """Build a dataclass from values by name; None if the dataclass cannot be built.

    A dataclass may raise its first fault only. The options that the message names are reset to
    their defaults and unsettled, and the dataclass is built again, until it raises no fault.
    """
    values = dict(values)
    while arguments := _arguments(kind, values, faults, placeholders):
        try:
            return kind(*arguments[0], **arguments[1])
        except ValueError as error:
            faults.add_error(error)
            named = flags_in(str(error))
            faulty = {o.name: o.flag for o in list_options(kind) if o.flag in named}
            if not faulty.keys() & values.keys():
                return None
            faults.unsettled.update(faulty.values())
            values = {name: value for name, value in values.items() if name not in faulty}
    return None


def read_words(
    options: Sequence[Option], words: Sequence[str], faults: FaultCollector
) -> dict[str, Any]:
    """Parse words into values by option name; options without a valid value are omitted."""
    flags = {option.flag: option for option in options if not option.is_positional}
    negated = {f"--no-{o.flag[2:]}": o for o in flags.values() if o.kind is bool}
    values: dict[str, Any] = {}
    positionals, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if not is_flag(word):
            positionals.append(word)
            continue
        name, has_value, value = word.partition("=")
        name = canonical(name)
        option = flags.get(name) or negated.get(name)
        if option is None:
            known = [*flags, *negated]
            faults.add(unknown(name, known), *nearest(name, known))
        value_words = [value] if has_value else []
        limit = option.num_values if option else None
        while rest and not is_flag(rest[0]) and (limit is None or len(value_words) < limit):
            value_words.append(rest.pop(0))
        if option:
            _read_into(values, option, name, value_words, faults)
    _read_positionals(values, options, positionals, faults)
    # A name suggested for an unknown option is settled if the option has a value as well.
    faults.unsettled -= {option.flag for option in options if option.name in values}
    return values


def read_table(
    options: Sequence[Option], table: Mapping[str, Any], faults: FaultCollector
) -> dict[str, Any]:
    """Parse the values of a file by option name; options without a valid value are omitted.

    Lists become tuples, and integers are accepted for float options. Strings are parsed as on a
    command line.
    """
    by_name = {option.name: option for option in options}
    values: dict[str, Any] = {}
    for name, value in table.items():
        option = by_name[name]
        if type(value) is option.kind:
            values[name] = value
        elif option.kind is bool:
            faults.add(f"{option.flag} {value!r} must be true or false.", option.flag)
        elif isinstance(value, bool):
            faults.add(f"{option.flag} needs a value, not true or false.", option.flag)
        else:
            words = [str(each) for each in (value if isinstance(value, list) else (value,))]
            _read_into(values, option, option.flag, words, faults)
    return values


def _read_into(
    values: dict[str, Any], option: Option, name: str, words: list[str], faults: FaultCollector
) -> None:
    try:
        values[option.name] = _read_values(option, name, words)
    except ValueError as error:
        values.pop(option.name, None)  # an earlier value of a repeated option
        faults.add(str(error), option.flag)


def _read_values(option: Option, name: str, words: list[str]) -> Any:
    if option.kind is bool:
        if words:
            raise ValueError(f"{name} takes no value: {option.invocation} turns it on or off.")
        return name == option.flag
    num_values = option.num_values
    if num_values is not None and len(words) < num_values:
        raise ValueError(
            f"{name} needs {'a value' if num_values == 1 else f'{num_values} values'}."
        )
    if get_origin(option.kind) is not tuple:
        return _read_value(name, option.kind, words[0])
    kinds = get_args(option.kind)
    kinds = kinds[:1] * len(words) if num_values is None else kinds
    return tuple(_read_value(name, kind, word) for kind, word in zip(kinds, words, strict=True))


def _read_value(name: str, kind: Any, word: str) -> Any:
    if get_origin(kind) is Literal:
        if word not in get_args(kind):
            choices = [choice for choice in get_args(kind) if choice]
            raise ValueError(f"{name} {word!r} is unknown: use {_and(choices, 'or')}.")
        return word
    kind, *choices = _alternatives(kind)
    if word in choices:
        return word
    try:
        return kind(word)
    except ValueError:
        choice_text = " or ".join([NUMBERS[kind], *choices])
        raise ValueError(f"{name} {word!r} must be {choice_text}.") from None


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Split ``float | Literal["auto"]`` into type and words; return ``(kind,)`` for others."""
    if get_origin(kind) not in (Union, UnionType):
        return (kind,)
    number, words = get_args(kind)
    return number, *get_args(words)


def _read_positionals(
    values: dict[str, Any], options: Sequence[Option], words: list[str], faults: FaultCollector
) -> None:
    rest = list(words)
    for option in options:
        if option.is_positional and rest:
            value_words = rest if option.num_values is None else rest[: option.num_values]
            _read_into(values, option, option.name.upper(), value_words, faults)
            rest = rest[len(value_words) :]
    if rest:
        subject = f"{rest[0]!r} belongs" if len(rest) == 1 else f"{' '.join(rest)!r} belong"
        faults.add(f"{subject} to no option; options begin with two dashes.")


def is_flag(word: str) -> bool:
    """Whether a word is a flag; negative numbers and patterns of layers are values."""
    return word.startswith("--") and not LAYER_LETTERS.issuperset(word)


def canonical(name: str) -> str:
    """Return an option's name with dashes instead of underscores."""
    return "--" + name[2:].replace("_", "-") if name.startswith("--") else name


def file_text(flag: str, path: str | Path) -> str:
    """Return the text of a file that an option names; "" for an empty path.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the path is a folder, or the file is not UTF-8 text.
    """
    if not path:
        return ""
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{flag} {path} is a folder: give a text file.")
    if not file.exists():
        raise FileNotFoundError(f"{flag} {path} does not exist: give a text file.")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{flag} {path} is not UTF-8 text ({error.reason}): give a text file."
        ) from None


def help_text(
    kind: Callable[..., Any],
    program: str,
    words: Sequence[str],
    options: Sequence[Option],
    usual: Collection[str],
) -> str:
    """Return the requested help: usual options, all options, or those of a topic or a word."""
    position = next(i for i, word in enumerate(words) if word in HELP_FLAGS)
    following = words[position + 1 : position + 2]
    topic = following[0] if following else ""
    topics = list(dict.fromkeys(option.topic for option in options if option.topic))
    chosen = list(options)
    if words[position] != "--help-all" and topic:
        part = canonical(topic).lstrip("-").replace("-", "_")
        chosen = [o for o in options if part == o.topic] or [
            o for o in options if part in o.name
        ]
        if not chosen:
            raise ValueError(f"{unknown(topic, topics, 'topic')} {_topics(topics)}")
    elif words[position] != "--help-all" and usual:
        chosen = [option for option in options if option.name in usual]
    positionals = "".join(f" {o.invocation}" for o in options if o.is_positional)
    lines = [f"usage: {program}{positionals} [OPTIONS]", "", _first_paragraph(kind)]
    texts = option_texts(options)
    for heading in dict.fromkeys(option.topic for option in chosen):
        topic_options = [option for option in chosen if option.topic == heading]
        summary = _first_paragraph(topic_options[0].owner).splitlines()[0] if heading else ""
        lines += ["", f"{heading.replace('_', '-') or 'options'}: {summary}".rstrip(" :")]
        lines += [
            line for o in topic_options for line in _entry(o, texts.get((o.owner, o.name), ""))
        ]
    if len(chosen) < len(options):
        lines += ["", f"{len(chosen)} of {len(options)} options; --help-all shows all of them."]
        lines += [_topics(topics)]
    if chosen and program.startswith("mcore-"):
        page = f"{PAGES}/{program.split(maxsplit=1)[0]}.md#{anchor_of(chosen[0], program)}"
        lines += ["", f"page of the repository: {page}"]
    return "\n".join(lines)


def anchor_of(option: Option, program: str) -> str:
    """Return the anchor of an option on its program's page of options.

    Options of config modules have one meaning in all commands, so their anchor is the option's
    name; the anchor of another option begins with its command.
    """
    name = option.name.replace("_", "-")
    if is_dataclass(option.owner) and option.owner.__module__.endswith("config"):
        return name
    return "-".join([*program.split()[1:], name]).lower()


def _topics(topics: list[str]) -> str:
    text = f"--help TOPIC shows one of {', '.join(topics)}, or the options with a word in them."
    return textwrap.fill(text.replace("_", "-"), _help_width(), break_on_hyphens=False)


def _help_width() -> int:
    return min(100, shutil.get_terminal_size((100, 24)).columns)


def _entry(option: Option, text: str) -> Iterator[str]:
    """Yield the help lines of one option: the invocation, and the text to its right."""
    if option.is_required:
        text += " Required."
    elif option.default is True:
        text += " On by default."
    elif shown := _shown_default(option.default):
        text += f" Default: {shown}."
    # Lines break between choices: commas get a blank for the wrapping only.
    left = textwrap.fill(
        option.invocation.replace(",", ", "),
        _help_width(),
        initial_indent="  ",
        subsequent_indent="      ",
        break_on_hyphens=False,
    ).replace(", ", ",")
    lines = textwrap.wrap(text, _help_width() - HELP_COLUMN, break_on_hyphens=False) or [""]
    if len(left) >= HELP_COLUMN:
        yield left
    else:
        yield f"{left:{HELP_COLUMN}}{lines.pop(0)}".rstrip()
    yield from (" " * HELP_COLUMN + line for line in lines)


def _shown_default(value: Any) -> str:
    """Return a default as text; "" for options that are off by default and for 0."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is False or (value == 0 and isinstance(value, int)) else str(value)


def option_texts(options: Iterable[Option]) -> dict[tuple[Any, str], str]:
    """Return the help text of each option: a field's docstring, or ``Args`` of a function."""
    texts: dict[tuple[Any, str], str] = {}
    for owner in dict.fromkeys(option.owner for option in options):
        by_name = _argument_texts(owner)
        if is_dataclass(owner):
            bases = [base for base in owner.__mro__ if is_dataclass(base)]  # pyrefly: ignore
            by_name = {
                name: text for base in bases for name, text in _field_texts(base).items()
            }
            for name, rules in rules_of(owner).items():
                by_name[name] = f"{by_name.get(name, '')} {describe_rules(rules)}".rstrip()
        for name, text in by_name.items():
            texts[owner, name] = " ".join(text.replace("``", "").split())
    return texts


def _field_texts(owner: Any) -> dict[str, str]:
    """Return the docstrings under a dataclass's fields, by name of the field."""
    tree = ast.parse(textwrap.dedent("".join(_class_source(owner))))
    body = tree.body[0].body  # pyrefly: ignore
    return {
        field.target.id: str(below.value.value)  # pyrefly: ignore
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def _class_source(owner: Any) -> list[str]:
    """Return the source lines of a class, without parsing the file as inspect does."""
    lines = inspect.getsource(sys.modules[owner.__module__]).splitlines(keepends=True)
    start = next(
        i for i, line in enumerate(lines) if re.match(rf"class {owner.__name__}\b", line)
    )
    # The class ends before the first later line that starts at column 0.
    ends = (i for i, line in enumerate(lines) if i > start and line[0] not in " \n)#")
    return lines[start : next(ends, len(lines))]


def _argument_texts(owner: Any) -> dict[str, str]:
    """Return the entries of ``Args:`` in a Google-style docstring, by name."""
    texts, name = {}, ""
    for line in (inspect.getdoc(owner) or "").partition("Args:\n")[2].splitlines():
        indent = len(line) - len(line.lstrip())
        if line and not indent:
            break
        if indent == 4 and ":" in line:
            name, _, text = line.strip().partition(":")
            texts[name] = text
        elif name:
            texts[name] += f" {line}"
    return texts


def _first_paragraph(owner: Any) -> str:
    return (inspect.getdoc(owner) or "").partition("\n\n")[0].replace("``", "")


def _and(names: Sequence[str], word: str = "and") -> str:
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def _shown(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(choice for choice in get_args(kind) if choice) + "}"
    kind, *choices = _alternatives(kind)
    return "|".join([kind.__name__.upper(), *choices])
