"""OLMo-2: norms after each half instead of before, and on whole queries and keys.

No model here runs it yet: the fields that have no flag keep the family's own names.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.decoder import decoder_table
from mcore_ckpt.families.fields import REQUIRED, Fields, read_pairs, require_family, write_pairs
from mcore_ckpt.families.shapes import Shapes, gpt_shapes
from mcore_ckpt.mapping.rules import Table

_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
PAIRS = (
    ("num_layers", "num_hidden_layers", REQUIRED),
    ("hidden_size", "hidden_size", REQUIRED),
    ("num_attention_heads", "num_attention_heads", REQUIRED),
    ("num_query_groups", "num_key_value_heads", None),
    ("ffn_hidden_size", "intermediate_size", REQUIRED),
    ("max_position_embeddings", "max_position_embeddings", 2048),
    ("norm_epsilon", "rms_norm_eps", 1e-5),
    ("attention_dropout", "attention_dropout", 0.0),
    ("init_method_std", "initializer_range", 0.02),
    ("rope_parameters", "rope_parameters", None),
    ("rope_theta", "rope_theta", None),
    ("rope_scaling", "rope_scaling", None),
)


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config)
    fields.must_be("hidden_act", "silu")
    fields.must_be("attention_bias", False)
    ours = read_pairs(fields, PAIRS) | {"qk_layernorm": True}
    tied = fields.take("tie_word_embeddings", False)
    ours["untie_embeddings_and_output_weights"] = not tied
    vocab_size = fields.take("vocab_size")
    fields.finish()
    return {"family": "olmo2", "vocab_size": vocab_size, "config": ours, "moe": {}}


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: if it is of another family.
    """
    require_family(description, "olmo2")
    tied = not description["config"]["untie_embeddings_and_output_weights"]
    return {
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "vocab_size": description["vocab_size"],
        **write_pairs(description, PAIRS),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    return decoder_table(description, norms=_NORMS)


def shapes(description: Mapping[str, Any]) -> Shapes:
    """List the shapes of the weights, see ``families.shapes``."""
    found = gpt_shapes(description)
    norms = {
        "attention_post_norm": found["attention_norm"],
        "mlp_post_norm": found["mlp_norm"],
        # Over all heads at once.
        "attention.q_norm": found["attention.qkv.q"][:1],
        "attention.k_norm": found["attention.qkv.k"][:1],
    }
    return found | norms
