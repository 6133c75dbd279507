import pytest

from mcore_train.quickstart.curve import draw


def test_a_falling_line_is_full_at_its_left_and_low_at_its_right():
    picture = draw([4.0, 3.0, 2.0, 1.0], height=4).splitlines()[:-1]
    rows = [row.partition("|")[2] for row in picture]
    assert [row[0] for row in rows] == ["█"] * 4
    assert [row[-1] for row in rows] == [" ", " ", " ", "▁"]
    heights = [sum(row[column] == "█" for row in rows) for column in range(4)]
    assert heights == sorted(heights, reverse=True)


def test_more_values_than_columns_are_averaged():
    assert draw([1.0, 3.0, 5.0, 7.0], width=2, height=2).splitlines()[-1].endswith("+--")


def test_a_flat_line_and_a_single_value_are_drawn():
    assert "█" not in draw([2.0, 2.0], height=3).splitlines()[0]
    assert draw([1.0])


def test_nothing_cannot_be_drawn():
    with pytest.raises(ValueError, match="at least one"):
        draw([])
