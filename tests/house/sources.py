"""The source files that the house rules read, parsed once."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("base", "parallel", "moe", "models", "data", "ckpt", "infer", "train")


@dataclass(frozen=True)
class Source:
    """One Python file of a wheel."""

    name: str
    """Where it is, as people say it: ``mcore_ckpt/families/dense/llama.py``."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax, parsed when a rule first reads it."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of its syntax."""
        return list(ast.walk(self.tree))

    @cached_property
    def names(self) -> dict[str, str]:
        """What the names that its imports bind stand for."""
        return imported_names(self.tree)

    @property
    def room(self) -> str:
        """Module path below the package: ``families.llama``; empty for the front."""
        parts = self.name.removesuffix(".py").split("/")[1:]
        return ".".join(part for part in parts if part != "__init__")

    @property
    def is_config(self) -> bool:
        """Whether it holds config dataclasses: ``config.py``, or ``*_config.py``."""
        return self.file == "config.py" or self.file.endswith("_config.py")

    @property
    def is_command(self) -> bool:
        """Whether it is a command line, or one command of it: ``cli.py``, ``commands/*.py``."""
        return self.file == "cli.py" or self.room.startswith("commands.")

    @property
    def file(self) -> str:
        """Last part of the name: ``llama.py``."""
        return self.name.rsplit("/", 1)[-1]


def parse(text: str, name: str = "mcore_x/room.py") -> Source:
    """Return a made-up source, to show that a rule can fail."""
    return Source(name, text)


@cache
def package_sources(package: str) -> tuple[Source, ...]:
    """Return every Python file under ``src`` of one package, in path order."""
    src = ROOT / f"packages/mcore-{package}/src"
    return tuple(
        parse(path.read_text(), str(path.relative_to(src)))
        for path in sorted(src.rglob("*.py"))
    )


def all_sources() -> Iterator[Source]:
    """Yield every Python file of every wheel."""
    for package in PACKAGES:
        yield from package_sources(package)


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` of an attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Map each name that imports bind, anywhere in the file, to what it stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    names[alias.asname] = alias.name
                else:
                    top = alias.name.split(".")[0]
                    names[top] = top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in tree.body:  # _ops = torch.ops._c10d_functional
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], dotted(node.value)
            if isinstance(target, ast.Name) and value.split(".")[0] in names:
                names[target.id] = full_name(value, names)
    return names


def full_name(name: str, names: dict[str, str]) -> str:
    """Replace the first part of a dotted name by what the file's imports say it is."""
    first, _, rest = name.partition(".")
    start = names.get(first, first)
    return f"{start}.{rest}" if rest else start
