"""Certificates, losses and saved bytes that no refactoring may change.

Two rows run by default, ``nox -s frozen`` runs all.
"""

import json

import pytest
from frozen.record import FILE, LAYOUTS, RUNS, certify, describe_cpu, train

FROZEN = json.loads(FILE.read_text())
CHEAP = ("gpt tp2", "gpt")
LOSS_RTOL = 1e-4
"""On another CPU or torch, whose last bits differ; ten steps of AdamW enlarge these."""


def rows(names):
    """The names, all but the cheapest marked ``slow``."""
    marks = {name: () if name in CHEAP else pytest.mark.slow for name in names}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


@pytest.mark.parametrize("name", rows(LAYOUTS))
def test_a_layout_has_the_certificate_that_was_recorded(name):
    found = certify(name)
    del found["errors"]
    assert found == FROZEN["certificates"][name]
    assert found["passed"]


@pytest.mark.parametrize("name", rows(RUNS))
def test_ten_steps_have_the_losses_and_the_saved_bytes_that_were_recorded(tmp_path, name):
    found, expected = train(name, tmp_path), FROZEN["runs"][name]
    assert found["losses"] == pytest.approx(expected["losses"], rel=LOSS_RTOL)
    if describe_cpu() == FROZEN["cpu"]:
        assert found == expected
