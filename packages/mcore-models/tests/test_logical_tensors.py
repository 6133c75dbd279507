"""Which layers have experts; mcore-models holds the list of tensors against built models."""

from types import SimpleNamespace

import pytest

from mcore_models.logical_tensors import moe_layers


def experts(frequency, num_experts=4):
    return SimpleNamespace(num_experts=num_experts, moe_layer_freq=frequency)


def test_without_experts_every_layer_is_dense():
    assert moe_layers(experts("1", num_experts=0), 3) == (False, False, False)


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [
        ("1", (True, True, True, True)),
        ("2", (True, False, True, False)),
        ("3", (True, False, False, True)),
        ("[0,1,1,0]", (False, True, True, False)),
        ("[0]*1+[1]*3", (False, True, True, True)),
        ("([0]*1+[1])*2", (False, True, False, True)),
    ],
)
def test_layer_frequency_is_a_number_or_a_pattern(frequency, expected):
    assert moe_layers(experts(frequency), 4) == expected


@pytest.mark.parametrize(
    "frequency",
    [
        "0",
        "[1]*3",
        "[2]*4",
        "__import__('os')",
        "[1]*",
        "layers",
        "[1]*'4'",
        "[[1]]*4",
        "4*[1]+1",
        "[1]*99999999999",
        "(" * 999 + "1" + ")" * 999,
    ],
)
def test_a_bad_layer_frequency_is_named(frequency):
    with pytest.raises(ValueError, match="--moe-layer-freq"):
        moe_layers(experts(frequency), 4)
