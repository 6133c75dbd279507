from dataclasses import dataclass
from typing import Literal

import pytest

from mcore_base.field_checks import (
    check_above_zero,
    check_at_least,
    check_choices,
    check_field,
    flag,
)


@dataclass(frozen=True)
class Config:
    num_rows: int = 1
    rate: float = 0.5
    order: Literal["", "up", "down"] = ""


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: check_at_least(Config(), 2, "num_rows"), "--num-rows 1 must be 2 or more."),
        (lambda: check_above_zero(Config(rate=0.0), "num_rows", "rate"), "--rate 0.0 must be "),
        (lambda: check_field(Config(), "rate", False, "odd"), "--rate 0.5 must be odd."),
        (
            lambda: check_choices(Config(order="left")),
            "--order 'left' is no choice: use up or ",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_its_flag_value_and_what_it_must_be(check, message):
    with pytest.raises(ValueError, match="^" + message):
        check()


def test_right_fields_pass():
    config = Config(num_rows=2, order="up")
    check_at_least(config, 2, "num_rows")
    check_above_zero(config, "num_rows", "rate")
    check_choices(config)
    assert flag("num_rows") == "--num-rows"
