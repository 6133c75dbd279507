"""Public names: pinned, documented, resolvable, and never the name of a room."""

import ast
import importlib
from importlib.metadata import PackageNotFoundError

import pytest
from house.public_api import PINNED, front_of, pinned, public_names, render
from house.sources import PACKAGES, Source, package_sources, parse

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def names_like_rooms(names: dict[str, str], rooms: list[str]) -> set[str]:
    """Return public names that first use would turn from a module into something else."""
    taken = {room.split(".")[0] for room in rooms}
    return set(names) & taken


def undocumented(source: Source, name: str) -> bool:
    """Whether a public name lacks a docstring, or a string under its assignment."""
    body = source.tree.body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, Definition) and node.name == name:
            return not ast.get_docstring(node)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return not (
                    isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                )
    raise LookupError(f"{source.name} does not define {name}")


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_the_pinned_ones(package):
    assert sorted(public_names(front_of(package))) == pinned()[f"mcore_{package}"], (
        "run `uv run python tests/house/public_api.py` if the change is meant"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_name_is_the_name_of_a_room(package):
    rooms = [source.room for source in package_sources(package)]
    assert names_like_rooms(public_names(front_of(package)), rooms) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented_where_it_is_defined(package):
    sources = {source.room: source for source in package_sources(package)}
    bare = [
        name
        for name, room in public_names(front_of(package)).items()
        if undocumented(sources[room], name)
    ]
    assert bare == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_can_be_fetched_from_the_front(package):
    front = importlib.import_module(f"mcore_{package}")
    for name in public_names(front_of(package)):
        assert getattr(front, name) is not None
    assert set(front.__all__) <= set(dir(front))
    assert front.__version__
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        front.nonesuch  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_used_from_its_sources_alone_has_a_version_that_says_so(package, monkeypatch):
    front = importlib.import_module(f"mcore_{package}")

    def not_installed(name):
        raise PackageNotFoundError(name)

    lazy_front = importlib.import_module("mcore_base.lazy_front")
    monkeypatch.setattr(lazy_front, "version", not_installed)
    assert front.__version__ == "0+source"


def test_the_pinned_file_is_as_its_command_writes_it():
    assert render() == PINNED.read_text(), "run `uv run python tests/house/public_api.py`"


def test_the_room_rule_sees_a_clash():
    assert names_like_rooms({"save": "saving", "load": "load"}, ["saving", "load"]) == {"load"}


@pytest.mark.parametrize(
    ("code", "bare"),
    [
        ("def name():\n    '''Say.'''", False),
        ("def name():\n    pass", True),
        ("class name:\n    x = 1", True),
        ("name = 1\n'''What it is.'''", False),
        ("name: int = 1\nother = 2", True),
    ],
)
def test_the_docstring_rule_sees_a_bare_name(code, bare):
    assert undocumented(parse(code), "name") is bare


def test_the_docstring_rule_sees_a_name_its_room_does_not_define():
    with pytest.raises(LookupError, match="does not define name"):
        undocumented(parse("other = 1"), "name")
