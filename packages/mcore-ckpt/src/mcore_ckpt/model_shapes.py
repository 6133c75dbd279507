"""The sizes that a model's description gives its weights, held against those in the files.

A config.json that belongs to other weights can list the very same names. Taken as it is, it
would make a checkpoint that nobody can load, or one that loads and computes nonsense.
"""

import re
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.decoder import ffn_size, num_groups
from mcore_ckpt.families.experts import expert_setting
from mcore_ckpt.families.fields import setting
from mcore_ckpt.index import TensorEntry
from mcore_ckpt.planning import listed

_LAYER = re.compile(r"^blocks\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")


def check_shapes(description: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> None:
    """Compare weights with what their model's description says; only GPTs are looked at.

    Args:
        description: of the model.
        entries: its weights by logical name. Names are another check's matter.

    Raises:
        ValueError: naming each weight of another shape, with both.
    """
    if description.get("family") != "gpt":
        return
    wanted = gpt_shapes(description)
    problems = []
    for name, entry in entries.items():
        pattern = _EXPERT.sub(".experts.*.", _LAYER.sub("", name))
        stem, _, kind = pattern.rpartition(".")
        shape = wanted.get(stem)
        if kind != "weight" and shape is not None:
            # A bias, also the router's for each expert: a number a row.
            shape = shape[:1]
        if shape is not None and entry.shape != shape:
            problems.append(f"{name}: {list(entry.shape)} there, {list(shape)} by the config")
    if problems:
        raise ValueError(
            "the weights have not the sizes that the config says; is it another model's? "
            f"{listed(problems)}"
        )


def gpt_shapes(description: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """List the shape of each kind of weight of a GPT, by its name within a layer."""
    hidden, vocab = setting(description, "hidden_size"), description["vocab_size"]
    heads = setting(description, "num_attention_heads")
    head = setting(description, "kv_channels") or hidden // heads
    key_value = (num_groups(description) * head, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (vocab, hidden),
        "head": (vocab, hidden),
        "final_norm": (hidden,),
        "attention_norm": (hidden,),
        "mlp_norm": (hidden,),
        "attention.qkv.q": (heads * head, hidden),
        "attention.qkv.k": key_value,
        "attention.qkv.v": key_value,
        "attention.proj": (hidden, heads * head),
        "attention.q_norm": (head,),
        "attention.k_norm": (head,),
        **_mlp_shapes("mlp", ffn_size(description), hidden),
    }
    positions = setting(description, "max_position_embeddings")
    if setting(description, "position_embedding_type") == "learned_absolute" and positions:
        shapes["position_embedding"] = (positions, hidden)
    expert = expert_setting(description, "moe_ffn_hidden_size") or ffn_size(description)
    shared = expert_setting(description, "moe_shared_expert_intermediate_size")
    return shapes | {
        "moe.router": (expert_setting(description, "num_experts"), hidden),
        "moe.shared.token_gate": (1, hidden),
        **_mlp_shapes("moe.experts.*", expert, hidden),
        **_mlp_shapes("moe.shared", shared, hidden),
    }


def _mlp_shapes(name: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    first = {f"{name}.{part}": (width, hidden) for part in ("fc1", "fc1.gate", "fc1.up")}
    return {**first, f"{name}.fc2": (hidden, width)}
