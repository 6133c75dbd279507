"""Phi-3: Llama with queries, keys and values in one matrix, and gates and ups in another."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ANGLES,
    around,
    attention_rules,
    read_rms_silu,
    tied_copies,
    write_rms_silu,
)
from mcore_ckpt.families.common.experts import no_experts
from mcore_ckpt.families.common.fields import Fields, require, setting, settings
from mcore_ckpt.families.dense.mistral import read_window, write_window
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_parallel.logical_tensors import head_dim, num_kv_heads

CARRIES = ("original_max_position_embeddings",)
"""Says something with LongRoPE alone, and is there without it."""


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    context = config.get("original_max_position_embeddings")
    stated = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default" and context:
            # The family says it outside of the table, and calls the same thing by more names.
            stated[name] = {**rope, "original_max_position_embeddings": context}
            kind = rope.get("rope_type", rope.get("type"))
            stated[name]["rope_type"] = "longrope" if kind in ("su", "yarn") else kind
            stated[name].pop("type", None)
    fields = Fields(stated, absent={"rms_norm_eps": 1e-5})
    fields.must_be("attention_bias", False)
    for name in ("embd_pdrop", "resid_pdrop"):
        fields.must_be(name, 0.0)
    fields.take("original_max_position_embeddings", 0)
    ours = read_rms_silu(fields, partial=True) | {"window_size": read_window(fields)}
    return fields.described(ours)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: naming a flag that the family cannot say.
    """
    no_experts(description)
    require(description, qk_layernorm=False, add_bias_linear=False, add_qkv_bias=False)
    theirs = write_rms_silu(description, "Phi3ForCausalLM", partial=True)
    own = theirs["hidden_size"] // theirs["num_attention_heads"]
    if theirs.pop("head_dim") != own:
        raise ValueError(f"it cannot say --kv-channels: only {own}, hidden size / heads")
    # The short context stands outside of the rotary tables too.
    if setting(description, "rope_type") in ("longrope", "yarn"):
        require(description, rope_type="longrope")
        context = setting(description, "original_max_position_embeddings")
        theirs["original_max_position_embeddings"] = context
    theirs |= {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_bias": False}
    return {"model_type": "phi3", **theirs, **write_window(description)}


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    at = "model.layers.*."
    config = settings(description)
    key_value = num_kv_heads(config) * head_dim(config)
    sizes = (config.num_attention_heads * head_dim(config), key_value, key_value)
    qkv = tuple(f"blocks.*.attention.qkv.{part}.weight" for part in "qkv")
    fc1 = ("blocks.*.mlp.fc1.gate.weight", "blocks.*.mlp.fc1.up.weight")
    kept = [rule for rule in attention_rules(description) if ".qkv." not in rule.ours]
    rules = [
        *kept,
        Rule(qkv, f"{at}self_attn.qkv_proj.weight", sizes=sizes),
        Rule(fc1, f"{at}mlp.gate_up_proj.weight"),
        Rule("blocks.*.mlp.fc2.weight", f"{at}mlp.down_proj.weight"),
    ]
    return Table(
        around(description, rules),
        setting(description, "num_layers"),
        droppable=ANGLES,
        copies=tied_copies(description),
    )
