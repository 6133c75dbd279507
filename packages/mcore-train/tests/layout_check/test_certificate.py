"""Errors on the model's scale, tolerances, and a table that tells what failed."""

import json
from dataclasses import replace

import pytest
import torch

from mcore_train.layout_check.certificate import (
    Certificate,
    Line,
    compare_rounded,
    compare_trials,
    draw,
    tensor_class,
    vanishing,
)
from mcore_train.layout_check.trial import Trial


def trial(scale=1.0, shift=0.0):
    weights = {
        "blocks.0.mlp.fc1.weight": torch.arange(6.0, dtype=torch.float64).view(2, 3) * scale,
        "blocks.1.mlp.fc1.weight": torch.ones(2, 3, dtype=torch.float64) * scale + shift,
    }
    return Trial(
        losses=[4.0 * scale, 3.0],
        aux_loss=0.0,
        grad_norm=2.0 * scale,
        logits={"logits": torch.ones(1, 2, 3, dtype=torch.float64)},
        gradients=weights,
        updates={"embedding.weight": torch.ones(2, dtype=torch.float64)},
        initial={"embedding.weight": torch.ones(2, dtype=torch.float64)},
    )


def failed(lines):
    return {(line.what, line.worst) for line in lines if not line.passed}


def certificate(lines):
    return Certificate(
        layout="2 ranks: tp2", dtype="float64", lines=tuple(lines), unchecked=("x",), seconds=1
    )


def test_an_equal_trial_passes_every_line():
    found = certificate(compare_trials(trial(), trial()))
    assert found.passed
    assert "computes what one rank computes" in draw(found)


def test_a_constant_factor_is_seen_in_loss_norm_and_gradients():
    wrong = failed(compare_trials(trial(2.0), trial()))
    assert {what for what, _ in wrong} == {"loss", "gradient norm", "gradient"}


def test_the_update_of_a_vanishing_gradient_is_measured_by_the_largest_update():
    gradients = {"fc1.weight": torch.tensor([-2.0]), "k.bias": torch.tensor([1e-18])}
    updates = {"fc1.weight": torch.tensor([0.01]), "k.bias": torch.tensor([1e-16])}
    oracle = replace(trial(), gradients=gradients, updates=updates)
    assert vanishing(gradients) == {"k.bias"}

    def moved(by):
        return replace(oracle, updates=updates | {"k.bias": torch.tensor([by])})

    assert not failed(compare_trials(moved(1e-13), oracle))
    assert failed(compare_trials(moved(1e-11), oracle)) == {("weights after steps", "k.bias")}
    also = replace(oracle, gradients=gradients | {"k.bias": torch.tensor([1e-9])})
    assert failed(compare_trials(moved(1e-13), also)) >= {("weights after steps", "k.bias")}


def test_the_worst_tensor_of_a_class_is_named():
    lines = compare_trials(trial(shift=1e-6), trial())
    assert failed(lines) == {("gradient", "blocks.1.mlp.fc1.weight")}
    assert "FAILED blocks.1.mlp.fc1.weight" in draw(certificate(lines))
    assert "is WRONG" in draw(certificate(lines))


def test_a_nan_fails():
    assert failed(compare_trials(replace(trial(), grad_norm=float("nan")), trial()))
    nan = {"logits": torch.full((1, 2, 3), float("nan"), dtype=torch.float64)}
    assert failed(compare_trials(replace(trial(), logits=nan), trial()))
    losses = replace(trial(), losses=[4.0, float("nan")])
    assert failed(compare_trials(losses, trial()))


def test_another_initial_weight_or_another_continued_run_fails_to_the_bit():
    other = {"embedding.weight": torch.full((2,), 1.0 + 1e-15, dtype=torch.float64)}
    assert failed(compare_trials(replace(trial(), initial=other), trial())) == {
        ("initial weights", "embedding.weight")
    }
    continued = replace(trial(), saved="a", final="b", resumed="c")
    assert failed(compare_trials(continued, trial())) == {("continued run", "")}


def test_numbers_of_layers_and_experts_are_no_part_of_a_class():
    name = "blocks.11.moe.experts.3.fc1.gate.weight"
    assert tensor_class(name) == "blocks.*.moe.experts.*.fc1.gate.weight"


def test_rounding_may_be_as_wide_as_twice_that_of_one_rank():
    off, further = trial(shift=0.04), trial(shift=0.09)
    assert not failed(compare_rounded(off, [off], trial(), 1.6e-2))
    assert not failed(compare_rounded(trial(shift=0.07), [off], trial(), 1.6e-2))
    assert failed(compare_rounded(further, [off], trial(), 1.6e-2))
    assert failed(compare_rounded(off, [trial()], trial(), 1.6e-2))


def few_bits(seed=0, factor=1.0, without=""):
    """A trial of twelve tensors, each number an eighth off, and what it rounds."""
    draw = torch.Generator().manual_seed(7)
    exact = {f"{i}.weight": torch.randn(256, generator=draw).double() for i in range(12)}
    noise = torch.Generator().manual_seed(seed)
    rounded = {
        name: tensor * factor * (1 + torch.randn(256, generator=noise) / 8)
        for name, tensor in exact.items()
    }
    rounded |= {name: rounded[name] / 2 for name in rounded if name == without}
    oracle = replace(trial(), gradients=exact, logits=exact)
    return replace(oracle, gradients=rounded), oracle


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ({}, set()),
        ({"factor": 1.05}, {"gradient, mean scale"}),
        ({"without": "3.weight"}, {"gradient, scale"}),
    ],
)
def test_faults_smaller_than_the_rounding_of_few_bits_are_seen_over_all_tensors(fault, seen):
    (alone, oracle), (found, _) = few_bits(seed=1), few_bits(seed=2, **fault)
    lines = compare_rounded(found, [alone], oracle, 1.6e-2, few_bits=True)
    assert {what for what, _ in failed(lines)} >= seen
    assert not seen or not failed(compare_rounded(found, [alone], oracle, 1.6e-2))
    assert seen or not failed(lines)


def test_the_coarsest_of_several_lone_runs_says_what_rounding_costs():
    (alone, oracle), (found, _) = few_bits(seed=1), few_bits(seed=2)
    assert failed(compare_rounded(found, [oracle], oracle, 1e-5, few_bits=True))
    assert not failed(compare_rounded(found, [oracle, alone], oracle, 1e-5, few_bits=True))


def test_json_says_each_error_and_the_verdict():
    table = json.loads(certificate(compare_trials(trial(2.0), trial())).to_json())
    assert table["passed"] is False
    assert table["layout"] == "2 ranks: tp2"
    assert {"what", "tensor", "worst", "error", "tolerance"} <= set(table["lines"][0])
    assert table["unchecked"] == ["x"]


def test_nothing_compared_is_nothing_proven():
    assert not certificate([]).passed
    line = Line(what="loss", tensor="", worst="", error=0.0, tolerance=0.0)
    assert certificate([line]).passed
    assert not replace(certificate([line]), stopped="rank 1 died").passed


def test_the_quiet_form_names_what_failed_and_the_verdict():
    good = Line(what="loss", tensor="", worst="", error=0.0, tolerance=0.0)
    bad = Line(what="logits", tensor="rows", worst="rows.1", error=1.0, tolerance=1e-10)
    found = certificate([good, bad])
    assert "not checked here:" in draw(found)
    row, verdict = draw(found, quiet=True).splitlines()
    assert row.split() == ["logits", "rows", "1.0e+00", "1.0e-10", "FAILED", "rows.1"]
    assert "is WRONG" in verdict
