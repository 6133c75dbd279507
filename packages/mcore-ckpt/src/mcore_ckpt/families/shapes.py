"""The sizes that a model's description gives its weights, by their names within a layer.

``gpt`` is what most families have; those that differ say so in their own file.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.decoder import ffn_size, num_groups
from mcore_ckpt.families.experts import expert_setting
from mcore_ckpt.families.fields import setting

Shapes = dict[str, tuple[int, ...]]
"""By name without number of layer or expert and without ``.weight``; of a bias, the first
number counts."""


def gpt_shapes(description: Mapping[str, Any]) -> Shapes:
    """List the shape of each kind of weight of a GPT, by its name within a layer."""
    hidden, vocab = setting(description, "hidden_size"), description["vocab_size"]
    heads = setting(description, "num_attention_heads")
    head = setting(description, "kv_channels") or hidden // heads
    key_value = (num_groups(description) * head, hidden)
    shapes: Shapes = {
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
        **mlp_shapes("mlp", ffn_size(description), hidden),
    }
    positions = setting(description, "max_position_embeddings")
    if setting(description, "position_embedding_type") == "learned_absolute" and positions:
        shapes["position_embedding"] = (positions, hidden)
    expert = expert_setting(description, "moe_ffn_hidden_size") or ffn_size(description)
    shared = expert_setting(description, "moe_shared_expert_intermediate_size")
    return shapes | {
        "moe.router": (expert_setting(description, "num_experts"), hidden),
        "moe.shared.token_gate": (1, hidden),
        **mlp_shapes("moe.experts.*", expert, hidden),
        **mlp_shapes("moe.shared", shared, hidden),
    }


def mlp_shapes(name: str, width: int, hidden: int) -> Shapes:
    """List the shapes of one feed-forward layer, gated or not."""
    first = {f"{name}.{part}": (width, hidden) for part in ("fc1", "fc1.gate", "fc1.up")}
    return {**first, f"{name}.fc2": (hidden, width)}
