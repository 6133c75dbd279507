"""Training in fp8: every layout against one rank in float64, and fp8 against no fp8."""

import pytest

from mcore_train.layout_check.certificate import compare

BAND = 5e-3
"""Of a loss: a product of this size is 4 % off in fp8, and the residual stream is not."""


@pytest.mark.parametrize("name", ["recomputed", "tp2_sp", "cp2", "pp2_zb"])
def test_a_layout_trains_in_fp8_as_one_rank_does(fp8, name):
    assert [line for line in compare(fp8[name], fp8["one"]) if not line.passed] == []
    assert fp8[name].resumed == fp8[name].final


def test_fp8_changes_losses_a_little_and_kept_layers_change_them_less(fp8):
    exact = fp8["unrounded"].losses
    whole, kept = (
        max(abs(a - b) / b for a, b in zip(fp8[name].losses, exact, strict=True))
        for name in ("one", "first_last")
    )
    assert 0 < kept < whole < BAND
