"""The tests that the registers and documents name are those that pytest collects."""

from docs.blocks import all_blocks
from house.rows import COVERAGE, MUTATIONS, named_tests, read_rows
from house.sources import ROOT
from warm_ranks import run_command


def collected(files: set[str]) -> set[str]:
    """Return the nodes of test files, with and without their parameters."""
    # The suite's own options would choose by marks, and check shapes; neither names a test.
    plain = ("-o", "addopts=--import-mode=importlib")
    done = run_command("pytest", "--collect-only", "-q", *plain, *sorted(files), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    nodes = {line.strip() for line in done.stdout.splitlines() if "::" in line}
    return nodes | {node.split("[")[0] for node in nodes}


def test_every_test_that_is_named_is_collected(known_nodes):
    rows = [*read_rows(COVERAGE), *read_rows(MUTATIONS)]
    named = {name for row in rows for name in named_tests(row)}
    named |= {row["candidate"] for row in rows if "candidate" in row}
    named |= {block.run_by for block in all_blocks() if block.run_by}
    # The whole suite has collected all of them already.
    rest = named - known_nodes
    assert not rest or rest - collected({node.split("::")[0] for node in rest}) == set()


def test_a_test_with_other_parameters_is_not_collected():
    here = "tests/house/test_style.py"
    nodes = collected({here})
    assert f"{here}::test_the_terminal_rule_sees_noise" in nodes
    assert f"{here}::test_the_terminal_rule_sees_noise[nonesuch]" not in nodes
