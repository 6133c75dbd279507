"""docs/coverage.toml misses no row of the founding documents and names no missing test."""

from collections import Counter

import pytest
from house import mutants, rows

COUNTS = {"000": 41, "001": 28, "002": 20, "003": 15, "004": 28}
fast = rows.is_in_default_suite
HERE = "tests/house/test_coverage_file.py"


def test_every_row_of_the_founding_documents_is_there_once():
    ids = [row["id"] for row in rows.read_rows(rows.COVERAGE)]
    assert ids == [f"{doc}-{i:02}" for doc, n in COUNTS.items() for i in range(1, n + 1)]
    assert Counter(i[:3] for i in ids) == COUNTS


def test_every_row_has_a_test_that_exists_or_says_who_owns_it():
    coverage = rows.read_rows(rows.COVERAGE)
    assert rows.faults(coverage, {"test", "open"}, rows.topics()) == []


def test_every_row_has_a_test_in_the_default_suite():
    named = {row["id"]: rows.named_tests(row) for row in rows.read_rows(rows.COVERAGE)}
    assert [i for i, some in named.items() if some and not any(map(fast, some))] == []
    assert not fast("tests/e2e/test_book.py::test_it_learns_the_book")
    published = "test_a_published_model_is_verified_under_a_layout"
    assert not fast(f"tests/parity/test_presets.py::{published}[kimi-k2]")


def test_every_row_with_a_test_has_a_mutant_that_takes_its_feature_out():
    coverage = rows.read_rows(rows.COVERAGE)
    with_test = {row["id"] for row in coverage if "test" in row}
    assert with_test == {row["id"] for row in mutants.mutants(rows.COVERAGE)}


@pytest.mark.parametrize("row", mutants.mutants(rows.COVERAGE), ids=lambda row: row["id"])
def test_a_mutant_fits_its_file_once_and_changes_it(row):
    assert mutants.changes(row)


def test_no_two_rows_say_the_same():
    said = Counter(row["what"] for row in rows.read_rows(rows.COVERAGE))
    assert [what for what, times in said.items() if times > 1] == []


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({}, "give one of"),
        ({"open": "data", "test": f"{HERE}::test_no_two_rows_say_the_same"}, "give one of"),
        ({"open": ""}, "an empty value"),
        ({"open": "nobody"}, "unknown topic nobody"),
        ({"test": f"{HERE}::test_nonesuch"}, "no test"),
        ({"test": "tests/house/nonesuch.py::test_x"}, "no test"),
        ({"test": f"{HERE}::test_no_two_rows_say_the_same[1]"}, "no test"),
    ],
)
def test_the_register_rule_sees_a_fault(row, fault):
    found = rows.faults([{"id": "000-01", "what": "x", **row}], {"test", "open"}, {"data"})
    assert len(found) == 1
    assert fault in found[0]


def test_the_register_rule_lets_good_rows_pass():
    good = [
        {"id": "000-01", "what": "x", "open": "data"},
        {"id": "000-02", "what": "y", "test": f"{HERE}::test_no_two_rows_say_the_same"},
    ]
    assert rows.faults(good, {"test", "open"}, {"data"}) == []
