"""The table of what goes wrong elsewhere names tests that are there."""

from pathlib import Path

from house.rows import faults, read_rows


def test_every_failure_has_a_test_that_would_see_it():
    rows = read_rows(Path(__file__).with_name("failure_modes.toml"))
    assert faults(rows, {"test", "why"}, set()) == []
    assert [row["id"] for row in rows] == [f"{number:02}" for number in range(1, 54)]
