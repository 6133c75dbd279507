"""tests/mutations.toml misses no entry of the catalogue of silent bugs."""

import subprocess
import sys
from itertools import groupby
from pathlib import Path
from string import ascii_lowercase

import pytest
from house import mutants, rows
from house.sources import ROOT

OUTCOMES = {"test", "open", "not_ours"}


def test_every_entry_of_the_catalogue_is_there_in_order_and_every_row_has_its_own_name():
    ids = [row["id"] for row in rows.read_rows(rows.MUTATIONS)]
    assert len(set(ids)) == len(ids)
    entries = [name for name, _ in groupby(ids, lambda own: own.rstrip(ascii_lowercase))]
    catalogue = [f"N{i}" for i in range(1, 14)] + [f"F{i}" for i in range(1, 42)]
    found_here = [f"V{i}" for i in range(1, 30)] + [f"S{i}" for i in range(1, 11)]
    assert entries == catalogue + found_here


def test_every_entry_is_killed_by_a_test_or_says_why_not():
    mutations = rows.read_rows(rows.MUTATIONS)
    assert rows.faults(mutations, OUTCOMES, rows.topics()) == []


@pytest.mark.parametrize("row", mutants.mutants(), ids=lambda row: row["id"])
def test_a_mutant_still_fits_its_file_and_parses(row):
    assert mutants.changes(row)


def test_no_mutant_reads_a_name_that_is_not_there(tmp_path):
    """A NameError would end the test before it compares anything."""
    for number, row in enumerate([*mutants.mutants(), *mutants.mutants(rows.COVERAGE)]):
        if row["file"].endswith(".py"):
            (tmp_path / f"{row['id']}_{number}.py").write_text(mutants.planted(row))
    command = ["ruff", "check", "--isolated", "--no-cache", "--select", "F821", str(tmp_path)]
    done = subprocess.run(
        [Path(sys.executable).parent / command[0], *command[1:], "--output-format", "concise"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_row_with_a_test_has_a_mutant():
    register = rows.read_rows(rows.MUTATIONS)
    with_test = {row["id"] for row in register if "test" in row}
    assert with_test == {row["id"] for row in mutants.mutants()}


def test_a_mutant_that_no_longer_fits_is_refused():
    row = {"id": "N1", "file": "mcore_parallel/config.py", "replace": "nonesuch", "by": "x"}
    with pytest.raises(ValueError, match="stands 0 times"):
        mutants.planted(row)


def test_a_mutant_may_be_of_any_file_but_changes_what_it_says():
    row = {"id": "000-41", "file": "SKILL.md", "replace": "name: train-with-mcore", "by": ""}
    assert mutants.source_of(row) == ROOT / "SKILL.md"
    assert mutants.changes(row)
    assert not mutants.changes(row | {"by": row["replace"]})
    comment = {"file": "mcore_parallel/rank_grid.py", "replace": "product varies its", "by": ""}
    assert not mutants.changes(row | comment)
    with pytest.raises(SyntaxError):
        mutants.changes(row | comment | {"replace": "def build_grids(", "by": "def ("})


def test_a_crash_is_no_comparison():
    assert mutants.is_seen({}, "E   AssertionError: gradient")
    assert not mutants.is_seen({}, "E   TypeError: unexpected argument")
    assert mutants.is_seen({"sees": "replicas of"}, "ValueError: replicas of x differ")
    assert not mutants.is_seen({"sees": "replicas of"}, "E   AssertionError: gradient")


def test_the_register_rule_sees_an_entry_without_an_outcome():
    assert rows.faults([{"id": "N1", "what": "x"}], OUTCOMES, set()) != []
    assert rows.faults([{"id": "N1", "what": "x", "not_ours": "why"}], OUTCOMES, set()) == []
