"""What ruff does not check: module state, ContextVars, prints by another name."""

import ast
import re

import pytest
from house.sources import ROOT, Source, all_sources, dotted, full_name, parse

TALKING = ("__main__.py", "command_line.py", "entry_point.py")
"""Files that may write to the terminal, as commands may."""

# State that outlives a call, each with its reason.
STATE = {
    "mcore_parallel/optional_kernels.py:_FAILURES": "a kernel is tried once in a process",
}

_CONTAINERS = {"list", "dict", "set", "bytearray", "collections.defaultdict",
               "collections.deque", "collections.Counter", "collections.OrderedDict",
               "weakref.WeakKeyDictionary", "weakref.WeakValueDictionary"}  # fmt: skip
_CHANGES = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem",
            "clear", "remove", "discard", "appendleft"}  # fmt: skip


def module_state(source: Source) -> list[str]:
    """Return containers that outlive a call and change, and ContextVars off the facade.

    A module-level container is state if the file changes it, or if it begins empty, which is
    of no use otherwise; so is a container of another module of ours that the file changes.
    """
    names = source.names
    containers, found = {name for name in names if names[name].startswith("mcore_")}, []
    for node in source.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        called = (
            full_name(dotted(node.value.func), names)
            if isinstance(node.value, ast.Call)
            else ""
        )
        if called == "contextvars.ContextVar" and source.file != "facade.py":
            found += [f"{source.name}:{t.id}" for t in targets if isinstance(t, ast.Name)]
        if (
            isinstance(node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
            or called in _CONTAINERS
        ):
            own = {t.id for t in targets if isinstance(t, ast.Name)}
            containers |= own
            if _is_empty(node.value):
                found += [f"{source.name}:{name}" for name in own]
    changed = {name for node in source.nodes for name in _changed_names(node)}
    return sorted({*found, *(f"{source.name}:{name}" for name in containers & changed)})


def _is_empty(node: ast.expr) -> bool:
    """Whether an expression makes a container with nothing in it."""
    if isinstance(node, ast.Dict):
        return not node.keys
    if isinstance(node, ast.List | ast.Set):
        return not node.elts
    if not isinstance(node, ast.Call) or node.keywords:
        return False
    is_default = dotted(node.func).endswith("defaultdict")  # whose argument is a factory
    return len(node.args) <= is_default


def _changed_names(node: ast.AST) -> list[str]:
    """Return names whose container a statement changes in place."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    changed = [dotted(t.value) for t in targets if isinstance(t, ast.Subscript)]
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        changed.append(node.target.id)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _CHANGES
    ):
        changed.append(dotted(node.func.value))
    return changed


def undescribed(source: Source) -> list[str]:
    """Return public functions, classes and methods without a docstring."""
    scopes = [source.tree, *(n for n in source.tree.body if isinstance(n, ast.ClassDef))]
    return [
        f"{source.name}:{node.lineno} {node.name}"
        for scope in scopes
        if not (isinstance(scope, ast.ClassDef) and scope.name.startswith("_"))
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]


def loud_lines(source: Source) -> list[str]:
    """Return writes to the terminal and logging set-up where neither belongs."""
    if (
        source.is_command
        or source.file in TALKING
        or source.name == "mcore_train/reporting/log.py"
    ):
        return []
    names = source.names
    forbidden = {"print", "sys.stdout.write", "sys.stderr.write", "logging.basicConfig"}
    return [
        f"{source.name}:{node.lineno}"
        for node in source.nodes
        if isinstance(node, ast.Call)
        and (
            full_name(dotted(node.func), names) in forbidden
            or (isinstance(node.func, ast.Attribute) and node.func.attr == "addHandler")
        )
    ]


def wrong_loggers(source: Source) -> list[str]:
    """Return loggers that are not the module's own."""
    names = source.names
    return [
        f"{source.name}:{node.lineno}"
        for node in source.nodes
        if isinstance(node, ast.Call)
        and full_name(dotted(node.func), names) == "logging.getLogger"
        and [dotted(arg) for arg in node.args] != ["__name__"]
    ]


def shapeless_todos(text: str) -> list[str]:
    """Return marks of unfinished work that name no issue."""
    return re.findall(r"\b(?:TODO(?!\(#\d+\))|FIXME|XXX|HACK)\b.*", text)


def test_no_module_keeps_state():
    state = {line for source in all_sources() for line in module_state(source)}
    assert state == set(STATE)


def test_everything_public_is_described():
    assert [line for source in all_sources() for line in undescribed(source)] == []


def test_only_commands_speak_to_the_terminal():
    assert [line for source in all_sources() for line in loud_lines(source)] == []


def test_loggers_are_named_after_their_module():
    allowed = ("mcore_train/reporting/log.py", "cli.py")
    lines = [line for source in all_sources() for line in wrong_loggers(source)]
    assert [line for line in lines if not line.split(":")[0].endswith(allowed)] == []


def test_unfinished_work_names_its_issue():
    assert [line for source in all_sources() for line in shapeless_todos(source.text)] == []


def test_no_file_speaks_of_one_machine():
    """No absolute path of a developer's machine, whatever wrote it."""
    paths = re.compile(r"(?<![\w.~])/(?:work|home|root|tmp/brief)/\w")
    texts = [p for p in ROOT.rglob("*.md") if not {".venv", ".nox"} & set(p.parts)]
    spoken = {s.name for s in all_sources() if paths.search(s.text)}
    assert spoken | {p.name for p in texts if paths.search(p.read_text())} == set()


@pytest.mark.parametrize(
    "code",
    [
        "seen = []\ndef f(x):\n    seen.append(x)",
        "SEEN = {}\ndef f(x):\n    SEEN[x] = 1",
        "from collections import defaultdict\nN = defaultdict(int)\ndef f(x):\n    N[x] += 1",
        "S = set()\ndef f(x):\n    del S[x]",
        "from contextvars import ContextVar\ncurrent = ContextVar('current')",
        "CACHE = {}",
        "CACHE: dict[str, int] = dict()",
        "from collections import defaultdict\nN = defaultdict(int)",
        "from mcore_x.room import SEEN\ndef f(x):\n    SEEN.append(x)",
    ],
)
def test_the_state_rule_sees_state(code):
    assert len(module_state(parse(code))) == 1


def test_the_state_rule_lets_constants_pass():
    assert module_state(parse("T = {'a': 1}\ndef f(x):\n    y = []\n    y.append(T[x])")) == []


@pytest.mark.parametrize(
    "code", ["def f(x):\n    return x", "class C:\n    'Said.'\n    def f(self):\n        pass"]
)
def test_the_description_rule_sees_a_bare_name(code):
    assert len(undescribed(parse(code))) == 1
    assert undescribed(parse(code.replace("def f", "def _f"))) == []


@pytest.mark.parametrize(
    "code",
    ["print('x')", "import sys\nsys.stdout.write('x')", "import logging\nlogging.basicConfig()",
     "import logging\nlogging.getLogger().addHandler(h)"],
)  # fmt: skip
def test_the_terminal_rule_sees_noise(code):
    assert len(loud_lines(parse(code))) == 1
    assert loud_lines(parse(code, "mcore_x/cli.py")) == []


def test_the_logger_rule_sees_another_name():
    assert wrong_loggers(parse("import logging\nlog = logging.getLogger('x')")) != []
    assert wrong_loggers(parse("import logging\nlog = logging.getLogger(__name__)")) == []


def test_the_unfinished_rule_sees_a_mark():
    assert shapeless_todos("x = 1  # TODO: later") != []
    assert shapeless_todos("x = 1  # TODO(#12): later") == []
