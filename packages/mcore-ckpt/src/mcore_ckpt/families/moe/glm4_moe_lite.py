"""GLM-4.7-Flash: DeepSeek-V3's layers, with a list of the layers that have experts."""

from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.decoder import Description, FieldRule, Theirs, pair
from mcore_ckpt.families.common.fields import Fields, expert_layers, write_layers
from mcore_ckpt.families.moe import deepseek_v3
from mcore_ckpt.families.moe.mtp_layers import MTP

_WORDS = {"dense": 0, "sparse": 1}


def _read(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    types = fields.maybe("mlp_layer_types")
    if types is not None:
        fields.maybe("first_k_dense_replace")  # the list overrides it
    moe = deepseek_v3.SIGMOID_EXPERTS.read(fields, ours)
    if types is None:
        return moe
    if len(types) != ours["num_layers"] or not set(types) <= _WORDS.keys():
        raise ValueError(
            f"config.json has mlp_layer_types={types!r}: it must name dense or sparse for each "
            f"of num_hidden_layers, {ours['num_layers']}."
        )
    return moe | {"moe_layer_freq": write_layers(_WORDS[kind] for kind in types)}


def _write(description: Description, theirs: Theirs) -> Theirs:
    pattern = expert_layers(description)
    words = {value: word for word, value in _WORDS.items()}
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    # The number of first dense layers, for engines that do not read the list.
    first = write_layers([0] * dense + [1] * (len(pattern) - dense))
    moe = {**description["moe"], "moe_layer_freq": first}
    fields = deepseek_v3.SIGMOID_EXPERTS.write({**description, "moe": moe}, theirs)
    return fields | {"mlp_layer_types": [words[has] for has in pattern]}


TYPED_EXPERTS = FieldRule(read=_read, write=_write)
"""Experts of DeepSeek-V3 in the layers of ``mlp_layer_types``."""

FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    absent={
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
    },
    parts=(*deepseek_v3.LATENT, pair("rotary_interleaved", "rope_interleave", True), MTP),
    experts=TYPED_EXPERTS,
)
