"""Every layout against one rank: loss, gradients, norm and weights, in float64.

The error of a tensor is max|a-b| / max(max|b|, 1e-3 x the largest of the model), for
gradients and weight updates alike; AdamW in float64 is held to 1e-10.
"""

import pytest
from parity.case import DENSE, SPARSE

TOLERANCE = 1e-10


def error(found, expected):
    """Worst tensor's name and error."""
    assert sorted(found) == sorted(expected)
    largest = max(float(t.abs().max()) for t in expected.values())
    errors = {
        name: float((found[name] - expected[name]).abs().max())
        / max(float(expected[name].abs().max()), 1e-3 * largest)
        for name in expected
    }
    return max(errors.items(), key=lambda item: item[1])


def compare(outcome, oracle):
    assert outcome.losses == pytest.approx(oracle.losses, rel=TOLERANCE)
    assert outcome.aux_loss == pytest.approx(oracle.aux_loss, rel=TOLERANCE)
    assert outcome.grad_norm == pytest.approx(oracle.grad_norm, rel=TOLERANCE)
    name, worst = error(outcome.gradients, oracle.gradients)
    assert worst < TOLERANCE, f"gradient of {name}"
    name, worst = error(outcome.updates, oracle.updates)
    assert worst < TOLERANCE, f"update of {name}"
    assert all((outcome.initial[n] == t).all() for n, t in oracle.initial.items())


@pytest.mark.parametrize("name", [name for name in DENSE if name != "one"])
def test_a_layout_trains_as_one_rank_does(dense, name):
    compare(dense[name], dense["one"])


@pytest.mark.parametrize("name", [name for name in SPARSE if name != "one"])
def test_a_layout_trains_experts_as_one_rank_does(sparse, name):
    compare(sparse[name], sparse["one"])


def test_the_oracle_clips_and_has_experts_that_add_to_the_loss(dense, sparse):
    assert dense["one"].grad_norm > 0.5
    assert dense["one"].aux_loss == 0
    assert sparse["one"].aux_loss > 0
    assert all(float(t.abs().max()) > 0 for t in dense["one"].gradients.values())


@pytest.mark.parametrize("name", list(DENSE))
def test_stopping_and_continuing_under_one_layout_changes_no_bit(dense, name):
    assert dense[name].resumed == dense[name].final


@pytest.mark.parametrize("name", list(SPARSE))
def test_stopping_and_continuing_with_experts_changes_no_bit(sparse, name):
    assert sparse[name].resumed == sparse[name].final
