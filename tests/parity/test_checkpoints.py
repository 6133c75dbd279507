"""A checkpoint saved under each layout loads under each other, bitwise, and trains on.

Optimizer state is part of it, and no pickle is read. After a change of layout the losses
agree with those of a run that never stopped to 1e-10 (float64).
"""

import pytest
from parity.case import DENSE, SAVED_STEP, SPARSE, load_from_all

from mcore_parallel.testing import run_ranks


def check(outcomes, model, name, cases):
    saved = {source: outcomes[source].saved for source in cases}
    never_stopped = outcomes["one"].losses[SAVED_STEP:]
    for found in run_ranks(
        load_from_all, cases[name].world_size, model, name, str(outcomes.folder)
    ):
        assert {source: loaded for source, (loaded, _) in found.items()} == saved
        for _, losses in found.values():
            assert losses == pytest.approx(never_stopped, rel=1e-10)


@pytest.mark.parametrize("name", list(DENSE))
def test_a_layout_loads_what_every_other_saved(dense, name):
    check(dense, "dense", name, DENSE)


@pytest.mark.parametrize("name", list(SPARSE))
def test_a_layout_loads_experts_that_every_other_saved(sparse, name):
    check(sparse, "sparse", name, SPARSE)
