"""Table of Megatron's options, and translation of a command line into our own flags.

megatron_flags.toml has a row for every option of megatron-core's parser: its meaning, its
default and what happens to it here. Parsing, suggestions, ``--megatron-defaults``,
``mcore-train migrate`` and docs/megatron-flags.md read these rows.
"""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from itertools import takewhile
from typing import Any

from mcore_base.command_line import (
    FaultCollector,
    Option,
    canonical,
    flags_in,
    is_flag,
    nearest,
    read_words,
)
from mcore_base.command_line import unknown as unknown_option
from mcore_train.composition import TrainConfig

_GROUPED = "--group-query-attention"
"""Flag without which Megatron's parser accepts --num-query-groups and ignores it."""

_EMPTY: Mapping[type, Any] = {bool: False, int: 0, float: 0.0, tuple: ()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignFlag:
    """One row of megatron_flags.toml: a flag of another program, and its meaning here."""

    takes: int | str = "*"
    """Number of values that follow the flag, "+" or "*"."""
    default: str = ""
    """Megatron's default as its parser prints it; "" for switches."""
    ours: Any = None
    """Megatron's default as a value of our option, if ``default`` does not give it."""
    becomes: str = ""
    """Our flags that replace it; ``{}`` stands for its values, which are dropped without
    ``{}``."""
    note: str = ""
    """Why the flag has no effect here, or a remark on what it becomes; logged once."""
    refused: str = ""
    """What to use instead of the flag."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Our flags by value of the flag, for values that our option spells differently."""
    only: str = ""
    """The only accepted value; empty: any value."""
    needs: str = ""
    """A flag without which this flag has no effect."""
    idle: str = ""
    """For an option of ours that changes no result: why the option has no effect while its
    feature is off. The option is then logged and dropped instead of refused."""
    yields: bool = False
    """Whether recipes, presets, checkpoints and all other flags override its replacement."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Our flags that replace it, without the placeholder of its values."""
        return tuple(word for word in self.becomes.split() if word != "{}")

    @property
    def num_dropped(self) -> int | None:
        """Number of values that are dropped with the flag; None: all up to the next flag."""
        if self.becomes.endswith("{}"):
            return 0
        return self.takes if isinstance(self.takes, int) else None


@dataclass(frozen=True, slots=True)
class Translation:
    """A command line in our own flags."""

    words: tuple[str, ...]
    """The accepted flags with their values."""
    defaults: tuple[str, ...] = ()
    """Flags that every other source of options overrides."""
    notes: tuple[str, ...] = ()
    """One line for each foreign flag without effect."""
    foreign: frozenset[str] = field(default_factory=frozenset)
    """The foreign flags that were given and accepted."""


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(
        files("mcore_train.options").joinpath("megatron_flags.toml").read_text()
    )


@cache
def _rows(section: str) -> Mapping[str, ForeignFlag]:
    return {name: ForeignFlag(**row) for name, row in _table()[section].items()}


def parser_flags() -> Mapping[str, ForeignFlag]:
    """Return the options of the training parser of megatron-core, sorted."""
    return _rows("parser")


def all_flags() -> Mapping[str, ForeignFlag]:
    """Return every row; names may be patterns with ``*``, of which the first match is used."""
    return {**_rows("parser"), **_rows("other"), **_rows("patterns")}


@cache
def find_foreign(name: str) -> ForeignFlag | None:
    """Return the row of a flag, by its name or the first pattern that it matches."""
    row = _rows("parser").get(name) or _rows("other").get(name)
    patterns = _rows("patterns").items()
    return row or next((each for key, each in patterns if fnmatchcase(name, key)), None)


def idle_reasons() -> Mapping[str, str]:
    """Return, by flag, why noted options have no effect while their feature is off."""
    return {name: row.idle for name, row in parser_flags().items() if row.idle}


def translated_names() -> set[str]:
    """Return the foreign flags that are translated, or logged by their exact name."""
    rows = {**_rows("parser"), **_rows("other")}
    return {name for name, row in rows.items() if row.becomes or row.note}


def megatron_default(option: Option) -> Any:
    """Return Megatron's default of an option of ours, as a value of that option.

    Returns:
        "required" if Megatron has no default; None if its command line has no such option.
    """
    stated = _table()["defaults"].get(option.name)
    if stated is not None:
        return stated
    row = parser_flags().get(option.flag)
    if row is None:
        return True if f"--no-{option.flag[2:]}" in parser_flags() else None
    if row.ours is not None:
        return tuple(row.ours) if isinstance(row.ours, list) else row.ours
    if row.takes == 0:
        return False
    if row.default == "none":
        return "required" if option.is_required else _EMPTY.get(type(option.default), "")
    words = row.default.strip("[]").replace("'", "").split(", ")
    faults = FaultCollector()
    return read_words([option], [option.flag, *filter(None, words)], faults)[option.name]


def translate(
    argv: Sequence[str], known: Collection[str], faults: FaultCollector
) -> Translation:
    """Rewrite a command line in our own flags; add a fault for each flag that cannot be.

    Faults are refused and unknown flags, foreign flags whose value is missing or not accepted,
    and flags of different names that set one option differently. If one flag is given twice,
    the last one wins.
    """
    words: list[str] = []
    defaults: list[str] = []
    notes: list[str] = []
    foreign: set[str] = set()
    setters = _Setters(known)
    given = {canonical(word.partition("=")[0]) for word in argv if is_flag(word)}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not is_flag(word):
            words.append(word)
            continue
        name, equals, value = word.partition("=")
        name = canonical(name)
        values = [value] if equals else _values_before_a_flag(rest)
        row = find_foreign(name)
        if name in known:
            ours = row.values.get(values[0]) if row and values else None
            if ours is not None:
                foreign.add(name)
                rest = rest if equals else rest[1:]
                words += ours.split()
                setters.add_all(f"{name} {values[0]}", ours.split())
                continue
            if name == "--window-size" and len(values) == 1 and "," in values[0]:
                values = [part.strip() for part in values[0].strip("()").split(",")]
                rest = rest if equals else rest[1:]
                words += [name, *values]
            else:
                words += [name, value] if equals else [name]
            setters.add(name, name, values)
            continue
        if row is None or row.refused:
            rest = rest if equals else rest[len(values) :]
            if row is None:
                names = {*known, *translated_names()}
                faults.add(
                    unknown_option(name, names), *(set(nearest(name, names)) - set(given))
                )
            else:
                faults.add(f"{name}: {row.refused}.", *(flags_in(row.refused) - set(given)))
            continue
        foreign.add(name)
        dropped = values[: row.num_dropped]
        rest = rest if equals else rest[len(dropped) :]
        problem = _fault_of_values(name, row, dropped, given)
        if problem:
            faults.add(problem, *(w for w in row.flags if is_flag(w)))
        elif row.yields:
            defaults += row.flags
        else:
            words += row.flags
            # Values that are not dropped follow in ``rest``, or after an equals sign.
            words += [value] if equals and not dropped else []
            setters.add_all(name, row.flags, after=[value] if equals else values)
        if row.note and not problem:
            notes.append(f"{name}: {row.note}.")
    if foreign and "--num-query-groups" in given and _GROUPED not in given:
        notes.append(f"--num-query-groups: query groups take effect here without {_GROUPED}.")
    setters.check(faults)
    return Translation(tuple(words), tuple(defaults), tuple(notes), frozenset(foreign))


def check_translation(config: TrainConfig, foreign: Collection[str]) -> None:
    """Refuse foreign flags that contradict the options of a config, as Megatron does.

    Raises:
        ValueError: with the flag and what it contradicts.
    """
    positions = config.model.position_embedding_type
    if "--no-position-embedding" in foreign and positions == "learned_absolute":
        raise ValueError(
            "--no-position-embedding turns --position-embedding-type learned_absolute off: "
            "leave it out, or choose rope or none."
        )


def _fault_of_values(
    name: str, row: ForeignFlag, values: list[str], given: Collection[str]
) -> str:
    """Return the fault in the values of a foreign flag; empty: no fault."""
    use = f": use {row.only}." if row.only else "."
    if row.num_dropped and len(values) < row.num_dropped:
        return f"{name} needs a value{use}"
    if row.only and values != [row.only]:
        return f"{name} {values[0]}{use}"
    if row.needs and row.needs not in given:
        return f"{name} has no effect without {row.needs}."
    return ""


class _Setters:
    """Records which flags of a command line set which option, and to which value."""

    def __init__(self, known: Collection[str]) -> None:
        self.known = known
        self.setters_by_option: dict[str, dict[str, tuple[str, str]]] = {}

    def add(self, written: str, flag: str, values: list[str]) -> None:
        """Record that ``written`` on the command line means ``flag`` with ``values``."""
        option = "--" + flag.removeprefix("--no-")
        option = option if option in self.known else flag
        meaning = " ".join([flag, *values])
        is_own = written == flag
        shown = meaning if is_own else f"{written} ({meaning})"
        setters = self.setters_by_option.setdefault(option, {})
        setters[option if is_own else written] = meaning, shown

    def add_all(self, written: str, words: Sequence[str], after: Sequence[str] = ()) -> None:
        """Record all flags in ``words``; the last one gets ``after`` if it has no values."""
        rest = list(words)
        while rest:
            flag = rest.pop(0)
            values = _values_before_a_flag(rest)
            del rest[: len(values)]
            self.add(written, flag, values or ([] if rest else list(after)))

    def check(self, faults: FaultCollector) -> None:
        """Add a fault for flags of different names that set one option differently."""
        for option, setters in self.setters_by_option.items():
            if len({meaning for meaning, _ in setters.values()}) > 1:
                both = " and ".join(shown for _, shown in setters.values())
                faults.add(f"{both} contradict: leave one of them out.", option)


def _values_before_a_flag(words: Sequence[str]) -> list[str]:
    return list(takewhile(lambda word: not is_flag(word), words))
