"""BERT as Megatron trains it: a norm before each half, and a norm after the last layer.

``bert`` is the published form, with norms after each half.
"""

from collections.abc import Collection, Iterable, Mapping
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
from mcore_models.encoder_config import BertConfig
from mcore_models.encoder_shapes import bert_shapes
from mcore_models.logical_tensors import ffn_size

PAIRS = (
    ("num_layers", "num_hidden_layers", REQUIRED),
    ("hidden_size", "hidden_size", REQUIRED),
    ("num_attention_heads", "num_attention_heads", REQUIRED),
    ("ffn_hidden_size", "intermediate_size", REQUIRED),
    ("max_position_embeddings", "max_position_embeddings", REQUIRED),
    ("num_tokentypes", "type_vocab_size", 2),
    ("norm_epsilon", "layer_norm_eps", 1e-12),
    ("hidden_dropout", "hidden_dropout_prob", 0.1),
    ("attention_dropout", "attention_probs_dropout_prob", 0.1),
    ("init_method_std", "initializer_range", 0.02),
)
"""Our fields, their fields, and defaults."""

_IMPLIED = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "swiglu": False,
    "quick_geglu": False,
    "squared_relu": False,
    "apply_layernorm_1p": False,
    "norm_weight": True,
}
"""Our fields without a counterpart in config.json, and their required values."""

ACTIVATIONS = {"gelu": "", "gelu_new": "openai_gelu", "relu": "relu"}
"""Activations of the published BERT, and our flags. Other forms have only GELU, as their head
of
masked tokens always has exact GELU."""

_PRE = {
    "attention_norm": "attention.ln",
    "attention.qkv.q": "attention.self.query",
    "attention.qkv.k": "attention.self.key",
    "attention.qkv.v": "attention.self.value",
    "attention.proj": "attention.output.dense",
    "mlp_norm": "ln",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description; see ``families``."""
    return read(config, "MegatronBert", post_layer_norm=False)


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json; see ``families``."""
    return write(description, "megatron-bert", "MegatronBert", post_layer_norm=False)


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    return list_weights(description, _PRE, {"final_norm": "bert.encoder.ln"})


def read(
    config: Mapping[str, Any],
    architecture: str,
    *,
    post_layer_norm: bool,
    activations: Iterable[str] = ("gelu",),
) -> dict[str, Any]:
    """Return the description of either BERT, read from its config.json."""
    fields = Fields(config)
    activation = fields.take("hidden_act", "gelu")
    if activation not in activations:
        raise ValueError(
            f"config.json has hidden_act={activation!r}, which mcore cannot represent here: "
            f"only {', '.join(activations)}."
        )
    fields.must_be("position_embedding_type", "absolute")
    fields.must_be("tie_word_embeddings", True)
    fields.must_be("is_decoder", False)
    for name in ("classifier_dropout", "gradient_checkpointing"):
        fields.maybe(name)
    ours = read_pairs(fields, PAIRS)
    # The class that wrote the folder determines its heads.
    names = config.get("architectures") or [f"{architecture}ForPreTraining"]
    heads = {
        f"{architecture}ForPreTraining": ["pooler", "lm", "binary"],
        f"{architecture}ForMaskedLM": ["lm"],
        f"{architecture}Model": ["pooler"],
    }
    if names[0] not in heads:
        raise ValueError(f"config.json has architectures={names}: use one of {list(heads)}.")
    ours["bert_heads"] = heads[names[0]]
    ours["post_layer_norm"] = post_layer_norm
    if flag := ACTIVATIONS[activation]:
        ours[flag] = True
    return fields.described(ours, family="bert")


def as_stored(description: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a description with the heads that the tensors of the folder show."""
    prefix = "bert." if any(name.startswith("bert.") for name in names) else ""
    marks = {
        "pooler": f"{prefix}pooler.dense.weight",
        "lm": "cls.predictions.transform.dense.weight",
        "binary": "cls.seq_relationship.weight",
    }
    config = description["config"]
    marked = [n for n in config["bert_heads"] if config["bert_heads"] != ["pooler"]]
    heads = [n for n, mark in marks.items() if n in marked or mark in names]
    return {**description, "config": {**config, "bert_heads": heads}}


def write(
    description: Mapping[str, Any],
    model_type: str,
    architecture: str,
    *,
    post_layer_norm: bool,
    position_offset: int = 0,
    activations: Iterable[str] = ("gelu",),
) -> dict[str, Any]:
    """Return the config.json of either BERT for a description.

    Raises:
        ValueError: if the description is of another family, or has norms in other places.
    """
    require_family(description, "bert")
    config = settings(description, BertConfig)
    heads = config.num_attention_heads
    form = {"post_layer_norm": post_layer_norm, "position_embedding_offset": position_offset}
    form |= {
        flag: False for act, flag in ACTIVATIONS.items() if flag and act not in activations
    }
    for name, wanted in {**form, **_IMPLIED}.items():
        require_value(name, getattr(config, name), wanted)
    derived = {"num_query_groups": heads, "kv_channels": config.hidden_size // heads}
    for name, wanted in derived.items():
        require_value(name, getattr(config, name) or wanted, wanted)
    heads = description["config"]["bert_heads"]
    ending = "ForPreTraining" if "binary" in heads else "ForMaskedLM"
    last = ending if "lm" in heads else "Model"
    return {
        "model_type": model_type,
        "architectures": [f"{architecture}{last}"],
        "vocab_size": description["vocab_size"],
        **write_pairs(description, PAIRS),
        "intermediate_size": ffn_size(config),
        "hidden_act": next(
            (act for act, flag in ACTIVATIONS.items() if getattr(config, flag, False)), "gelu"
        ),
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    }


def list_weights(
    description: Mapping[str, Any], layer: Mapping[str, str], once: Mapping[str, str]
) -> Table:
    """Return the rules of either BERT's weights.

    Args:
        description: description of the model.
        layer: our names of a layer's linears and norms, and theirs.
        once: our names of norms outside the layers, and theirs.
    """
    heads = description["config"]["bert_heads"]
    # A folder of the bare model has no prefix.
    bare = "lm" not in heads
    at = "" if bare else "bert."
    rules = [
        Rule("embedding.weight", f"{at}embeddings.word_embeddings.weight"),
        Rule("position_embedding.weight", f"{at}embeddings.position_embeddings.weight"),
        Rule("tokentype_embedding.weight", f"{at}embeddings.token_type_embeddings.weight"),
    ]
    stack = f"{at}encoder.layer.*."
    linears = {f"blocks.*.{ours}": stack + name for ours, name in layer.items()}
    ends = {ours: name.replace("bert.", at, 1) for ours, name in once.items()}
    if "pooler" in heads:
        ends["pooler.dense"] = f"{at}pooler.dense"
    if "lm" in heads:
        ends["lm_head.dense"] = "cls.predictions.transform.dense"
        ends["lm_head.norm"] = "cls.predictions.transform.LayerNorm"
    if "binary" in heads:
        ends["binary_head"] = "cls.seq_relationship"
    for ours, name in (*linears.items(), *ends.items()):
        rules += [Rule(f"{ours}.{kind}", f"{name}.{kind}") for kind in ("weight", "bias")]
    copies = {}
    if "lm" in heads:
        rules.append(Rule("lm_head.bias", "cls.predictions.bias"))
        copies = {
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        }
    positions = (f"{at}embeddings.position_ids",)
    count = description["config"]["num_layers"]
    return Table(tuple(rules), count, droppable=positions, copies=copies)


def shapes(description: Mapping[str, Any]) -> Shapes:
    """Return the shapes of the weights; see ``common.shapes``."""
    config = settings(description, BertConfig)
    return shapes_within_layer(bert_shapes(config, description["vocab_size"]))
