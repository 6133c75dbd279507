"""A checkpoint saved under each layout loads under others, bitwise, and trains on.

Optimizer state is part of it, and no pickle is read. After a change of layout the losses
agree with those of a run that never stopped to 1e-10 (float64). By default four pairs; all
pairs are in ``parity_long``. What a layout makes of its own checkpoint is test_layouts' matter.
"""

import pytest
from parity.case import DENSE, SAVED_STEP, SPARSE, load_from
from warm_ranks import run_ranks

PAIRS = {
    "one": "tp4_two_kv_heads",
    "cp2": "tp2_pp2",
    "zero3_dp3": "scaled_pp2",
}
SPARSE_PAIRS = {"zero3_dp2": "ep2_tp2"}
"""Layouts that load by default, and whose checkpoint each loads."""


def check(outcomes, model, name, cases, sources):
    saved = {source: outcomes[source].saved for source in sources}
    never_stopped = outcomes["one"].losses[SAVED_STEP:]
    arguments = (model, name, str(outcomes.folder), sources)
    ranks = run_ranks(load_from, cases[name].world_size, *arguments, check_shapes=False)
    for found in ranks:
        assert {source: loaded for source, (loaded, _) in found.items()} == saved
        for _, losses in found.values():
            assert losses == pytest.approx(never_stopped, rel=1e-10)


@pytest.mark.parametrize("name", list(PAIRS))
def test_a_layout_loads_what_another_saved(dense, name):
    check(dense, "dense", name, DENSE, [PAIRS[name]])


@pytest.mark.parity_long
@pytest.mark.parametrize("name", list(DENSE))
def test_a_layout_loads_what_every_other_saved(dense, name):
    check(dense, "dense", name, DENSE, list(DENSE))


@pytest.mark.parametrize("name", list(SPARSE_PAIRS))
def test_a_layout_loads_experts_that_another_saved(sparse, name):
    check(sparse, "sparse", name, SPARSE, [SPARSE_PAIRS[name]])


@pytest.mark.parity_long
@pytest.mark.parametrize("name", list(SPARSE))
def test_a_layout_loads_experts_that_every_other_saved(sparse, name):
    check(sparse, "sparse", name, SPARSE, list(SPARSE))
