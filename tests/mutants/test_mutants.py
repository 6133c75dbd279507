"""Every planted bug is seen by its test, by comparison and not by a crash on the way."""

import os
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from house.mutants import is_seen, mutants, run_with


@pytest.fixture(scope="module")
def verdicts(request, tmp_path_factory):
    """Run the mutants that are asked for side by side, one on each core."""
    rows = {item.callspec.params["row"]["id"]: item.callspec.params["row"]
            for item in request.session.items if hasattr(item, "callspec")
            and "row" in item.callspec.params}  # fmt: skip
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
    done = verdicts[row["id"]].result()
    assert done.returncode == 1, f"survived: {row['what']}\n{done.stdout[-2000:]}"
    assert is_seen(row, done.stdout), (
        f"ended by a crash, not by a comparison\n{done.stdout[-2000:]}"
    )
