"""Every planted bug is seen by its test, by comparison and not by a crash on the way."""

import re

import pytest
from house.mutants import mutants, run_with


@pytest.mark.mutation
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", mutants(), ids=lambda row: row["id"])
def test_a_planted_bug_is_seen_by_its_test(row, tmp_path):
    done = run_with(row, tmp_path)
    assert done.returncode == 1, f"survived: {row['what']}\n{done.stdout[-2000:]}"
    assert re.search(r"AssertionError|DID NOT RAISE|^E +assert ", done.stdout, re.MULTILINE), (
        f"ended by a crash, not by a comparison\n{done.stdout[-2000:]}"
    )
