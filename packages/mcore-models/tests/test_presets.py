"""Presets and descriptions of models as data."""

import json
from dataclasses import replace

import pytest

from mcore_models.description import ModelDescription
from mcore_models.families import GPT_FAMILY
from mcore_models.presets import load_preset, preset_names
from mcore_parallel.logical_tensors import head_dim


def test_every_preset_can_be_read():
    names = preset_names()
    assert {"llama-3-8b", "gpt3-175b", "mixtral-8x7b", "qwen3-30b-a3b", "tiny"} <= set(names)
    for name in names:
        assert load_preset(name).vocab_size > 0


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="no preset is called llama-3-8: did you mean llama-3"):
        load_preset("llama-3-8")
    with pytest.raises(ValueError, match=f"there are {preset_names()[0]}, "):
        load_preset("zzz")


def test_head_widths_that_do_not_follow_are_kept():
    assert head_dim(load_preset("qwen3-30b-a3b").config) == 128
    assert head_dim(load_preset("llama-3.2-1b").config) == 64


@pytest.mark.parametrize("name", preset_names())
def test_a_description_survives_json(name):
    made = load_preset(name)
    table = json.loads(json.dumps(made.to_dict()))
    assert set(table) == {"family", "vocab_size", "config", "moe"}
    assert ModelDescription.from_dict(table) == made


def test_a_description_without_experts_is_dense():
    made = load_preset("tiny")
    table = made.to_dict()
    del table["moe"]
    assert ModelDescription.from_dict(table) == made


def test_another_family_and_unknown_fields_are_refused():
    table = load_preset("tiny").to_dict()
    with pytest.raises(ValueError, match="family 'bert' is not known"):
        ModelDescription.from_dict(table | {"family": "bert"})
    known = {"bert": replace(GPT_FAMILY, name="bert")}
    assert ModelDescription.from_dict(table | {"family": "bert"}, known).family == "bert"
    with pytest.raises(ValueError, match="did you mean num_layers"):
        ModelDescription.from_flags({"num_layer": 2})
