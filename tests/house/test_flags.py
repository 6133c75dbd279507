"""Config dataclasses: frozen, documented, never Optional; a flag has one owner and is read."""

import ast
import re
from collections.abc import Collection, Iterable

import pytest
from house.flags import config_classes, config_sources, dataclass_decorator, fields
from house.sources import Source, all_sources, parse

_DECORATOR = {"frozen", "kw_only", "slots"}
_OF_SEVERAL_COMMANDS = {"overwrite"}
"""Fields of commands that share no config, with one meaning: replace what an output holds."""

_READ_OTHERWISE = {
    **dict.fromkeys(
        [f"fim_{role}_token" for role in ("prefix", "middle", "suffix", "pad")],
        "datasets/fim.py composes the name",
    ),
    "non_persistent_ckpt_type": "has one choice",
    "reproduce_table": "is looked for among the words of the command",
}
"""Options that no code names, with the reason."""


def faults(source: Source) -> list[str]:
    """Return what breaks the house's rules for configs."""
    found = []
    for node in config_classes(source):
        given = {
            keyword.arg
            for keyword in getattr(dataclass_decorator(node), "keywords", [])
            if isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        }
        if not given >= _DECORATOR:
            found.append(f"{node.name} is not {sorted(_DECORATOR - given)}")
        for field in fields(node):
            if not field.docstring:
                found.append(f"{node.name}.{field.name} has no docstring")
            if re.search(r"\bNone\b|\bOptional\b", field.annotation):
                found.append(f"{node.name}.{field.name} may be None")
            if re.search(r"^(disable|no)_", field.name):
                found.append(f"{node.name}.{field.name} is a negative name")
    return found


def owners(sources: list[Source]) -> dict[str, list[str]]:
    """Map each field name to the dataclasses that have it.

    One that only gives a field of its base another default does not own it.
    """
    nodes = [(source, node) for source in sources for node in config_classes(source)]
    named = {node.name: node for _, node in nodes}

    def inherited(node: ast.ClassDef) -> set[str]:
        names = (base.id for base in node.bases if isinstance(base, ast.Name))
        bases = [named[name] for name in names if name in named]
        own = {field.name for base in bases for field in fields(base)}
        return own.union(*(inherited(base) for base in bases))

    found: dict[str, list[str]] = {}
    for source, node in nodes:
        for field in fields(node):
            if field.name not in inherited(node):
                found.setdefault(field.name, []).append(f"{source.name}:{node.name}")
    return found


def unread(
    names: Iterable[str], sources: Iterable[Source], exceptions: Collection[str] = ()
) -> list[str]:
    """Return a sentence for each option that no code reads, by attribute or quoted name."""
    read = set(exceptions)
    for source in sources:
        read.update(re.findall(r"\.(\w+)", source.text))
        if not source.is_config:
            read.update(re.findall(r"[\"'](\w+)[\"']", source.text))
    return [
        f"no code reads the option {name}: use it, or remove it."
        for name in sorted(set(names) - read)
    ]


@pytest.mark.parametrize("source", config_sources(), ids=lambda s: s.name.split("/")[0])
def test_configs_are_frozen_documented_and_never_optional(source):
    assert faults(source) == []


def test_each_flag_has_one_owner():
    shared = {name for name, where in owners(config_sources()).items() if len(where) > 1}
    assert shared == _OF_SEVERAL_COMMANDS


def test_each_option_is_read():
    found = unread(owners(config_sources()), all_sources(), _READ_OTHERWISE)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("@dataclass\nclass C:\n    '''C.'''", "is not ['frozen', 'kw_only', 'slots']"),
        ("@dataclass(frozen=True, kw_only=True)\nclass C:\n    pass", "is not ['slots']"),
        (
            "@dataclass(frozen=True, kw_only=True, slots=True)\nclass C:\n    x: int = 1",
            "C.x has no docstring",
        ),
        (
            (
                "@dataclass(frozen=True, kw_only=True, slots=True)\n"
                "class C:\n    x: int | None = None\n    'Said.'"
            ),
            "C.x may be None",
        ),
        (
            (
                "@dataclass(frozen=True, kw_only=True, slots=True)\n"
                "class C:\n    disable_x: bool = False\n    'Said.'"
            ),
            "C.disable_x is a negative name",
        ),
    ],
)
def test_the_config_rule_sees_a_fault(code, fault):
    assert any(fault in found for found in faults(parse(code)))


def test_the_owner_rule_sees_a_flag_with_two_homes():
    one = parse("@dataclass\nclass A:\n    lr: float = 1.0", "a/config.py")
    two = parse("@dataclass\nclass B:\n    lr: float = 2.0", "b/config.py")
    assert owners([one, two]) == {"lr": ["a/config.py:A", "b/config.py:B"]}


def test_the_reading_rule_sees_an_option_that_no_code_reads():
    config = parse("dropout_rate: float = 0.0", "mcore_x/config.py")
    reader = parse("x = config.gain * table['scale']")
    wanted = "no code reads the option dropout_rate: use it, or remove it."
    assert unread(["dropout_rate", "gain", "scale"], [config, reader]) == [wanted]
