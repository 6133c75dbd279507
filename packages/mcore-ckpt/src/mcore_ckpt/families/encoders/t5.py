"""T5 and T5 1.1: an encoder and a decoder with relative positions, RMSNorm, no biases.

A description also covers Megatron's form of T5: other positions, norms, biases and scales.
"""

from collections.abc import Collection, Mapping
from typing import Any

from mcore_ckpt.families.common.fields import (
    REQUIRED,
    Fields,
    read_pairs,
    require_family,
    require_value,
    settings,
    write_pairs,
)
from mcore_ckpt.families.common.shapes import Shapes, shapes_within_layer
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.encoder_config import T5Config, decoder_layers, encoder_layers, feed_forward
from mcore_models.encoder_shapes import t5_shapes
from mcore_models.logical_tensors import ffn_size, head_dim

PAIRS = (
    ("encoder_num_layers", "num_layers", REQUIRED),
    ("decoder_num_layers", "num_decoder_layers", None),
    ("hidden_size", "d_model", REQUIRED),
    ("kv_channels", "d_kv", REQUIRED),
    ("ffn_hidden_size", "d_ff", REQUIRED),
    ("num_attention_heads", "num_heads", REQUIRED),
    ("relative_attention_num_buckets", "relative_attention_num_buckets", 32),
    ("relative_attention_max_distance", "relative_attention_max_distance", 128),
    ("hidden_dropout", "dropout_rate", 0.1),
    ("norm_epsilon", "layer_norm_epsilon", 1e-6),
)
_FORM = {
    "position_embedding_type": "relative",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "add_output_bias": False,
    "scale_attention_scores": False,
    "apply_layernorm_1p": False,
}
"""Our fields without a counterpart in config.json, and their required values."""
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "gelu_new": "gelu_tanh",
    "gated-gelu_new": "gated-gelu",
    "gated-gelu": "gated-gelu",
    "gated-silu": "gated-silu",
    "gated-relu": "gated-relu",
}
"""Their ``feed_forward_proj`` and ours; gated-gelu is the tanh approximation on both sides."""

_SELF = {"qkv.q": "q", "qkv.k": "k", "qkv.v": "v", "proj": "o"}
_CROSS = {"q": "q", "kv.k": "k", "kv.v": "v", "proj": "o"}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description; see ``families``."""
    fields = Fields(config)
    fields.must_be("is_encoder_decoder", True)
    unread = ("dense_act_fn", "is_gated_act", "n_positions", "is_decoder", "output_past")
    for name in (*unread, "classifier_dropout", "initializer_factor"):
        fields.maybe(name)
    ours = read_pairs(fields, PAIRS)
    kind = fields.take("feed_forward_proj", "relu")
    if kind not in _ACTIVATIONS:
        raise ValueError(
            f"config.json has feed_forward_proj={kind!r}: use one of {list(_ACTIVATIONS)}."
        )
    ours["feed_forward_proj"] = _ACTIVATIONS[kind]
    ours["num_layers"] = ours["encoder_num_layers"]
    ours["max_position_embeddings"] = 0
    ours["attention_dropout"] = ours["hidden_dropout"]
    ours |= _FORM
    if ours["decoder_num_layers"] is None:
        ours["decoder_num_layers"] = ours["encoder_num_layers"]
    tied = fields.take("tie_word_embeddings", True)
    ours["untie_embeddings_and_output_weights"] = not tied
    scaled = fields.maybe("scale_decoder_outputs")
    ours["scale_decoder_outputs"] = tied if scaled is None else scaled
    return fields.described(ours, family="t5")


def as_stored(description: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a description with an untied head if the folder has one.

    Newer folders may have an untied head although config.json has ``tie_word_embeddings``. Such
    folders disable the scaling of the head's input, which a tied head always has.
    """
    config = description["config"]
    is_own = "lm_head.weight" in names and not config["scale_decoder_outputs"]
    return {**description, "config": config | {"untie_embeddings_and_output_weights": is_own}}


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json; see ``families``."""
    require_family(description, "t5")
    config = settings(description, T5Config)
    for name, wanted in _FORM.items():
        require_value(name, getattr(config, name), wanted)
    tied, scaled = not config.untie_embeddings_and_output_weights, config.scale_decoder_outputs
    kinds = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": description["vocab_size"],
        **write_pairs(description, PAIRS),
        "num_layers": encoder_layers(config),
        "num_decoder_layers": decoder_layers(config),
        "d_kv": head_dim(config),
        "d_ff": ffn_size(config),
        "feed_forward_proj": kinds[config.feed_forward_proj],
        "is_encoder_decoder": True,
        "tie_word_embeddings": tied,
        **({} if scaled == tied else {"scale_decoder_outputs": scaled}),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    config = settings(description, T5Config)
    depths = encoder_layers(config), decoder_layers(config)
    is_untied = config.untie_embeddings_and_output_weights
    rules = [Rule("embedding.weight", "shared.weight")]
    for stack, depth in zip(("encoder", "decoder"), depths, strict=True):
        rules += _stack(description, stack, depth)
    if is_untied:
        rules.append(Rule("head.weight", "lm_head.weight"))
    stacks = ("encoder", "decoder")
    copies = {f"{stack}.embed_tokens.weight": "shared.weight" for stack in stacks}
    if not is_untied:
        copies["lm_head.weight"] = "shared.weight"
    # Some old folders have a position bias of the cross-attention, which transformers ignores.
    unread = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
    return Table(tuple(rules), max(depths), droppable=unread, copies=copies)


def _stack(description: Mapping[str, Any], stack: str, depth: int) -> list[Rule]:
    here, there = f"{stack}.blocks.*.", f"{stack}.block.*.layer."
    names = {"attention_norm": "0.layer_norm"}
    names |= {f"attention.{mine}": f"0.SelfAttention.{name}" for mine, name in _SELF.items()}
    last = "1"
    if stack == "decoder":
        last = "2"
        names["cross_attention_norm"] = "1.layer_norm"
        names |= {
            f"cross_attention.{mine}": f"1.EncDecAttention.{name}"
            for mine, name in _CROSS.items()
        }
    dense = f"{last}.DenseReluDense."
    is_gated, _ = feed_forward(settings(description, T5Config))
    fc1 = {"mlp.fc1.gate": "wi_0", "mlp.fc1.up": "wi_1"} if is_gated else {"mlp.fc1": "wi"}
    names |= {mine: dense + name for mine, name in {**fc1, "mlp.fc2": "wo"}.items()}
    names["mlp_norm"] = f"{last}.layer_norm"
    layers = tuple(range(depth))
    rules = [
        Rule(f"{here}{mine}.weight", f"{there}{name}.weight", layers=layers)
        for mine, name in names.items()
    ]
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return [
        Rule(f"{stack}.relative_position_bias.weight", f"{stack}.{bias}"),
        *rules,
        Rule(f"{stack}.final_norm.weight", f"{stack}.final_layer_norm.weight"),
    ]


def shapes(description: Mapping[str, Any]) -> Shapes:
    """Return the shapes of the weights; see ``common.shapes``."""
    config = settings(description, T5Config)
    return shapes_within_layer(t5_shapes(config, description["vocab_size"]))
