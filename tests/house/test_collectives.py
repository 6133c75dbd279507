"""Every collective names its group; only rooms that start processes know the environment."""

import ast

import pytest
from house.sources import Source, all_sources, dotted, full_name, parse

COLLECTIVES = {
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "irecv", "isend", "monitored_barrier", "recv", "recv_object_list", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list", "P2POp",
}  # fmt: skip
FUNCTIONAL = ("torch.ops._c10d_functional.", "torch.distributed._functional_collectives.")
WORLD_QUESTIONS = {"torch.distributed.get_rank", "torch.distributed.get_world_size"}
# Who may speak of the world, because they make it.
WORLD_ROOMS = {"mcore_parallel/launch/launcher.py", "mcore_parallel/mesh.py"}

# Who may touch the environment: who starts ranks, and who stands in for a new Python in tests.
ENVIRONMENT_ROOMS = (
    "mcore_parallel/launch/launcher.py:",
    # A program's first words, which know whether another rank says the same.
    "mcore_base/entry_point.py:",
    # Jobs on several hosts: they start ranks, and compare what hosts were given.
    "mcore_train/launching/",
    # Golden cases: each rank is a command under a launcher.
    "mcore_train/golden/ranks.py:",
    # A doctor of clusters: variables are among what it examines.
    "mcore_train/diagnosis/probes.py:",
    # The end of a batch job's time.
    "mcore_train/guards/deadline.py:",
)


def groupless_calls(source: Source) -> list[str]:
    """Return the collective calls that leave their group to torch's default, the world."""
    names = source.names
    found = []
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = full_name(dotted(node.func), names)
        where = f"{source.name}:{node.lineno} {name}"
        if name.startswith(FUNCTIONAL):
            if not name.endswith(".wait_tensor") and not _names_a_group(node.args[-1:]):
                found.append(where)
        elif name.startswith("torch.distributed.") and name.rsplit(".", 1)[1] in COLLECTIVES:
            group = [k.value for k in node.keywords if k.arg == "group"]
            if name.endswith("batch_isend_irecv"):
                continue  # its P2POps carry the group
            if not _names_a_group(group):
                found.append(where)
        elif (
            name in WORLD_QUESTIONS
            and source.name not in WORLD_ROOMS
            and not _names_a_group(node.args[:1] + [k.value for k in node.keywords])
        ):
            found.append(where)
    return found


def _names_a_group(values: list[ast.expr]) -> bool:
    """Whether there is an expression and none of its branches is the constant None."""
    return bool(values) and not any(
        isinstance(part, ast.Constant) and part.value is None
        for value in values
        for part in ast.walk(value)
    )


def environment_readers(source: Source) -> list[str]:
    """Return the lines that touch the process environment."""
    names = source.names
    return [
        f"{source.name}:{node.lineno}"
        for node in source.nodes
        if isinstance(node, ast.Name | ast.Attribute)
        and full_name(dotted(node), names) in {"os.environ", "os.getenv", "os.putenv"}
    ]


def test_every_collective_names_its_group():
    assert [call for source in all_sources() for call in groupless_calls(source)] == []


def test_only_rooms_that_start_processes_know_the_environment():
    readers = [line for source in all_sources() for line in environment_readers(source)]
    assert [line for line in readers if not line.startswith(ENVIRONMENT_ROOMS)] == []


@pytest.mark.parametrize(
    "call",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch.distributed as dist\ndist.all_reduce(x, group=None)",
        "import torch.distributed as dist\ndist.all_reduce(x, group=g if many else None)",
        "import torch\ntorch.distributed.barrier()",
        "from torch.distributed import broadcast as send_all\nsend_all(x, 0)",
        "from torch import distributed\ndistributed.P2POp(op, x, 1)",
        "import torch.distributed as dist\nrank = dist.get_rank()",
        "import torch\nops = torch.ops._c10d_functional\nops.all_reduce(x, 'sum', None)",
    ],
)
def test_the_group_rule_sees_a_call_without_one(call):
    assert len(groupless_calls(parse(call))) == 1


@pytest.mark.parametrize(
    "call",
    [
        "import torch.distributed as dist\ndist.all_reduce(x, group=axis.group)",
        "import torch.distributed as dist\ndist.get_rank(group)",
        "import torch\nc = torch.ops._c10d_functional\nc.all_reduce(x, 'sum', a.group_name)",
        "from mcore_parallel.collectives import all_reduce\nall_reduce(x, axis)",
    ],
)
def test_the_group_rule_lets_a_named_group_pass(call):
    assert groupless_calls(parse(call)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['RANK']",
        "from os import environ\nenviron.get('RANK')",
        "import os\nos.getenv('RANK')",
    ],
)
def test_the_environment_rule_sees_a_reader(code):
    assert environment_readers(parse(code)) != []
