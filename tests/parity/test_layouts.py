"""Every layout against one rank: loss, gradients, norm and weights, in float64.

The comparison is that of ``mcore-train verify``; AdamW in float64 is held to 1e-10.
"""

import pytest
from parity.case import DENSE, LONG, SPARSE

from mcore_train.layout_check.certificate import compare_trials


def marked(name):
    return pytest.param(name, marks=pytest.mark.parity_long) if name in LONG else name


def failures(outcome, oracle):
    return [line for line in compare_trials(outcome, oracle) if not line.passed]


@pytest.mark.parametrize("name", [marked(name) for name in DENSE if name != "one"])
def test_a_layout_trains_as_one_rank_does(dense, name):
    assert failures(dense[name], dense["one"]) == []


@pytest.mark.parametrize("name", [marked(name) for name in SPARSE if name != "one"])
def test_a_layout_trains_experts_as_one_rank_does(sparse, name):
    assert failures(sparse[name], sparse["one"]) == []


def test_the_oracle_clips_and_has_experts_that_add_to_the_loss(dense, sparse):
    assert dense["one"].grad_norm > 0.5
    assert dense["one"].aux_loss == 0
    assert sparse["one"].aux_loss > 0
    assert all(float(t.abs().max()) > 0 for t in dense["one"].gradients.values())


@pytest.mark.parametrize("name", [marked(name) for name in DENSE])
def test_stopping_and_continuing_under_one_layout_changes_no_bit(dense, name):
    assert dense[name].resumed == dense[name].final


@pytest.mark.parametrize("name", [marked(name) for name in SPARSE])
def test_stopping_and_continuing_with_experts_changes_no_bit(sparse, name):
    assert sparse[name].resumed == sparse[name].final
