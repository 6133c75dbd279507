"""Families that differ from another family in a few fields, names of norms or fused weights."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mcore_ckpt.families.common.decoder import (
    ANGLES,
    ATTENTION_BIAS,
    FIXED_EPSILON,
    OWN_HEADS,
    Decoder,
    Description,
    FieldRule,
    Theirs,
    around,
    attention_rules,
    decoder_table,
    pair,
    tied_copies,
)
from mcore_ckpt.families.common.fields import Fields, require, setting, settings
from mcore_ckpt.families.common.layer_types import FULL, LOCAL, ROTATED_WINDOWS, windows
from mcore_ckpt.families.dense import gemma2, llama, mistral, olmo2
from mcore_ckpt.mapping.rules import Rule, Table, swapped_rows
from mcore_models.logical_tensors import head_dim

_GLM4_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def _fused_table(description: Description, norms: Mapping[str, str] | None = None) -> Table:
    """Return the rules of a Llama with gate and up-projection in one matrix."""
    gate_up = ("blocks.*.mlp.fc1.gate.weight", "blocks.*.mlp.fc1.up.weight")
    at = "model.layers.*.mlp."
    mlp = [
        Rule(gate_up, f"{at}gate_up_proj.weight"),
        Rule("blocks.*.mlp.fc2.weight", f"{at}down_proj.weight"),
    ]
    return decoder_table(description, mlp, norms)


_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _normalize_cwm(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(config.get("num_hidden_layers", 64))
    types = [LOCAL if layer % 4 else FULL for layer in layers]
    return {
        **config,
        "layer_types": config.get("layer_types") or types,
        "rope_parameters": config.get("rope_parameters") or _CWM_ROPE,
    }


def _normalize_gemma(config: Mapping[str, Any]) -> dict[str, Any]:
    # The first release names the tanh approximation "gelu".
    is_old = config.get("hidden_act") == "gelu"
    return {**config, **({"hidden_act": "gelu_pytorch_tanh"} if is_old else {})}


_BETA = "llama_4_scaling_beta"


def _with_temperature(config: Mapping[str, Any]) -> dict[str, Any]:
    # The factor on queries is one of the rotary parameters; the limit is repeated there.
    rope = dict(config.get("rope_parameters") or {})
    beta, _ = rope.pop(_BETA, None), rope.pop("max_position_embeddings", None)
    return {**config, "rope_parameters": rope, _BETA: beta}


def _read_temperature(fields: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    beta, span = fields.maybe(_BETA), ours.get("original_max_position_embeddings")
    if beta is None or not span:
        raise ValueError(
            "config.json lacks llama_4_scaling_beta or original_max_position_embeddings in "
            "rope_parameters, without which transformers runs no model of this family."
        )
    return {
        "attention_temperature_span": span,
        "attention_temperature_scale": float(beta),
        "attention_temperature_layers": "all",
    }


def _write_temperature(description: Description, theirs: Theirs) -> Theirs:
    span = setting(description, "attention_temperature_span")
    require(description, attention_temperature_layers="all")
    require(description, original_max_position_embeddings=span, rope_type="yarn")
    del theirs["rope_scaling"]
    beta = setting(description, "attention_temperature_scale")
    return {"rope_parameters": {**theirs["rope_parameters"], _BETA: beta}}


_TEMPERATURE = FieldRule(
    covers=tuple(f"attention_temperature_{what}" for what in ("span", "scale", "layers")),
    read=_read_temperature,
    write=_write_temperature,
)


_VAULTGEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
}


def _same_biases(config: Mapping[str, Any]) -> Mapping[str, Any]:
    qkv, others = (bool(config.get(f"{part}_bias")) for part in ("attention", "mlp"))
    if qkv != others:
        raise ValueError(
            f"config.json has qkv_bias={qkv} and bias={others}: of an InternLM3, mcore and "
            "transformers have biases in all linears or in none."
        )
    return config


def _nanochat_table(description: Description) -> Table:
    """Return the rules of weights whose heads rotate in the other direction: swapped halves."""
    order = swapped_rows(head_dim(settings(description)))
    rules = [
        replace(rule, head_rows=order)
        if rule.theirs.endswith(("q_proj.weight", "k_proj.weight"))
        else rule
        for rule in attention_rules(description)
    ]
    rules += [
        Rule(f"blocks.*.mlp.{name}.weight", f"model.layers.*.mlp.{name}.weight")
        for name in ("fc1", "fc2")
    ]
    return Table(
        around(description, rules),
        setting(description, "num_layers"),
        droppable=ANGLES,
        copies=tied_copies(description),
    )


_GLM = Decoder(
    model_type="glm",
    architecture="GlmForCausalLM",
    fixed={"rotary_interleaved": True},
    absent={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131072,
    },
    parts=(pair("add_qkv_bias", "attention_bias", True),),
    partial=0.5,
    weights=_fused_table,
)

_ALL = (
    replace(
        llama.FAMILY,
        model_type="arcee",
        architecture="ArceeForCausalLM",
        fixed={"swiglu": False, "squared_relu": True},
        absent={"rms_norm_eps": 1e-5},
        parts=llama.FAMILY.parts[:1],
        activation=("hidden_act", "relu2"),
    ),
    Decoder(
        model_type="cwm",
        architecture="CwmForCausalLM",
        absent={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 8192,
        },
        only={"mlp_bias": False},
        parts=(windows(0),),
        theta=1e6,
        normalize=_normalize_cwm,
    ),
    Decoder(
        model_type="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        fixed={"rotary_interleaved": True},
        absent={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        parts=(pair("add_bias_linear", "use_bias", False),),
        theta=5e5,
    ),
    replace(
        olmo2.FAMILY,
        model_type="exaone4",
        architecture="Exaone4ForCausalLM",
        fixed={"norm_placement": "output", "qk_layernorm": True},
        absent={**olmo2.FAMILY.absent, "num_key_value_heads": 32, "sliding_window": 4096},
        parts=(windows(4, unused=True), ROTATED_WINDOWS),
    ),
    replace(
        gemma2.FAMILY,
        model_type="gemma",
        architecture="GemmaForCausalLM",
        fixed={**gemma2.FAMILY.fixed, "norm_placement": "pre"},
        absent={
            name: gemma2.FAMILY.absent[name]
            for name in ("head_dim", "max_position_embeddings", "tie_word_embeddings")
        },
        unread=("hidden_activation",),
        parts=(gemma2.ATTENTION_BIAS, gemma2.EMBEDDING),
        activation=("hidden_act", "gelu_pytorch_tanh"),
        normalize=_normalize_gemma,
        weights=decoder_table,
    ),
    _GLM,
    replace(
        _GLM,
        model_type="glm4",
        architecture="Glm4ForCausalLM",
        fixed={**_GLM.fixed, "norm_placement": "sandwich"},
        weights=partial(_fused_table, norms=_GLM4_NORMS),
    ),
    Decoder(
        model_type="helium",
        architecture="HeliumForCausalLM",
        fixed={"rotary_interleaved": True},
        absent={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8},
        only={"attention_bias": False, "mlp_bias": False},
        theta=1e5,
    ),
    # transformers builds a Llama for this type, and saves it as a Llama.
    replace(
        llama.FAMILY,
        model_type="internlm3",
        absent={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
        field_names={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
        # Biases in attention alone are refused.
        parts=(
            replace(llama.FAMILY.parts[0], covers=("add_bias_linear", "add_qkv_bias")),
            llama.FAMILY.parts[1],
        ),
        normalize=_same_biases,
    ),
    replace(
        mistral.FAMILY,
        model_type="ministral",
        architecture="MinistralForCausalLM",
        parts=(windows(0),),
    ),
    replace(
        mistral.FAMILY,
        model_type="ministral3",
        architecture="Ministral3ForCausalLM",
        absent={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        parts=(*mistral.FAMILY.parts, _TEMPERATURE),
        theta=1e6,
        normalize=_with_temperature,
    ),
    Decoder(
        model_type="nanochat",
        architecture="NanoChatForCausalLM",
        fixed={
            "norm_weight": False,
            "embedding_layernorm": True,
            "qk_l2_norm": True,
            "swiglu": False,
            "squared_relu": True,
        },
        absent={"max_position_embeddings": 2048, "final_logit_softcapping": 15.0},
        only={"attention_bias": False},
        parts=(
            OWN_HEADS,
            pair("final_logit_softcapping", "final_logit_softcapping", 0.0, float),
        ),
        activation=("hidden_act", "relu2"),
        weights=_nanochat_table,
    ),
    Decoder(
        model_type="olmo",
        architecture="OlmoForCausalLM",
        fixed={"normalization": "LayerNorm", "norm_weight": False},
        absent={"max_position_embeddings": 2048, "layer_norm_eps": 1e-5},
        refused={"clip_qkv": None},
        parts=(ATTENTION_BIAS, OWN_HEADS, FIXED_EPSILON),
        epsilon="layer_norm_eps",
    ),
    Decoder(
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        absent={"num_key_value_heads": 8, "head_dim": 128, "attention_dropout": 0.1},
        only={"attention_out_bias": False, "mlp_bias": False},
        parts=(
            pair("add_qkv_bias", "attention_bias", True),
            pair("hidden_dropout", "residual_dropout", 0.1),
        ),
    ),
    replace(
        gemma2.FAMILY,
        model_type="vaultgemma",
        architecture="VaultGemmaForCausalLM",
        fixed={**gemma2.FAMILY.fixed, "norm_placement": "pre"},
        weights=partial(decoder_table, norms=_VAULTGEMMA_NORMS),
    ),
)

FAMILIES = {family.model_type: family for family in _ALL}
"""Families by ``model_type``."""
