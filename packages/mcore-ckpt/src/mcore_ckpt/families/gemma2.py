"""Gemma 2: norms before and after each half, gains stored minus one, capped logits.

No model here runs it yet: the fields that have no flag keep the family's own names.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.decoder import decoder_table
from mcore_ckpt.families.fields import (
    REQUIRED,
    Fields,
    Nullable,
    Pairs,
    read_pairs,
    require_family,
    write_pairs,
)
from mcore_ckpt.families.shapes import Shapes, gpt_shapes
from mcore_ckpt.mapping.rules import Table

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""Our norms and theirs."""

PAIRS = (
    ("num_layers", "num_hidden_layers", REQUIRED),
    ("hidden_size", "hidden_size", REQUIRED),
    ("num_attention_heads", "num_attention_heads", REQUIRED),
    ("num_query_groups", "num_key_value_heads", REQUIRED),
    ("kv_channels", "head_dim", 256),
    ("ffn_hidden_size", "intermediate_size", REQUIRED),
    ("max_position_embeddings", "max_position_embeddings", 8192),
    ("norm_epsilon", "rms_norm_eps", 1e-6),
    ("attention_dropout", "attention_dropout", 0.0),
    ("init_method_std", "initializer_range", 0.02),
    ("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
    ("attn_logit_softcapping", "attn_logit_softcapping", Nullable(50.0)),
    ("final_logit_softcapping", "final_logit_softcapping", Nullable(30.0)),
    ("sliding_window", "sliding_window", Nullable(4096)),
    ("layer_types", "layer_types", None),
    ("rope_parameters", "rope_parameters", None),
    ("rope_theta", "rope_theta", None),
    ("rope_scaling", "rope_scaling", None),
)
"""Our fields and theirs."""


def read(config: Mapping[str, Any], family: str, pairs: Pairs) -> dict[str, Any]:
    """Read a config.json of one of the Gemmas as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, keep=("layer_types",))
    fields.must_be("attention_bias", False)
    fields.must_be("tie_word_embeddings", True)
    fields.must_be("hidden_activation", "gelu_pytorch_tanh")
    # The first release wrote another activation here, which nothing reads.
    fields.maybe("hidden_act")
    fields.must_be("use_bidirectional_attention", False)
    fields.maybe("cache_implementation")
    ours = {"apply_layernorm_1p": True} | read_pairs(fields, pairs)
    vocab_size = fields.take("vocab_size")
    fields.finish()
    return {"family": family, "vocab_size": vocab_size, "config": ours, "moe": {}}


def write(
    description: Mapping[str, Any], family: str, architecture: str, pairs: Pairs
) -> dict[str, Any]:
    """Write a description as a config.json of one of the Gemmas.

    Raises:
        ValueError: if it is of another family.
    """
    require_family(description, family)
    return {
        "model_type": family,
        "architectures": [architecture],
        "vocab_size": description["vocab_size"],
        **write_pairs(description, pairs),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
    }


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    return read(config, "gemma2", PAIRS)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: if it is of another family.
    """
    return write(description, "gemma2", "Gemma2ForCausalLM", PAIRS)


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    return decoder_table(description, norms=NORMS)


def shapes(description: Mapping[str, Any]) -> Shapes:
    """List the shapes of the weights, see ``families.shapes``."""
    hidden = (description["config"]["hidden_size"],)
    return gpt_shapes(description) | {"attention_post_norm": hidden, "mlp_post_norm": hidden}
