"""Every mutant of both registers is seen by its test, by comparison and not by a crash."""

import os
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from house.mutants import is_seen, mutants, run_with, verify_with
from house.rows import COVERAGE


@pytest.fixture(scope="module")
def verdicts(request, tmp_path_factory):
    """Run the mutants that are asked for side by side, one on each core."""
    rows = {item.callspec.params["row"]["id"]: item.callspec.params["row"]
            for item in request.session.items if hasattr(item, "callspec")
            and "row" in item.callspec.params
            and "verdicts" in item.fixturenames}  # fmt: skip
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        futures: dict[str, Future] = {
            name: pool.submit(run_with, row, tmp_path_factory.mktemp(name))
            for name, row in rows.items()
        }
        yield futures
        for future in futures.values():
            future.cancel()


@pytest.mark.mutation
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", mutants(), ids=lambda row: row["id"])
def test_a_planted_bug_is_seen_by_its_test(row, verdicts):
    check(row, verdicts)


@pytest.mark.mutation
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", mutants(COVERAGE), ids=lambda row: row["id"])
def test_a_feature_that_is_taken_out_is_missed_by_its_test(row, verdicts):
    check(row, verdicts)


def check(row, verdicts):
    done = verdicts[row["id"]].result()
    assert done.returncode == 1, f"survived: {row['what']}\n{done.stdout[-2000:]}"
    assert is_seen(row, done.stdout), (
        f"ended by a crash, not by a comparison\n{done.stdout[-2000:]}"
    )


VERIFIED = [row for row in mutants() if "verify" in row]


@pytest.mark.mutation
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", VERIFIED, ids=lambda row: row["id"])
def test_verify_does_not_certify_a_planted_bug(row, tmp_path):
    done = verify_with(row, tmp_path)
    assert done.returncode == 1, f"certified: {row['what']}\n{done.stdout[-2000:]}"
    assert "computes what one rank computes" not in done.stdout
