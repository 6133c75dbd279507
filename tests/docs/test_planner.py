"""The planner against every measured training step, and its page."""

import subprocess

import pytest
from docs.planner_page import (
    PAGE,
    Comparison,
    choice_losses,
    compare_results,
    errors,
    page,
    published,
)
from house.sources import ROOT


@pytest.fixture(scope="module")
def rows() -> list[Comparison]:
    return compare_results()


def test_the_page_has_the_errors_of_this_planner(rows):
    assert PAGE.read_text(encoding="utf-8").startswith(page(rows))


def test_published_rows_are_predicted_for_the_programs_that_were_measured():
    lines = published()
    assert PAGE.read_text(encoding="utf-8").endswith("\n".join(lines) + "\n")
    for line, count in zip(lines[-2:], (9, 10), strict=True):
        _, _, rows, mean, median, bias, *_ = (cell.strip(" %") for cell in line.split("|"))
        assert int(rows) == count
        assert int(median) < 10
        assert int(mean) < 20
        assert abs(int(bias)) < 15


def test_scaling_over_the_gpus_of_a_host_is_predicted(rows):
    times = {row.name: (row.measured_ms, row.predicted_ms) for row in rows}
    for kind in ("weak", "strong"):  # as much work on each GPU, or in all
        one, *more = (
            (gpus, times[f"llama-3-8b-8-layers-x{gpus}-of-4: {kind}"]) for gpus in (1, 2, 4)
        )
        for gpus, pair in more:
            measured, predicted = (
                a / b / (gpus if kind == "strong" else 1)
                for a, b in zip(one[1], pair, strict=True)
            )
            assert 0.95 < measured < 1
            assert abs(predicted - measured) < 0.016, (kind, gpus)


def test_median_errors_meet_the_goals(rows):
    held = [row for row in rows if row.is_held_out]
    for some in (rows, held, [row for row in rows if not row.is_replaced]):
        assert errors(some, "time")[0] < 0.04
        assert errors(some, "memory")[0] < 0.015


def test_each_row_far_off_has_its_reason_and_few_are_off_beside_it(rows):
    far = [row for row in rows if row.is_off]
    assert [row.name for row in far if not row.cause.why] == []
    assert len(far) < 0.12 * len(rows)
    assert sum(row.is_far for row in far) < 0.07 * len(rows)
    # With the cause of each that has a number: ten are within the goals, the others by words.
    counted = [row for row in far if row.cause.ms or row.cause.gib]
    assert len(counted) >= 10
    assert max(abs(row.memory_left) for row in counted) < 0.05
    off = [row.name for row in counted if abs(row.time_left) > 0.1]
    assert off == ["graphs-of-layers-h200: 32 experts, 24 layers, local, cut"]  # hosts differ


def test_each_commit_that_replaced_timed_code_is_later_than_its_row(rows):
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("needs the history of the repository")
    replaced = [row for row in rows if row.is_replaced]
    assert len(replaced) == 9
    for row in replaced:
        file = f"benchmarks/results/{row.name.partition(':')[0]}.json"
        added = git("log", "--diff-filter=A", "--format=%H", "--", file).split()[-1]
        earlier = git("rev-list", row.cause.replaced, "--", file).split()
        assert added in earlier, row.name


def test_the_planner_chooses_among_measured_layouts_as_the_measurements_do(rows):
    losses = choice_losses(rows)
    assert len(losses) == 8
    assert max(loss for *_, loss in losses.values()) < 0.03
