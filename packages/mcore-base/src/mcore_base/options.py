"""Options that carry their rules: bounds, needs and exclusions as metadata of config fields.

A config is a frozen dataclass that inherits ``Options``. ``option`` gives a field its default
and its rules as data; a ``Rule`` in ``rules`` computes conditions that data cannot express.
Rules refer to other options, also of other configs, by field name, which is unique within a
command. A config checks its own rules when it is built; a command checks all its configs
together by ``find_faults``, which finds every fault in one pass. Help, the docs and
``mcore-train verify`` read the same metadata by ``rules_of``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from math import isfinite
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

ON = True
"""Condition that an option is not 0, empty or off."""

_METADATA = "rules"


class OptionsError(ValueError):
    """Error with all faults in the options of one command, a line each."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        many = f"{len(lines)} things to change:\n  - " if len(lines) > 1 else ""
        super().__init__(many + "\n  - ".join(lines))


@dataclass(frozen=True, slots=True)
class When:
    """Condition on the value of one option."""

    name: str
    """Field or property of a config."""
    holds: Callable[[Any], object]
    """Whether the condition holds for a value of the option."""
    text: str = ""
    """The condition in messages; empty: the option with its value."""
    why: str = ""
    """Why another option needs or excludes the condition, as the end of a sentence."""
    instead: str = ""
    """Alternative to leaving an option out, for messages: "use auto"."""


class Because:
    """A condition with its reason: an option has one of ``values``; without them, is on."""

    def __init__(self, why: str, *values: Any, instead: str = "") -> None:
        self.why = why
        self.condition = values or ON
        self.instead = instead


Conditions = Mapping[str, Any] | Sequence[When]
"""Conditions on other options: ``When``s, or for each field a value, a tuple of values, ``ON``,
``Because`` or ``When``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionRules:
    """Bounds, needs and exclusions of one option, and its value in a small run."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    zero: str = ""
    """Meaning of 0, for messages: "off", "derive"."""
    hint: str = ""
    """Advice in the message for a value out of bounds."""
    part_of: tuple[When, ...] = ()
    """Conditions under which the feature that reads the option is on. While the feature is off,
    the config does not check the option, and a command refuses any value but the default."""
    needs: tuple[When, ...] = ()
    """Conditions that must hold if the option is not at its default."""
    idle_with: tuple[When, ...] = ()
    """Conditions under which the option has no effect and must be at its default."""
    excludes: tuple[When, ...] = ()
    """Conditions that must not hold if the option is not at its default (contradictions)."""
    neutral: Any = ...
    """A second value to which no condition applies, if the default is a choice at the start of
    a run: the value that switches the feature off."""
    shrinks_to: Any = ...
    """Value in the small run of ``mcore-train verify``; ``...``: the value of the run."""
    selects_path: str = ""
    """Name of the code path that the option selects, with fields in braces:
    "norm.{normalization}". ``mcore-train verify`` reports the paths that its small run did not
    cover."""

    @property
    def wanted(self) -> str:
        """The bounds in words; empty: no bounds."""
        low = f"{self.minimum} ({self.zero})" if self.zero else f"{self.minimum}"
        if self.minimum is not None and self.maximum is not None:
            return f"from {low} to {self.maximum}"
        if self.minimum is not None and self.below is not None:
            return f"at least {low} and below {self.below}"
        if self.minimum is not None:
            return f"{low} or more"
        bounds = {"above": self.above, "at most": self.maximum, "below": self.below}
        return " and ".join(f"{w} {bound}" for w, bound in bounds.items() if bound is not None)

    def admits(self, value: Any) -> bool:
        """Whether a value is within the bounds; true of values that are not numbers."""
        if not isinstance(value, (int, float)):
            return True
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


def rules(**data: Any) -> dict[str, OptionRules]:
    """Return the metadata of a field; arguments are those of ``OptionRules``.

    Conditions may be given as ``Conditions``.
    """
    for name in {"part_of", "needs", "idle_with", "excludes"} & data.keys():
        data[name] = _conditions(data[name])
    return {_METADATA: OptionRules(**data)}


def option(default: Any, **data: Any) -> Any:
    """Return a dataclass field with a default and the rules of ``OptionRules``."""
    return field(default=default, metadata=rules(**data))


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on several options, or a computed condition on one."""

    fields: tuple[str, ...]
    """Options that the rule reads. The rule is skipped if one of them does not exist in the
    command, already has a fault, or belongs to a feature that is off."""
    is_broken: Callable[[Any], Any]
    """Whether the rule is broken, called with a ``Values`` that has options as attributes."""
    message: str = ""
    """Message with values in braces, as in "--lr {lr}". Empty: ``is_broken`` returns the
    message, several messages, or nothing."""
    is_note: bool = False
    """Whether the message is a note that an option has no effect, and the run continues."""

    def lines(self, values: "Values") -> Iterator[str]:
        """Yield the messages of the rule for the given values."""
        result = self.is_broken(values)
        if not result:
            return
        if self.message:
            yield self.message.format_map(_Shown(values))
        else:
            yield from (result,) if isinstance(result, str) else result


class Options:
    """Base class of configs, which checks a config's own rules when it is built."""

    __slots__ = ()

    rules: tuple[Rule, ...] = ()
    part_of: Conditions = ()
    """Feature that all options of the config belong to, except options named in it."""

    def __post_init__(self) -> None:
        """Raise ``OptionsError`` with all faults that this config has by itself."""
        if lines := find_faults(self, is_whole=False):
            raise OptionsError(lines)


class Values:
    """The options and properties of several configs, as attributes of one object."""

    def __init__(self, configs: Iterable[Any]) -> None:
        self._owners = {name: config for config in configs for name in _names_of(type(config))}

    def add(self, owner: Any, names: Iterable[str]) -> None:
        """Add attributes of another object."""
        self._owners.update(dict.fromkeys(names, owner))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owners[name], name)

    def __contains__(self, name: str) -> bool:
        return name in self._owners


class _Shown(dict):
    """Values formatted for messages."""

    def __init__(self, values: Values) -> None:
        self.values_by_name = values

    def __missing__(self, name: str) -> Any:
        value = getattr(self.values_by_name, name)
        return " ".join(map(str, value)) if isinstance(value, tuple) else value


def flag(field_name: str) -> str:
    """Return the flag of a field: ``--train-iters`` for ``train_iters``."""
    return "--" + field_name.replace("_", "-")


def spell(name: str, value: Any) -> str:
    """Return an option with its value as typed on a command line."""
    if isinstance(value, bool):
        return flag(name) if value else flag(f"no_{name}")
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"{flag(name)} {shown}".rstrip()


def find_faults(*configs: Any, is_whole: bool = True, notes: bool = False) -> list[str]:
    """Return a message for every rule that configs break, found in one pass.

    Args:
        configs: all configs of a command, or one of them.
        is_whole: whether these are all configs of the command. Otherwise options of features
            that are off are not checked.
        notes: return the notes on options without effect instead of faults.
    """
    values = Values(configs)
    broken: set[str] = set()
    lines: list[str] = []
    groups: dict[str, list[str]] = {}  # options without effect for the same reason, in one line
    for config in configs:
        defaults = {each.name: each.default for each in fields(config)}
        kinds = types_of(type(config))
        for name, option_rules in rules_of(type(config)).items():
            value = getattr(config, name)
            unmet_features = _unmet(option_rules.part_of, values)
            if unmet_features:
                broken.add(name)
            elif line := _value_fault(name, value, option_rules, kinds[name]):
                broken.add(name)
                lines.append(line)
                continue
            if value in (defaults[name], option_rules.neutral):
                continue
            for condition in [
                *(unmet_features if is_whole else ()),
                *_unmet(option_rules.needs, values),
            ][:1]:
                groups.setdefault(_needed(condition), []).append(spell(name, value))
            for condition in () if unmet_features else _met(option_rules.idle_with, values):
                groups.setdefault(_idle(condition, values), []).append(spell(name, value))
            for condition in () if unmet_features else _met(option_rules.excludes, values):
                lines.append(_exclusion(spell(name, value), condition, values))
    lines += [_without_effect(names, reason) for reason, names in groups.items()]
    if notes:
        lines = []
    for config in configs:
        for rule in _rules_of_class(type(config)):
            is_readable = all(name in values and name not in broken for name in rule.fields)
            if is_readable and rule.is_note == notes:
                lines += rule.lines(values)
    return list(dict.fromkeys(lines))


def find_argument_faults(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> list[str]:
    """Return a message for every rule that the arguments of a command's function break.

    Args:
        function: function whose parameters have rules in their annotations, as in
            ``Annotated[int, rules(minimum=1), Rule(...)]``.
        arguments: arguments by name; rules may read fields of configs among them.
    """
    namespace = SimpleNamespace(**arguments)
    values = Values(each for each in arguments.values() if is_dataclass(each))
    values.add(namespace, arguments)
    lines, broken = [], set()
    hints = get_type_hints(function, include_extras=True)
    marks = {name: getattr(hints[name], "__metadata__", ()) for name in arguments}
    for name, data in marks.items():
        for option_rules in (each[_METADATA] for each in data if isinstance(each, dict)):
            if line := _value_fault(name, arguments[name], option_rules, None):
                broken.add(name)
                lines.append(line)
    for rule in (each for data in marks.values() for each in data if isinstance(each, Rule)):
        if not broken & set(rule.fields):
            lines += rule.lines(values)
    return lines


def idle_options(values: Mapping[str, Any], config_types: Iterable[type]) -> set[str]:
    """Return the names of the options whose features are off.

    Args:
        values: values of options by name; other options have their defaults.
        config_types: config classes of the command.
    """
    types = list(config_types)
    defaults = {f.name: f.default for kind in types for f in fields(kind)}  # pyrefly: ignore
    table = {**defaults, **values}
    return {
        name
        for kind in types
        for name, option_rules in rules_of(kind).items()
        for condition in (*option_rules.part_of, *option_rules.needs)
        if condition.name in table and not condition.holds(table[condition.name])
    }


@cache
def rules_of(config_type: type) -> Mapping[str, OptionRules]:
    """Return the rules of each field of a config class, in the order of the fields.

    A class that redefines a field of its base with another default keeps the field's rules.
    """
    rules_by_name = {}
    for each in fields(config_type):  # pyrefly: ignore
        option_rules = OptionRules()
        feature: Conditions = ()
        for base in reversed(config_type.__mro__):
            field_of_base = vars(base).get("__dataclass_fields__", {}).get(each.name)
            feature = vars(base).get("part_of", feature)
            option_rules = (
                field_of_base.metadata.get(_METADATA, option_rules)
                if field_of_base
                else option_rules
            )
        switches = set(feature) if isinstance(feature, Mapping) else set()
        if feature and not option_rules.part_of and each.name not in switches:
            option_rules = replace(option_rules, part_of=_conditions(feature))
        rules_by_name[each.name] = option_rules
    return rules_by_name


def describe_rules(own: OptionRules) -> str:
    """Return the needs and exclusions of an option in words, for help and docs."""
    parts = []
    if own.part_of or own.needs:
        needed = " and ".join(c.text for c in (*own.part_of, *own.needs))
        parts.append(f"Needs {needed}.")
    if own.idle_with:
        parts.append(f"No effect with {listed(c.text for c in own.idle_with)}.")
    if own.excludes:
        parts.append(f"Excludes {listed(c.text for c in own.excludes)}.")
    return " ".join(parts)


@cache
def _rules_of_class(config_type: type) -> tuple[Rule, ...]:
    bases = reversed(config_type.__mro__)
    return tuple(rule for base in bases for rule in vars(base).get("rules", ()))


@cache
def _names_of(config_type: type) -> tuple[str, ...]:
    properties = [
        name
        for base in config_type.__mro__
        for name, value in vars(base).items()
        if isinstance(value, property)
    ]
    return (*(each.name for each in fields(config_type)), *properties)  # pyrefly: ignore


@cache
def types_of(kind: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields or a function's parameters, by name."""
    return get_type_hints(kind)


def _conditions(conditions: Conditions) -> tuple[When, ...]:
    if not isinstance(conditions, Mapping):
        return tuple(conditions)
    return tuple(_condition(name, condition) for name, condition in conditions.items())


def _condition(name: str, condition: Any) -> When:
    if isinstance(condition, When):
        return condition
    if isinstance(condition, Because):
        return replace(
            _condition(name, condition.condition), why=condition.why, instead=condition.instead
        )
    if condition is ON:
        return When(name, bool, flag(name))
    accepted = condition if isinstance(condition, tuple) else (condition,)
    return When(name, lambda value: value in accepted, _one_of(name, accepted))


def _one_of(name: str, values: tuple[Any, ...]) -> str:
    if isinstance(values[0], bool):
        return spell(name, values[0])
    return f"{flag(name)} {listed(values)}"


def _unmet(conditions: Iterable[When], values: Values) -> list[When]:
    """Return the conditions that do not hold, among those on options that exist."""
    known = [each for each in conditions if each.name in values]
    return [each for each in known if not each.holds(getattr(values, each.name))]


def _met(conditions: Iterable[When], values: Values) -> list[When]:
    """Return the conditions that hold, among those on options that exist."""
    known = [each for each in conditions if each.name in values]
    return [each for each in known if each.holds(getattr(values, each.name))]


def _needed(condition: When) -> str:
    return f"without {condition.text}{_why(condition)}give that, or leave {{them}} out."


def _idle(condition: When, values: Values) -> str:
    return f"with {_spelled(condition, values)}{_why(condition)}leave {{them}} out."


def _without_effect(options: list[str], reason: str) -> str:
    have, them = ("have", "them") if len(options) > 1 else ("has", "it")
    return f"{' and '.join(options)} {have} no effect {reason.replace('{them}', them)}"


def _exclusion(spelled: str, condition: When, values: Values) -> str:
    other = _spelled(condition, values)
    return f"{spelled} and {other} exclude each other{_why(condition)}leave one out."


def _why(condition: When) -> str:
    """Return the middle of a message: the reason of a condition, and the alternative."""
    why = f", {condition.why}" if condition.why else ""
    return f"{why}: {condition.instead}, or " if condition.instead else f"{why}: "


def _spelled(condition: When, values: Values) -> str:
    """Return a condition that holds as text: the option with its current value."""
    if condition.text.startswith(flag(condition.name)):
        return spell(condition.name, getattr(values, condition.name))
    return condition.text


def _value_fault(name: str, value: Any, option_rules: OptionRules, kind: Any) -> str:
    """Return the message for a value that violates its type or bounds, else ''."""
    if get_origin(kind) is Literal and value not in get_args(kind):
        choices = [choice for choice in get_args(kind) if choice]
        return f"{flag(name)} {value!r} is unknown: use {listed(choices)}."
    if isinstance(value, float) and not isfinite(value):
        return f"{flag(name)} {value} is not finite: give a finite number."
    if not option_rules.admits(value):
        return (
            f"{flag(name)} {value} must be {option_rules.wanted}. {option_rules.hint}".rstrip()
        )
    return ""


def listed(values: Iterable[Any]) -> str:
    """Join words as alternatives: "a, b or c"."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
