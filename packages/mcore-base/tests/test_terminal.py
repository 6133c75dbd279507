"""Text that commands write at a terminal."""

from mcore_base.terminal import curve_text


def test_a_curve_falls_from_the_left_and_marks_stand_at_their_values():
    points = [(step, 8.0 - step / 20) for step in range(101)]
    marks = [(50, 3.2), (100, 7.9)]
    *plot, axis = curve_text(points, marks, width=20, rows=6).split("\n")
    assert plot[0] == "   9 |"
    assert plot[1] == "     |▆▄▂" + " " * 16 + "o"
    assert plot[-1] == "   3 |" + "█" * 10 + "o" + "█" * 5 + "▆▄▂▁"
    assert axis == f"     0{'100':>20}"


def test_a_curve_of_few_points_has_no_gaps_and_is_visible_at_its_lowest():
    top, low, _ = curve_text([(0, 1.0), (5, 1.0)], width=10, rows=2).split("\n")
    assert (top, low) == ("   2 |", "   1 |" + "▁" * 10)
