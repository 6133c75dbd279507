"""Phi-3: Llama with queries, keys and values in one matrix, and gates and ups in another."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ANGLES,
    OWN_HEADS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    around,
    attention_rules,
    tied_copies,
)
from mcore_ckpt.families.common.fields import require, setting, settings
from mcore_ckpt.families.common.layer_types import WINDOW
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.logical_tensors import head_dim, num_kv_heads

_CONTEXT = "original_max_position_embeddings"


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    rope, context = config.get("rope_parameters") or {}, config.get(_CONTEXT)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" or not context:
        return dict(config)
    # Phi-3 has the context outside of the rotary table, and several names for LongRoPE.
    kind = "longrope" if kind in ("su", "yarn") else kind
    rope = {name: value for name, value in rope.items() if name != "type"}
    return {**config, "rope_parameters": {**rope, _CONTEXT: context, "rope_type": kind}}


def _write_context(description: Description, _: Theirs) -> Theirs:
    # The original context is written outside of the rotary tables too.
    if setting(description, "rope_type") not in ("longrope", "yarn"):
        return {}
    require(description, rope_type="longrope")
    return {_CONTEXT: setting(description, _CONTEXT)}


def _table(description: Description) -> Table:
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


FAMILY = Decoder(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    absent={"rms_norm_eps": 1e-5},
    only={"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_bias": False},
    unread=(_CONTEXT,),
    parts=(OWN_HEADS, FieldRule(write=_write_context), WINDOW),
    partial=1.0,
    normalize=_normalize,
    weights=_table,
    carries=(_CONTEXT,),  # has an effect with LongRoPE only, but is always present
)
