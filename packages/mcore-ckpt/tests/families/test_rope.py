"""Rotary positions of a config.json: what we read and write is what transformers computes."""

from copy import deepcopy

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mcore_ckpt.families import MODEL_TYPES, find_family
from mcore_ckpt.families.common.decoder import Decoder
from mcore_ckpt.families.common.layer_types import FULL, LOCAL

FAMILIES = {
    name: find_family(name)
    for name in MODEL_TYPES
    if name in transformers.CONFIG_MAPPING and isinstance(find_family(name), Decoder)
}
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
TABLES = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"type": "yarn", "factor": 2.0, "beta_fast": 16.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)
CHANGED = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"norm_topk_prob": True, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"original_max_position_embeddings": 128},
}
"""What configs of transformers need so that they are models that we know."""
UNFIT = (ValueError, KeyError, TypeError, RuntimeError, StrictDataclassError)
"""What transformers ends in for positions that it cannot compute."""
BASES = st.sampled_from((None, 2e4, 5e5))
"""Of rotations; None: left out."""


def plain(model_type: str) -> dict:
    """Return transformers' own config.json of a family, without a word on positions."""
    kind = transformers.CONFIG_MAPPING[model_type]
    config = kind(max_position_embeddings=128).to_dict()
    rope = (*ROPE_FIELDS, "rotary_pct", "rotary_emb_base", "rope_local_base_freq")
    plain = {name: value for name, value in config.items() if name not in rope}
    return plain | CHANGED.get(model_type, {})


@st.composite
def tables(draw: st.DrawFn) -> dict | None:
    table = draw(st.sampled_from((None, *TABLES)))
    base = draw(BASES)
    return table if table is None or base is None else {**table, "rope_theta": base}


def angles(model_type: str, config: dict) -> list[object]:
    """Return what transformers rotates by: frequencies and factor, for each kind of layer."""
    made = transformers.CONFIG_MAPPING[model_type].from_dict(deepcopy(config))
    rope = made.rope_parameters
    found: list[object] = []
    for kind in (FULL, LOCAL) if FULL in rope else (None,):
        table = rope if kind is None else rope[kind]
        found += [table["rope_theta"], table.get("partial_rotary_factor", 1.0)]
        if table["rope_type"] != "default":
            compute = ROPE_INIT_FUNCTIONS[table["rope_type"]]
            more = {} if kind is None else {"layer_type": kind}
            found += compute(made, "cpu", **more)
    return found


def assert_same(one: list[object], other: list[object]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FAMILIES)), tables(), tables(), BASES)
def test_positions_are_those_of_transformers_or_are_refused(name, scaling, parameters, base):
    if not FAMILIES[name].rotates:
        return
    stated = {"rope_scaling": scaling, "rope_parameters": parameters, "rope_theta": base}
    config = plain(name) | {field: value for field, value in stated.items() if value}
    try:
        want = angles(name, config)
    except UNFIT:
        return
    theirs, refusal = {}, ""
    try:
        theirs = FAMILIES[name].to_theirs(FAMILIES[name].to_ours(config))
    except ValueError as error:
        refusal = str(error)
    if refusal:
        words = ("rope_", "rotary", "original_max_position_embeddings", "factor")
        assert any(word in refusal for word in words), refusal
        return
    assert_same(angles(name, theirs), want)
    if theirs.get("rope_scaling") and FULL not in theirs["rope_parameters"]:
        # Each of the two spellings says the same without the other.
        for spelling in ("rope_scaling", "rope_parameters"):
            alone = {field: value for field, value in theirs.items() if field != spelling}
            assert_same(angles(name, alone), want)


CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
"""What model cards tell to add to a config.json for long texts."""


def test_yarn_that_is_added_as_model_cards_advise_is_read():
    qwen = FAMILIES["qwen3"]
    old = plain("qwen3") | {"rope_theta": 1e6, "rope_scaling": CARD}
    exported = qwen.to_theirs(qwen.to_ours(plain("qwen3") | {"rope_theta": 1e6}))
    for config in (old, exported | {"rope_scaling": CARD}):
        ours = qwen.to_ours(config)["config"]
        assert (ours.get("rope_type"), ours["rotary_base"]) == ("yarn", 1e6)
        assert_same(angles("qwen3", qwen.to_theirs(qwen.to_ours(config))), angles("qwen3", old))


def test_yarn_that_makes_transformers_forget_the_base_is_refused_with_both_values():
    base = {"rope_type": "default", "rope_theta": 1e6}
    new = plain("qwen3") | {"rope_parameters": base, "rope_scaling": CARD}
    assert angles("qwen3", new)[0] == 1e4
    with pytest.raises(
        ValueError, match=r"rope_theta=1000000.0 in rope_para.*with 10000.0.*Mo"
    ):
        FAMILIES["qwen3"].to_ours(new)
    moved = plain("qwen3") | {"rope_parameters": base | CARD}
    assert FAMILIES["qwen3"].to_ours(moved)["config"]["rope_type"] == "yarn"


def test_a_table_for_all_layers_is_refused_where_transformers_reads_one_by_kind():
    config = plain("gemma3_text") | {"rope_parameters": {"rope_theta": 2e4}}
    with pytest.raises(ValueError, match="which transformers ignores in this family"):
        FAMILIES["gemma3_text"].to_ours(config)
