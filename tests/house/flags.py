"""The config dataclasses as their source says them: fields, defaults, docstrings."""

import ast
from dataclasses import dataclass

from house.sources import PACKAGES, Source, package_sources


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a config dataclass."""

    name: str
    annotation: str
    default: str
    """Its source text; empty when the field is required."""
    docstring: str


def config_sources() -> list[Source]:
    """Return every ``config.py`` and ``*_config.py`` of the wheels."""
    return [s for package in PACKAGES for s in package_sources(package) if s.is_config]


def config_classes(source: Source) -> list[ast.ClassDef]:
    """Return the dataclasses of a config file; other classes, such as enums, are no configs."""
    return [
        node
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) and dataclass_decorator(node) is not None
    ]


def dataclass_decorator(node: ast.ClassDef) -> ast.expr | None:
    """Return the decorator that makes a class a dataclass, if it has one."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name == "dataclass":
            return decorator
    return None


def fields(node: ast.ClassDef) -> list[Field]:
    """Return the fields of a dataclass, class variables left out."""
    following = [*node.body[1:], None]
    return [
        Field(
            item.target.id,
            ast.unparse(item.annotation),
            ast.unparse(item.value) if item.value else "",
            _string(after),
        )
        for item, after in zip(node.body, following, strict=True)
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "ClassVar" not in ast.unparse(item.annotation)
    ]


def _string(node: ast.stmt | None) -> str:
    """Return the text of a bare string statement, or an empty string."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value if isinstance(node.value.value, str) else ""
    return ""
