"""Names say something, nothing is a stub, no file runs code."""

import ast
import re

import pytest
from house.sources import ROOT, Source, all_sources, dotted, full_name, parse

# Who may turn bytes into objects by running what they say, each with its reason.
UNPICKLERS = {
    "mcore_parallel/testing/ranks.py": "sends functions and tensors to ranks that it started",
    "mcore_ckpt/formats/safe_pickle.py": "reads foreign pickles as data, calls nothing",
    "mcore_ckpt/formats/dcp_writing.py": "writes what torch reads, and reads nothing",
}

_PICKLES = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
_VAGUE = re.compile(r"util|helper|manager|common|misc|^(base|core|new)_|^_?(base|core)\.py$")


def unpickling(source: Source) -> list[str]:
    """Return imports and calls by which a file or a peer could run code here."""
    names, found = source.names, []
    for node in source.nodes:
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        found += [
            f"{source.name}: {m}" for m in modules if m.split(".", maxsplit=1)[0] in _PICKLES
        ]
        if isinstance(node, ast.Call):
            name = full_name(dotted(node.func), names)
            is_torchs = name in ("torch.load", "torch.save") or (
                name.startswith("torch.distributed.") and "_object" in name
            )
            if is_torchs:
                found.append(f"{source.name}: {name}")
    return found


def stubs(source: Source) -> list[str]:
    """Return functions that say they are not written, or do nothing but be there."""
    return [
        f"{source.name}:{node.lineno}"
        for node in source.nodes
        if (isinstance(node, ast.Raise) and node.exc and "NotImplemented" in ast.dump(node.exc))
        or (isinstance(node, ast.Assert) and dotted(node.test) == "" and _is_false(node.test))
    ]


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def test_files_are_data_and_never_run():
    found = [line for source in all_sources() for line in unpickling(source)]
    assert {line.split(":")[0] for line in found} <= set(UNPICKLERS), found


def test_nothing_is_a_stub():
    assert [line for source in all_sources() for line in stubs(source)] == []


def test_rooms_have_names_that_say_something():
    assert [source.name for source in all_sources() if _VAGUE.search(source.file)] == []


def test_operations_whose_gradients_are_numbers_say_so():
    found = [
        source.name
        for source in all_sources()
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
        and any(dotted(base).endswith("autograd.Function") for base in node.bases)
    ]
    assert found == ["mcore_parallel/autograd/functions.py"]


def test_tests_are_plain_functions_and_mock_nothing():
    here = {ROOT / "tests/house/test_code.py"}
    files = {*ROOT.glob("tests/**/*.py"), *ROOT.glob("packages/*/tests/**/*.py")} - here
    wrong = re.compile(r"^class Test|^\s*(from|import) (unittest|mock)\b|\bmocker\b", re.M)
    assert len(files) > 100
    assert [file.name for file in sorted(files) if wrong.search(file.read_text())] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch.distributed as dist\ndist.all_gather_object(a, b, group=g)",
        "from torch.distributed import broadcast_object_list\nbroadcast_object_list(a)",
    ],
)
def test_the_unpickling_rule_sees_it(code):
    assert len(unpickling(parse(code))) == 1


def test_the_unpickling_rule_lets_other_loads_pass():
    assert unpickling(parse("import json, numpy as np\njson.load(f)\nnp.load(f)")) == []


@pytest.mark.parametrize(
    "code", ["def f():\n    raise NotImplementedError", "raise NotImplementedError('x')",
             "assert False"],
)  # fmt: skip
def test_the_stub_rule_sees_one(code):
    assert len(stubs(parse(code))) == 1
