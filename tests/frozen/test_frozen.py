"""Certificates that no refactoring may change.

One row runs by default, ``nox -s frozen`` runs all.
"""

import json

import pytest
from frozen.record import FILE, LAYOUTS, certify

FROZEN = json.loads(FILE.read_text())
CHEAP = ("gpt tp2",)


def rows(names):
    """The names, all but the cheapest marked ``slow``."""
    marks = {name: () if name in CHEAP else pytest.mark.slow for name in names}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


@pytest.mark.parametrize("name", rows(LAYOUTS))
def test_a_layout_has_the_certificate_that_was_recorded(name):
    found = certify(name)
    del found["errors"]
    assert found == FROZEN[name]
    assert found["passed"]
