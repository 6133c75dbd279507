"""ModernBERT: rotated heads, windows in most layers, gated feed-forward layers, few biases.

The norm of the embeddings is also the norm before the attention of the first layer.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.fields import (
    REQUIRED,
    Fields,
    read_pairs,
    require_family,
    require_value,
    setting,
    settings,
    write_pairs,
)
from mcore_ckpt.families.common.layer_types import FULL, LOCAL, read_skipped, write_pattern
from mcore_ckpt.families.encoders import megatron_bert
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.encoder_config import BertConfig
from mcore_models.logical_tensors import ffn_size, norm_kinds

ARCHITECTURE = "ModernBert"
_THETAS = {FULL: 160000.0, LOCAL: 10000.0}
_OLD_THETAS = {FULL: "global_rope_theta", LOCAL: "local_rope_theta"}
_PAIRS = (
    ("num_layers", "num_hidden_layers", REQUIRED),
    ("hidden_size", "hidden_size", REQUIRED),
    ("num_attention_heads", "num_attention_heads", REQUIRED),
    ("ffn_hidden_size", "intermediate_size", REQUIRED),
    ("max_position_embeddings", "max_position_embeddings", 8192),
    ("norm_epsilon", "norm_eps", 1e-5),
    ("norm_bias", "norm_bias", False),
    ("init_method_std", "initializer_range", 0.02),
)
_ONLY = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "classifier_bias"), False),
    **dict.fromkeys(("attention_dropout", "embedding_dropout", "mlp_dropout"), 0.0),
    **dict.fromkeys(("hidden_activation", "classifier_activation"), "gelu"),
    **dict.fromkeys(("decoder_bias", "tie_word_embeddings"), True),
}
"""Their fields with one allowed value, which is written."""
carries = (
    *("initializer_cutoff_factor", "classifier_pooling", "classifier_dropout", "cls_token_id"),
    *("deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index"),
    *("layer_norm_eps", "gradient_checkpointing", "position_embedding_type"),
    *("reference_compile", "repad_logits_with_grad"),
)
"""Their fields that are copied without being read."""
_FIXED = {
    "position_embedding_type": "rope",
    "swiglu": False,
    "exact_geglu": True,
    "add_bias_linear": False,
    "embedding_layernorm": True,
    "num_tokentypes": 0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bert_heads": ["lm"],
}
"""Our fields with the same value in all models, which differs from our default."""


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description; see ``families``."""
    names = config.get("architectures") or [f"{ARCHITECTURE}ForMaskedLM"]
    if names != [f"{ARCHITECTURE}ForMaskedLM"]:
        raise ValueError(
            f"config.json has architectures={names}: only {ARCHITECTURE}ForMaskedLM, the model "
            "with a head for masked tokens, can be converted."
        )
    fields = Fields(config, keep=("layer_types",))
    for name, value in _ONLY.items():
        fields.must_be(name, value)
    for name in carries:
        fields.maybe(name)
    ours: dict[str, Any] = {**read_pairs(fields, _PAIRS), **_FIXED}
    every = fields.take("global_attn_every_n_layers", 3)
    layers = range(ours["num_layers"])
    default = [LOCAL if layer % every else FULL for layer in layers]
    types = fields.maybe("layer_types") or default
    if unknown := sorted(set(types) - {LOCAL, FULL}):
        raise ValueError(f"config.json has layer_types {unknown}: only {LOCAL} and {FULL}.")
    thetas = _read_thetas(fields)
    ours["rotary_base"] = thetas[FULL]
    width = fields.take("local_attention", 128) // 2
    if LOCAL in types:
        skipped = [kind == FULL for kind in types]
        ours["window_size"] = [width, width]
        ours["window_attn_skip_freq"] = write_pattern(skipped, ones=False)
        ours["rotary_base_local"] = thetas[LOCAL]
    return fields.described(ours, family="bert")


def _read_thetas(fields: Fields) -> dict[str, float]:
    thetas = {kind: fields.maybe(name) for kind, name in _OLD_THETAS.items()}
    tables = fields.maybe("rope_parameters") or {}
    if fields.maybe("rope_scaling") or tables.keys() - _THETAS.keys():
        raise ValueError(
            "config.json has scaled rotary positions, which are not supported: give only a "
            f"base in rope_parameters[{FULL!r}] and in rope_parameters[{LOCAL!r}]."
        )
    for kind, default in _THETAS.items():
        table = Fields(tables.get(kind) or {})
        table.must_be("rope_type", "default")
        thetas[kind] = float(table.maybe("rope_theta") or thetas[kind] or default)
        table.finish()
    return thetas


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json; see ``families``."""
    require_family(description, "bert")
    config = settings(description, BertConfig)
    derived = {
        "num_query_groups": config.num_attention_heads,
        "kv_channels": config.hidden_size // config.num_attention_heads,
    }
    plain = ("rotary_percent", "rope_type", "use_rope_scaling", "rotary_interleaved")
    plain += ("rotary_seq_len_interpolation_factor", "rope_skip_freq", "post_layer_norm")
    plain += ("normalization", "apply_layernorm_1p", "norm_weight", "add_qkv_bias")
    plain += ("add_attention_bias",)
    defaults = settings({"config": {}}, BertConfig)
    wanted = {name: getattr(defaults, name) for name in plain} | _FIXED
    for name, value in wanted.items():
        current = getattr(config, name)
        require_value(name, list(current) if isinstance(current, tuple) else current, value)
    for name, value in derived.items():
        require_value(name, getattr(config, name) or value, value)
    window, after = setting(description, "window_size")
    skipped = read_skipped(description, "window_attn_skip_freq", ones=False)
    types = [FULL if full or window < 0 else LOCAL for full in skipped]
    if window >= 0:
        require_value("window_size", [window, after], [window, window])
    thetas = {FULL: config.rotary_base, LOCAL: config.rotary_base_local or config.rotary_base}
    return {
        "model_type": "modernbert",
        "architectures": [f"{ARCHITECTURE}ForMaskedLM"],
        "vocab_size": description["vocab_size"],
        **write_pairs(description, _PAIRS),
        **_ONLY,
        "norm_eps": config.norm_epsilon,
        "norm_bias": config.norm_bias,
        "intermediate_size": ffn_size(config),
        "layer_types": types,
        "local_attention": 2 * max(window, 0),
        **{name: thetas[kind] for kind, name in _OLD_THETAS.items()},
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in thetas.items()
        },
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    count, at = setting(description, "num_layers"), "model.layers.*."
    norms = {"blocks.*.mlp_norm": f"{at}mlp_norm", "embedding_norm": "model.embeddings.norm"}
    norms |= {"final_norm": "model.final_norm", "lm_head.norm": "head.norm"}
    kinds = norm_kinds(settings(description, BertConfig))
    rules = [
        Rule("embedding.weight", "model.embeddings.tok_embeddings.weight"),
        *(Rule(f"{ours}.{k}", f"{name}.{k}") for ours, name in norms.items() for k in kinds),
        *(
            Rule(
                f"blocks.*.attention_norm.{kind}",
                f"{at}attn_norm.{kind}",
                layers=tuple(range(1, count)),
            )
            for kind in kinds
        ),
        Rule(
            tuple(f"blocks.*.attention.qkv.{part}.weight" for part in "qkv"),
            f"{at}attn.Wqkv.weight",
        ),
        Rule("blocks.*.attention.proj.weight", f"{at}attn.Wo.weight"),
        Rule(
            ("blocks.*.mlp.fc1.gate.weight", "blocks.*.mlp.fc1.up.weight"),
            f"{at}mlp.Wi.weight",
        ),
        Rule("blocks.*.mlp.fc2.weight", f"{at}mlp.Wo.weight"),
        Rule("lm_head.dense.weight", "head.dense.weight"),
        Rule("lm_head.bias", "decoder.bias"),
    ]
    copies = {"decoder.weight": "model.embeddings.tok_embeddings.weight"}
    return Table(tuple(rules), count, copies=copies)


shapes = megatron_bert.shapes
