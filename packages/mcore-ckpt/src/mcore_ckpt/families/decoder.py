"""What the Llama-like families share: their config.json and their rules.

Reads the old spellings (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and the new ones
(``rope_parameters``, ``dtype``); writes both where they do not contradict, so that every
transformers since 4.40 reads a folder.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from mcore_ckpt.rules import Rule

CARRIED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "use_cache",
    "keys_to_ignore_at_inference",
    "task_specific_params",
)
"""Fields that say nothing about weights or logits and are carried along as they are."""

_SILENT = {
    *CARRIED,
    *("_name_or_path", "architectures", "auto_map", "chunk_size_feed_forward", "dtype"),
    *("id2label", "is_encoder_decoder", "label2id", "model_type", "output_attentions"),
    *("output_hidden_states", "problem_type", "return_dict", "torch_dtype", "use_bfloat16"),
    *("transformers_version", "pretraining_tp", "rope_interleaved", "output_router_logits"),
    *("quantization_config", "layer_types", "max_window_layers"),
}

_DEFAULTS: dict[str, Any] = {
    "num_query_groups": 0,
    "kv_channels": 0,
    "max_position_embeddings": 0,
    "position_embedding_type": "rope",
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": 1.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rope_scaling_low_freq_factor": 1.0,
    "rope_scaling_high_freq_factor": 4.0,
    "rope_scaling_original_max_position_embeddings": 8192,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "apply_layernorm_1p": False,
    "qk_layernorm": False,
    "swiglu": True,
    "quick_geglu": False,
    "squared_relu": False,
    "openai_gelu": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "window_size": (-1, 0),
    "window_attn_skip_freq": 0,
    "init_method_std": 0.02,
}
"""TransformerConfig's defaults; a test holds them equal to mcore-models'."""

_LONG = 131072


class Fields:
    """A config.json that is read field by field and must be used up."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Refuse what no family can represent.

        Raises:
            ValueError: for quantized weights.
        """
        if config.get("quantization_config"):
            raise ValueError(
                "config.json has quantization_config: quantized weights are not converted. "
                "Dequantize the model with its own tool first."
            )
        self._left = {name: v for name, v in config.items() if name not in _SILENT}

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field, which then counts as used; null counts as absent."""
        value = self._left.pop(name, None)
        if value is None and default is None:
            raise ValueError(f"config.json lacks {name}.")
        return default if value is None else value

    def must_be(self, name: str, *values: Any) -> None:
        """Use a field up that may only have certain values, or be absent.

        Raises:
            ValueError: with the field and its value.
        """
        value = self._left.pop(name, None)
        if value is not None and value not in values:
            allowed = " or ".join(repr(v) for v in values)
            raise ValueError(
                f"config.json has {name}={value!r}, which mcore cannot represent here: only "
                f"{allowed}."
            )

    def finish(self) -> None:
        """Refuse fields that nobody asked for.

        Raises:
            ValueError: naming them.
        """
        # False, null, 0 and empty lists switch off features that we do not have.
        unknown = sorted(name for name, value in self._left.items() if value)
        if unknown:
            raise ValueError(
                "config.json has fields that mcore does not know: "
                + ", ".join(f"{name}={self._left[name]!r}" for name in unknown)
            )


def setting(description: Mapping[str, Any], name: str) -> Any:
    """Return a TransformerConfig field of a description, its default where it is left out."""
    value = description["config"].get(name, _DEFAULTS.get(name))
    return tuple(value) if isinstance(value, list) else value


def require(description: Mapping[str, Any], **values: Any) -> None:
    """Refuse a description whose fields a family cannot say.

    Raises:
        ValueError: with the flag, its value and what it would have to be.
    """
    for name, wanted in values.items():
        value = setting(description, name)
        if value != wanted:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"it cannot say {flag} {value}: only {wanted}")


def read_common(fields: Fields) -> dict[str, Any]:
    """Read what all Llama-like families say alike: sizes, norms, ties, rotary positions."""
    fields.must_be("hidden_act", "silu")
    heads = fields.take("num_attention_heads")
    hidden = fields.take("hidden_size")
    ours: dict[str, Any] = {
        "num_layers": fields.take("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": fields.take("num_key_value_heads", heads),
        "kv_channels": fields.take("head_dim", hidden // heads),
        "ffn_hidden_size": fields.take("intermediate_size"),
        "max_position_embeddings": fields.take("max_position_embeddings", 0),
        "norm_epsilon": fields.take("rms_norm_eps", 1e-6),
        "attention_dropout": fields.take("attention_dropout", 0.0),
        "init_method_std": fields.take("initializer_range", 0.02),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", False),
    }
    return ours | _read_rope(fields)


def _read_rope(fields: Fields) -> dict[str, Any]:
    rope = Fields({**fields.take("rope_scaling", {}), **fields.take("rope_parameters", {})})
    ours = {"rotary_base": float(rope.take("rope_theta", fields.take("rope_theta", 10000.0)))}
    partial = fields.take("partial_rotary_factor", 1.0)
    ours["rotary_percent"] = rope.take("partial_rotary_factor", partial)
    kind = rope.take("rope_type", rope.take("type", "default"))
    if kind == "linear":
        ours["rotary_seq_len_interpolation_factor"] = float(rope.take("factor"))
    elif kind == "llama3":
        ours |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": float(rope.take("factor")),
            "rope_scaling_low_freq_factor": float(rope.take("low_freq_factor")),
            "rope_scaling_high_freq_factor": float(rope.take("high_freq_factor")),
            "rope_scaling_original_max_position_embeddings": rope.take(
                "original_max_position_embeddings"
            ),
        }
    elif kind != "default":
        raise ValueError(
            f"config.json has rope_type={kind!r}, which mcore cannot represent: only default, "
            "linear and llama3."
        )
    rope.finish()
    return ours


def write_common(description: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Write what all Llama-like families say alike.

    Raises:
        ValueError: for fields that none of them can say.
    """
    require(
        description,
        position_embedding_type="rope",
        rotary_interleaved=False,
        normalization="RMSNorm",
        apply_layernorm_1p=False,
        swiglu=True,
        hidden_dropout=0.0,
        window_attn_skip_freq=0,
    )
    heads = setting(description, "num_attention_heads")
    head_dim = setting(description, "kv_channels") or (
        setting(description, "hidden_size") // heads
    )
    theirs: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": description["vocab_size"],
        "hidden_size": setting(description, "hidden_size"),
        "intermediate_size": ffn_size(description),
        "num_hidden_layers": setting(description, "num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": setting(description, "num_query_groups") or heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        # Without a limit of ours: rotary models need none, transformers wants a number.
        "max_position_embeddings": setting(description, "max_position_embeddings") or _LONG,
        "initializer_range": setting(description, "init_method_std"),
        "rms_norm_eps": setting(description, "norm_epsilon"),
        "attention_dropout": setting(description, "attention_dropout"),
        "tie_word_embeddings": not setting(description, "untie_embeddings_and_output_weights"),
    }
    return theirs | _write_rope(description)


def _write_rope(description: Mapping[str, Any]) -> dict[str, Any]:
    base = setting(description, "rotary_base")
    scaling: dict[str, Any] = {}
    factor = setting(description, "rotary_seq_len_interpolation_factor")
    if setting(description, "use_rope_scaling"):
        if factor != 1.0:
            raise ValueError(
                "it cannot say --use-rope-scaling and "
                f"--rotary-seq-len-interpolation-factor {factor} together"
            )
        scaling = {"rope_type": "llama3"} | {
            name: setting(description, f"rope_scaling_{name}")
            for name in (
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            )
        }
    elif factor != 1.0:
        scaling = {"rope_type": "linear", "factor": factor}
    partial = setting(description, "rotary_percent")
    if partial != 1.0:
        raise ValueError(f"it cannot say --rotary-percent {partial}: only 1.0")
    parameters = {"rope_type": "default", **scaling, "rope_theta": base}
    return {
        "rope_theta": base,
        "rope_scaling": scaling or None,
        "rope_parameters": parameters,
    }


def ffn_size(description: Mapping[str, Any]) -> int:
    """Width of the feed-forward layer; the derivation is TransformerConfig's."""
    size = setting(description, "ffn_hidden_size")
    hidden = setting(description, "hidden_size")
    if size:
        return size
    return int(4 * hidden * 2 / 3) // 64 * 64 if setting(description, "swiglu") else 4 * hidden


def attention_rules(kinds: Iterable[str] = ("weight",), proj_bias: bool = False) -> list[Rule]:
    """Rules of a layer's norms and attention projections."""
    rules = [
        Rule("blocks.*.attention_norm.weight", "model.layers.*.input_layernorm.weight"),
    ]
    for kind in kinds:
        rules += [
            Rule(
                f"blocks.*.attention.qkv.{part}.{kind}",
                f"model.layers.*.self_attn.{part}_proj.{kind}",
            )
            for part in ("q", "k", "v")
        ]
    for kind in ("weight", "bias") if proj_bias else ("weight",):
        rules.append(
            Rule(f"blocks.*.attention.proj.{kind}", f"model.layers.*.self_attn.o_proj.{kind}")
        )
    rules.append(
        Rule("blocks.*.mlp_norm.weight", "model.layers.*.post_attention_layernorm.weight")
    )
    return rules


def qk_norm_rules() -> list[Rule]:
    """Rules of the norms on each head's queries and keys."""
    return [
        Rule(
            f"blocks.*.attention.{part}_norm.weight",
            f"model.layers.*.self_attn.{part}_norm.weight",
        )
        for part in ("q", "k")
    ]


def mlp_rules(
    kinds: Iterable[str] = ("weight",), layers: tuple[int, ...] | None = None
) -> list[Rule]:
    """Rules of a gated feed-forward layer."""
    return [
        Rule(
            f"blocks.*.mlp.{ours}.{kind}", f"model.layers.*.mlp.{theirs}.{kind}", layers=layers
        )
        for kind in kinds
        for ours, theirs in (
            ("fc1.gate", "gate_proj"),
            ("fc1.up", "up_proj"),
            ("fc2", "down_proj"),
        )
    ]


def around(description: Mapping[str, Any], layer_rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Put embedding, final norm and head around the rules of the layers."""
    head = [Rule("head.weight", "lm_head.weight")]
    return (
        Rule("embedding.weight", "model.embed_tokens.weight"),
        *layer_rules,
        Rule("final_norm.weight", "model.norm.weight"),
        *(head if setting(description, "untie_embeddings_and_output_weights") else []),
    )


def tied_copies(description: Mapping[str, Any]) -> dict[str, str]:
    """Name the head as a copy of the embedding where the two are tied."""
    if setting(description, "untie_embeddings_and_output_weights"):
        return {}
    return {"lm_head.weight": "model.embed_tokens.weight"}


ANGLES = ("*.rotary_emb.inv_freq",)
"""Tensors of old folders that are computed anew."""
