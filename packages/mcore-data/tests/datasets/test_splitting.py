import numpy as np
import pytest

from mcore_data.datasets.splitting import held_out, parse_split, split_bounds


def test_split_strings_take_any_separator_and_fill_with_zero():
    assert parse_split("969, 30, 1") == (0.969, 0.03, 0.001)
    assert parse_split("3/1") == (0.75, 0.25, 0.0)


@pytest.mark.parametrize(
    "split", ["", "a,b", "0,0,0", "1,2,3,4", "-1,1", "nan,1", "1.2.3", "."]
)
def test_a_split_without_shares_is_refused(split):
    with pytest.raises(ValueError, match="--split"):
        parse_split(split)


def test_bounds_round_half_to_even_and_leave_out_zero_shares():
    assert split_bounds("1,1,0", 5) == (range(2), range(2, 5), None)
    assert split_bounds("969,30,1", 1000) == (range(969), range(969, 999), range(999, 1000))


def test_held_out_documents_are_a_seeded_partition():
    train, held = held_out(1189, 60, seed=1)
    assert len(held) == 60
    assert np.array_equal(np.sort(np.concatenate([train, held])), np.arange(1189))
    assert np.array_equal(held, held_out(1189, 60, seed=1)[1])
    assert not np.array_equal(held, held_out(1189, 60, seed=2)[1])
    with pytest.raises(ValueError, match="5 of 5 documents"):
        held_out(5, 5, seed=1)
