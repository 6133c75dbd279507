"""Config dataclasses: frozen, documented, never Optional, one owner for each flag."""

import ast
import dataclasses
import importlib
import re

import pytest
from house.sources import PACKAGES, Source, package_sources, parse

_DECORATOR = {"frozen", "kw_only", "slots"}


def config_sources() -> list[Source]:
    """Return every ``config.py`` of the wheels."""
    return [
        s for package in PACKAGES for s in package_sources(package) if s.file == "config.py"
    ]


def config_classes(source: Source) -> list[ast.ClassDef]:
    """Return the dataclasses of a config file; other classes, such as enums, are no configs."""
    return [
        node
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
        and any(_decorator_name(d) == "dataclass" for d in node.decorator_list)
    ]


def _decorator_name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def faults(source: Source) -> list[str]:
    """Return what breaks the house's rules for configs."""
    found = []
    for node in config_classes(source):
        decorator = next(d for d in node.decorator_list if _decorator_name(d) == "dataclass")
        given = {
            k.arg
            for k in getattr(decorator, "keywords", [])
            if isinstance(k.value, ast.Constant) and k.value.value is True
        }
        if not given >= _DECORATOR:
            found.append(f"{node.name} is not {sorted(_DECORATOR - given)}")
        for name, annotation, documented in fields(node):
            if not documented:
                found.append(f"{node.name}.{name} has no docstring")
            if re.search(r"\bNone\b|\bOptional\b", annotation):
                found.append(f"{node.name}.{name} may be None")
            if re.search(r"\bdisable_|^no_", name):
                found.append(f"{node.name}.{name} is a negative name")
    return found


def fields(node: ast.ClassDef) -> list[tuple[str, str, bool]]:
    """Return name, annotation and whether a docstring follows, for each field."""
    following = [*node.body[1:], None]
    return [
        (item.target.id, ast.unparse(item.annotation), _is_docstring(after))
        for item, after in zip(node.body, following, strict=True)
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "ClassVar" not in ast.unparse(item.annotation)
    ]


def _is_docstring(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def owners(sources: list[Source]) -> dict[str, list[str]]:
    """Map each field name to the dataclasses that have it."""
    found: dict[str, list[str]] = {}
    for source in sources:
        for node in config_classes(source):
            for name, _, _ in fields(node):
                found.setdefault(name, []).append(f"{source.name}:{node.name}")
    return found


@pytest.mark.parametrize("source", config_sources(), ids=lambda s: s.name.split("/")[0])
def test_configs_are_frozen_documented_and_never_optional(source):
    assert faults(source) == []


def test_each_flag_has_one_owner():
    shared = {name: where for name, where in owners(config_sources()).items() if len(where) > 1}
    assert shared == {}


@pytest.mark.parametrize("source", config_sources(), ids=lambda s: s.name.split("/")[0])
def test_every_config_is_made_without_arguments(source):
    """A field without a default would be a flag that every command must repeat."""
    module = importlib.import_module(source.name.removesuffix(".py").replace("/", "."))
    for node in config_classes(source):
        made = getattr(module, node.name)()
        assert dataclasses.replace(made) == made


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
