"""Reads fields of a config.json one by one; reads and checks fields of a description."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import SimpleNamespace
from typing import Any

from mcore_models.config import TransformerConfig
from mcore_models.logical_tensors import expert_size, moe_layers
from mcore_moe.config import MoEConfig


@cache
def default_values(config_type: type) -> Mapping[str, Any]:
    """Return the defaults of a config's fields, by name; required fields are left out."""
    return {
        field.name: field.default
        for field in fields(config_type)
        if field.default is not MISSING
    }


DEFAULTS = default_values(TransformerConfig)
"""Defaults of a decoder's fields."""

USUAL = (
    *("num_query_groups", "ffn_hidden_size", "kv_channels", "max_position_embeddings"),
    *("position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved"),
    *("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor"),
    *("rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"),
    "rope_scaling_original_max_position_embeddings",
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
    *("qk_pos_emb_head_dim", "v_head_dim", "normalization", "norm_epsilon"),
    *("apply_layernorm_1p", "qk_layernorm", "swiglu", "quick_geglu", "squared_relu"),
    *("openai_gelu", "add_bias_linear", "add_qkv_bias"),
    *("untie_embeddings_and_output_weights", "hidden_dropout", "attention_dropout"),
    *("window_size", "window_attn_skip_freq", "init_method_std"),
)
"""Fields that most families have and that Megatron's arguments contain."""

_TRAINING_ONLY = (
    *("make_vocab_size_divisible_by", "embedding_init_method_std", "mtp_loss_scaling_factor"),
    *("label_smoothing", "z_loss_coeff"),
)
"""Fields that change neither weights nor logits of a trained model."""

VARIANTS = {
    name: value for name, value in DEFAULTS.items() if name not in (*USUAL, *_TRAINING_ONLY)
}
"""Defaults of fields that few families have; other families refuse them by ``refuse_variants``.

A new field of the config is here until it is added to ``USUAL``.
"""

GENERATION_FIELDS = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "repetition_penalty", "encoder_repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "force_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens", "num_return_sequences", "output_scores"),
    "return_dict_in_generate",
)
"""Sampling options of ``generate``, which old folders have in config.json."""

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
    # State-space models: initialization, and a float32 stream under bfloat16 weights.
    *("rescale_prenorm_residual", "time_step_rank", "residual_in_fp32"),
    *GENERATION_FIELDS,
)
"""Fields that affect neither weights nor logits and are copied unchanged."""

_IGNORED = {
    *CARRIED,
    *("_name_or_path", "architectures", "auto_map", "chunk_size_feed_forward", "dtype"),
    *("id2label", "is_encoder_decoder", "label2id", "model_type", "output_attentions"),
    *("output_hidden_states", "problem_type", "return_dict", "torch_dtype", "use_bfloat16"),
    *("transformers_version", "pretraining_tp", "rope_interleaved", "output_router_logits"),
    *("quantization_config", "layer_types", "max_window_layers", "add_cross_attention"),
    *("cross_attention_hidden_size", "tie_encoder_decoder", "finetuning_task"),
    *("_attn_implementation_autoset", "_attn_implementation", "attn_implementation"),
    *("_commit_hash", "torchscript"),
}

_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
_INTEGERS = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size"),
    *("max_position_embeddings", "n_embd", "n_layer", "n_inner", "n_positions"),
    *("d_model", "d_kv", "d_ff", "num_layers"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
}
_NUMBERS = {
    *("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "initializer_range"),
    *("attention_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop", "rope_theta"),
    *("factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
    *("router_aux_loss_coef", "router_jitter_noise", "routed_scaling_factor"),
}
_POSITIVE = {"rope_theta", "factor", "low_freq_factor", "high_freq_factor"}
_SWITCHES = {
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob"),
    *("use_sliding_window", "use_conv_bias"),
}
_TABLES = {"rope_parameters", "rope_scaling", "quantization_config"}


class UnknownFieldsError(ValueError):
    """A config.json has fields that its family does not read.

    Attributes:
        names: names of these fields.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.names = tuple(sorted(fields))
        listed = ", ".join(f"{name}={fields[name]!r}" for name in self.names)
        super().__init__(
            f"config.json has unknown fields: {listed}. If they do not change what the model "
            "computes, --keep-unknown-config-fields copies them."
        )


class Fields:
    """A config.json read field by field; ``finish`` raises for fields that were not read."""

    def __init__(
        self,
        config: Mapping[str, Any],
        keep: Iterable[str] = (),
        absent: Mapping[str, Any] | None = None,
    ) -> None:
        """Check types of common fields; set ignored fields aside.

        Args:
            config: fields of the config.json.
            keep: fields that this family reads, though most families ignore them.
            absent: values for absent fields, if this family's differ from other families'; a
                field that is null is not absent.

        Raises:
            ValueError: if a field has an invalid value, or the quantization is not supported.
        """
        for name, value in config.items():
            if value is not None and (requirement := _unlike(name, value)):
                raise ValueError(f"config.json has {name}={value!r}: it must be {requirement}.")
        if config.get("quantization_config"):
            raise ValueError(
                "config.json has quantization_config, which mcore cannot represent here. "
                "Supported are fp8 in blocks or with a scale per tensor, MXFP4, bitsandbytes, "
                "GPTQ (4 and 8 bits), AWQ (4 bits, gemm), compressed-tensors, and modelopt's "
                "folders with any algorithm that quantize writes. Dequantize other folders "
                "with the tool that quantized them."
            )
        silent = _IGNORED - set(keep)
        complete = {**(absent or {}), **config}
        self._left = {name: v for name, v in complete.items() if name not in silent}

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field and count it as read; null counts as absent.

        Raises:
            ValueError: if the field is absent and has no default.
        """
        value = self._left.pop(name, None)
        if value is None and default is None:
            raise ValueError(f"config.json lacks {name}.")
        return default if value is None else value

    def maybe(self, name: str, absent: Any = None) -> Any:
        """Return a field, null included, or ``absent``; count it as read."""
        return self._left.pop(name, absent)

    def must_be(self, name: str, *values: Any) -> None:
        """Count a field as read; ValueError unless it is absent, null or one of the values."""
        value = self._left.pop(name, None)
        if value is not None and value not in values:
            allowed = " or ".join(repr(v) for v in values)
            raise ValueError(
                f"config.json has {name}={value!r}, which mcore cannot represent here: only "
                f"{allowed}."
            )

    def finish(self) -> None:
        """Raise UnknownFieldsError for fields that were not read and are not switched off."""
        # False, null, 0 and empty lists switch features off.
        if unknown := {name: value for name, value in self._left.items() if value}:
            raise UnknownFieldsError(unknown)

    def described(
        self, config: dict[str, Any], moe: dict[str, Any] | None = None, family: str = "gpt"
    ) -> dict[str, Any]:
        """Return the description with these fields; reads the vocabulary size and finishes.

        Raises:
            UnknownFieldsError: if fields were not read.
        """
        vocab_size = self.take("vocab_size")
        self.finish()
        return {"family": family, "vocab_size": vocab_size, "config": config, "moe": moe or {}}


def _unlike(name: str, value: Any) -> str:
    """Return the kind of value that a field requires; empty if the value is of that kind."""
    if name in _HEADS or name in _INTEGERS:
        minimum = 1 if name in _HEADS else 0
        is_valid = type(value) is int and value >= minimum
        return "" if is_valid else f"a whole number from {minimum}"
    if name in _NUMBERS:
        is_valid = type(value) in (int, float) and 0 <= value < float("inf")
        if name in _POSITIVE:
            return "" if is_valid and value else "a number above 0"
        return "" if is_valid else "a number from 0"
    if name in _SWITCHES:
        return "" if type(value) is bool else "true or false"
    return "an object" if name in _TABLES and not isinstance(value, Mapping) else ""


def setting(description: Mapping[str, Any], name: str) -> Any:
    """Return a TransformerConfig field of a description, or its default."""
    value = description["config"].get(name, DEFAULTS.get(name))
    return tuple(value) if isinstance(value, list) else value


def settings(description: Mapping[str, Any], config_type: type = TransformerConfig) -> Any:
    """Return the fields of a description's config as attributes, defaults included."""
    return SimpleNamespace(**{**default_values(config_type), **description["config"]})


def require(description: Mapping[str, Any], **values: Any) -> None:
    """Raise ValueError, naming flag and values, for fields that a family cannot express."""
    for name, wanted in values.items():
        require_value(name, setting(description, name), wanted)


def require_value(name: str, value: Any, wanted: Any) -> None:
    """Raise ValueError, naming flag and values, if a field has another value."""
    if value != wanted:
        flag = "--" + name.replace("_", "-")
        raise ValueError(f"it cannot express {flag} {value}: only {wanted}")


def refuse_variants(description: Mapping[str, Any], *covered: str) -> None:
    """Raise ValueError for fields of ``VARIANTS`` that a family does not have.

    Args:
        description: description of the model.
        covered: fields that the family has, or checks separately.
    """
    require(description, **{n: v for n, v in VARIANTS.items() if n not in covered})


REQUIRED = object()
"""Default of a field that must be present."""

Pairs = Iterable[tuple[str, str, Any]]
"""Our field, their field, and the value if it is absent or null; None remains None."""


@dataclass(frozen=True, slots=True)
class Nullable:
    """Default of a field whose null has a meaning, such as no cap."""

    absent: Any
    """Value of an absent field."""


def read_pairs(fields: Fields, pairs: Pairs) -> dict[str, Any]:
    """Return our fields for fields that differ in name only.

    Raises:
        ValueError: if a required field is absent.
    """
    ours = {}
    for our_name, their_name, default in pairs:
        if isinstance(default, Nullable):
            ours[our_name] = fields.maybe(their_name, default.absent)
            continue
        value = fields.take(their_name) if default is REQUIRED else fields.maybe(their_name)
        ours[our_name] = default if value is None else value
    return ours


def write_pairs(description: Mapping[str, Any], pairs: Pairs) -> dict[str, Any]:
    """Return their fields, inverse of ``read_pairs``; omits None, as null may mean more."""
    values = [
        (their_name, description["config"].get(our_name), kind)
        for our_name, their_name, kind in pairs
    ]
    return {
        their_name: value
        for their_name, value, kind in values
        if value is not None or isinstance(kind, Nullable)
    }


def require_family(description: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless a description is of this family."""
    if description.get("family") != name:
        raise ValueError(
            f"it cannot express a model of the family {description.get('family')!r}"
        )


_DEFAULTS = default_values(MoEConfig)

PLAIN_ROUTING = {
    name: _DEFAULTS[name]
    for name in (
        "moe_router_score_function",
        "moe_router_topk_scaling_factor",
        "moe_router_num_groups",
        "moe_router_enable_expert_bias",
        "moe_router_bias",
        "moe_router_norm_topk_prob",
        "moe_apply_probs_on_input",
    )
}
"""Routing of most families with experts: softmax over all experts."""

FULL_TOKENS = {
    name: _DEFAULTS[name] for name in ("moe_latent_size", "moe_expert_capacity_factor")
}
"""Fields common to all families: experts read tokens at full width and drop none."""


def expert_setting(description: Mapping[str, Any], name: str) -> Any:
    """Return a MoEConfig field of a description, or its default."""
    return description.get("moe", {}).get(name, _DEFAULTS[name])


def described_expert_size(description: Mapping[str, Any]) -> int:
    """Return F, the feed-forward width of one routed expert."""
    return expert_size(settings(description), expert_settings(description))


def expert_settings(description: Mapping[str, Any]) -> Any:
    """Return the MoEConfig fields of a description as attributes, defaults included."""
    return SimpleNamespace(**{**_DEFAULTS, **description.get("moe", {})})


def expert_layers(description: Mapping[str, Any]) -> list[int]:
    """Return for each layer whether it has experts (1) or not (0).

    Raises:
        ValueError: if ``moe_layer_freq`` is neither a number nor a list of 0 and 1 as long as
            the model is deep.
    """
    num_layers = setting(description, "num_layers")
    return [int(has) for has in moe_layers(expert_settings(description), num_layers)]


def sparse_and_dense(description: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of the layers with experts, and of those without."""
    pattern = expert_layers(description)
    sparse, dense = (
        tuple(layer for layer, has in enumerate(pattern) if has == wanted) for wanted in (1, 0)
    )
    return sparse, dense


def write_layers(has_experts: Iterable[int]) -> str:
    """Return ``moe_layer_freq`` for layers with (1) and without (0) experts."""
    pattern = [int(has) for has in has_experts]
    return "1" if all(pattern) else str(pattern).replace(" ", "")


def require_experts(description: Mapping[str, Any]) -> None:
    """Raise ValueError for a dense model and for routing that no family can express."""
    if not expert_setting(description, "num_experts"):
        raise ValueError("it cannot express a model without experts")
    require_routing(description, {**PLAIN_ROUTING, "moe_shared_expert_intermediate_size": 0})


def require_routing(description: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise ValueError for experts with field values that a family cannot express."""
    for name, wanted in values.items():
        require_value(name, expert_setting(description, name), wanted)


def no_experts(description: Mapping[str, Any]) -> None:
    """Raise ValueError for a model with experts."""
    experts = description.get("moe", {}).get("num_experts", 0)
    if experts:
        raise ValueError(f"it cannot express --num-experts {experts}: only 0")
