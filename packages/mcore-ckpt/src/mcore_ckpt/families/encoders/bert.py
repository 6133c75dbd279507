"""BERT as published: a norm after each half, and a norm on the embeddings.

``megatron_bert`` is Megatron's form, with norms before each half.
"""

from collections.abc import Collection, Mapping
from typing import Any

from mcore_ckpt.families.encoders import megatron_bert
from mcore_ckpt.families.encoders.megatron_bert import ACTIVATIONS, list_weights, read, write
from mcore_ckpt.mapping.rules import Table

_POST = {
    "attention.qkv.q": "attention.self.query",
    "attention.qkv.k": "attention.self.key",
    "attention.qkv.v": "attention.self.value",
    "attention.proj": "attention.output.dense",
    "attention_post_norm": "attention.output.LayerNorm",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "mlp_post_norm": "output.LayerNorm",
}

as_stored = megatron_bert.as_stored
shapes = megatron_bert.shapes


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description; see ``families``."""
    return read(config, "Bert", post_layer_norm=True, activations=ACTIVATIONS)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json; see ``families``."""
    return write(description, "bert", "Bert", post_layer_norm=True, activations=ACTIVATIONS)


def renames(names: Collection[str]) -> dict[str, str]:
    """Return PyTorch's names for norms of published folders (gamma, beta)."""
    new = {".gamma": ".weight", ".beta": ".bias"}
    return {
        name: name.removesuffix(old) + kind
        for name in names
        for old, kind in new.items()
        if name.endswith(f"LayerNorm{old}")
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    return list_weights(description, _POST, {"embedding_norm": "bert.embeddings.LayerNorm"})
