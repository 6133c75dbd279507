"""The planner against every measured training step, and its page."""

import pytest
from docs.planner_page import PAGE, Comparison, choice_losses, compare_results, errors, page


@pytest.fixture(scope="module")
def rows() -> list[Comparison]:
    return compare_results()


def test_the_page_has_the_errors_of_this_planner(rows):
    assert PAGE.read_text(encoding="utf-8").startswith(page(rows))


def test_median_errors_meet_the_goals(rows):
    held = [row for row in rows if row.is_held_out]
    for some in (rows, held):
        assert errors(some, "time")[0] < 0.04
        assert errors(some, "memory")[0] < 0.015


def test_each_row_far_off_has_its_reason(rows):
    far = [row for row in rows if abs(row.time_error) > 0.1 or abs(row.memory_error) > 0.05]
    assert [row.name for row in far if not row.outlier] == []
    assert len(far) < 0.15 * len(rows)


def test_the_planner_chooses_among_measured_layouts_as_the_measurements_do(rows):
    losses = choice_losses(rows)
    exceptions = {"its schedules on 4 pipeline ranks"}  # explained on the page
    assert max(loss for title, (*_, loss) in losses.items() if title not in exceptions) < 0.03
