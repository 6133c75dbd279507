"""A checkpoint saved under each layout loads under others, bitwise, and trains on.

Optimizer state is part of it, and no pickle is read. After a change of layout the losses
agree with those of a run that never stopped to 1e-10 (float64). By default every layout
loads what one other saved, so that each is read and written once; all pairs are in
``parity_long``. What a layout makes of its own checkpoint is test_layouts' matter.
"""

import pytest
from parity.case import DENSE, LONG, SAVED_STEP, SPARSE, load_from

from mcore_parallel.testing.ranks import run_ranks

STEPS_AROUND = (4,)
"""How far down the list of layouts those stand that one loads from by default."""

SHORT = {name: case for name, case in DENSE.items() if name not in LONG}


def check(outcomes, model, name, cases, sources):
    saved = {source: outcomes[source].saved for source in sources}
    never_stopped = outcomes["one"].losses[SAVED_STEP:]
    arguments = (model, name, str(outcomes.folder), sources)
    ranks = run_ranks(load_from, cases[name].world_size, *arguments, check_shapes=False)
    for found in ranks:
        assert {source: loaded for source, (loaded, _) in found.items()} == saved
        for _, losses in found.values():
            assert losses == pytest.approx(never_stopped, rel=1e-10)


def others(name, cases):
    names = list(cases)
    return [names[(names.index(name) + step) % len(names)] for step in STEPS_AROUND]


@pytest.mark.parametrize("cases", [SHORT, SPARSE])
def test_every_layout_is_read_by_one_other_and_reads_one(cases):
    read = [source for name in cases for source in others(name, cases)]
    assert sorted(read) == sorted(cases)
    assert all(name not in others(name, cases) for name in cases)


@pytest.mark.parametrize("name", list(SHORT))
def test_a_layout_loads_what_another_saved(dense, name):
    check(dense, "dense", name, DENSE, others(name, SHORT))


@pytest.mark.parity_long
@pytest.mark.parametrize("name", list(DENSE))
def test_a_layout_loads_what_every_other_saved(dense, name):
    check(dense, "dense", name, DENSE, list(DENSE))


@pytest.mark.parametrize("name", list(SPARSE))
def test_a_layout_loads_experts_that_another_saved(sparse, name):
    check(sparse, "sparse", name, SPARSE, others(name, SPARSE))


@pytest.mark.parity_long
@pytest.mark.parametrize("name", list(SPARSE))
def test_a_layout_loads_experts_that_every_other_saved(sparse, name):
    check(sparse, "sparse", name, SPARSE, list(SPARSE))
