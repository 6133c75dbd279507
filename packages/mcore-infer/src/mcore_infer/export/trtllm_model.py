"""Builds the ``config.json`` of a TensorRT-LLM checkpoint, and checks model and ranks.

Every field is written, because releases of TensorRT-LLM differ in their defaults. A model that
the format has no layout for is refused with a message that names the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.families import find_family
from mcore_ckpt.families.common.fields import (
    described_expert_size,
    expert_layers,
    expert_setting,
    setting,
    settings,
)
from mcore_ckpt.families.common.rope import rope_scaling
from mcore_models.logical_tensors import (
    ffn_size,
    has_attention_bias,
    has_qkv_bias,
    head_dim,
    is_gated,
    num_kv_heads,
)

DTYPE_WORDS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""The format's dtypes, by safetensors' names."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "LlamaForCausalLM",
    "mixtral": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt2": "GPTForCausalLM",
    "nemotron": "GPTForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""TensorRT-LLM's class of each supported family."""

INSTEAD = (
    "Use a Hugging Face folder instead (mcore-ckpt convert or mcore-infer quantize write one): "
    "TensorRT-LLM from 1.0 on, vLLM and SGLang load it."
)
"""Advice in errors for models that the format cannot express."""


@dataclass(frozen=True, slots=True)
class RankSizes:
    """Sizes that determine the tensors of a rank."""

    num_layers: int
    """Layers of the model."""
    num_heads: int
    """Query heads, N."""
    num_kv_heads: int
    """Key/value heads, G."""
    head_dim: int
    """Channels of a head, H."""
    hidden_size: int
    """D."""
    ffn_size: int
    """Width inside a dense feed-forward layer, or one expert, F."""
    vocab_size: int
    """True number of tokens, V."""
    num_experts: int
    """Experts of a layer, E; 0: dense."""
    is_gated: bool
    """Whether feed-forward layers multiply two projections."""
    shift: float
    """Offset to add to stored gains of norms."""


@dataclass(frozen=True, slots=True)
class RankGrid:
    """Numbers of ranks of a checkpoint."""

    tp: int = 1
    """Ranks that split each matrix."""
    pp: int = 1
    """Pipeline stages."""


def read_sizes(description: Mapping[str, Any]) -> RankSizes:
    """Return the sizes of a model."""
    config = settings(description)
    experts = expert_setting(description, "num_experts")
    return RankSizes(
        num_layers=setting(description, "num_layers"),
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads(config),
        head_dim=head_dim(config),
        hidden_size=config.hidden_size,
        ffn_size=described_expert_size(description) if experts else ffn_size(config),
        vocab_size=description["vocab_size"],
        num_experts=experts,
        is_gated=is_gated(config),
        shift=float(config.apply_layernorm_1p),
    )


def check_model(model_type: str, description: Mapping[str, Any]) -> None:
    """Raise ValueError for a model that the format cannot express."""
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"--format trtllm has no layout for {model_type}: it supports "
            f"{', '.join(ARCHITECTURES)}. {INSTEAD}"
        )
    find_family(model_type).to_theirs(
        dict(description)
    )  # raises for settings it cannot express
    kind = setting(description, "rope_type")
    if kind != "rope":
        raise ValueError(f"--format trtllm cannot express --rope-type {kind}. {INSTEAD}")
    if expert_setting(description, "num_experts") and not all(expert_layers(description)):
        raise ValueError(
            "--format trtllm supports experts in every layer or in none, not --moe-layer-freq "
            f"{expert_setting(description, 'moe_layer_freq')}. {INSTEAD}"
        )
    config = settings(description)
    if model_type in ("qwen3", "qwen3_moe", "nemotron") and has_attention_bias(config):
        raise ValueError(
            f"--format trtllm cannot express --add-attention-bias of {model_type}. {INSTEAD}"
        )


def check_grid(sizes: RankSizes, grid: RankGrid) -> None:
    """Raise ValueError for a number of ranks that the model cannot be split over."""
    if grid.tp < 1 or grid.pp < 1:
        raise ValueError(
            f"--tensor-parallel-size {grid.tp} and --pipeline-parallel-size {grid.pp} must be "
            "1 or more."
        )
    if sizes.num_layers % grid.pp:
        raise ValueError(
            f"{sizes.num_layers} layers cannot be split over --pipeline-parallel-size "
            f"{grid.pp}: use a number that divides them."
        )
    for count, what in (
        (sizes.num_heads, "query heads"),
        (sizes.ffn_size, "channels of the feed-forward layers"),
    ):
        if count % grid.tp:
            raise ValueError(
                f"{count} {what} cannot be split over --tensor-parallel-size {grid.tp}: use a "
                "number that divides them."
            )
    heads = sizes.num_kv_heads
    if heads % grid.tp and grid.tp % heads:
        raise ValueError(
            f"{heads} key/value heads can be neither split over nor repeated for "
            f"--tensor-parallel-size {grid.tp}: use a divisor or a multiple of {heads}."
        )


def build_config(
    model_type: str,
    description: Mapping[str, Any],
    dtype: str,
    grid: RankGrid,
    quantization: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the fields of config.json for a model and grid that passed the checks."""
    sizes, config = read_sizes(description), settings(description)
    has_rope = config.position_embedding_type == "rope"
    scaling = rope_scaling(description)
    fields = {
        "architecture": ARCHITECTURES[model_type],
        "dtype": DTYPE_WORDS[dtype],
        "logits_dtype": "float32",
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": config.max_position_embeddings or None,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_size": sizes.head_dim,
        "hidden_act": _activation(description, sizes),
        "intermediate_size": ffn_size(config),
        "norm_epsilon": config.norm_epsilon,
        "position_embedding_type": "rope_gpt_neox" if has_rope else "learned_absolute",
        "rotary_base": config.rotary_base,
        # Older releases read "type", newer ones "rope_type".
        "rotary_scaling": {**scaling, "type": scaling["rope_type"]} if scaling else None,
        "rotary_pct": config.rotary_percent,
        "qk_layernorm": config.qk_layernorm,
        "attn_bias": has_qkv_bias(config),
        "mlp_bias": config.add_bias_linear,
        "bias": config.add_bias_linear,
        "use_parallel_embedding": shares_vocabulary(model_type, grid),
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "mapping": {
            "world_size": grid.tp * grid.pp,
            "tp_size": grid.tp,
            "pp_size": grid.pp,
            "cp_size": 1,
            "moe_tp_size": grid.tp,
            "moe_ep_size": 1,
            "gpus_per_node": 8,
        },
        "quantization": dict(quantization),
        "moe": {
            "num_experts": sizes.num_experts,
            "top_k": expert_setting(description, "moe_router_topk") if sizes.num_experts else 0,
            "normalization_mode": int(
                not expert_setting(description, "moe_router_pre_softmax")
            ),
        },
    }
    if model_type.startswith("qwen"):
        fields |= {"qwen_type": model_type, "moe_intermediate_size": sizes.ffn_size}
    if model_type.startswith("gemma"):
        fields |= _gemma_fields(model_type, description)
    return fields


def shares_vocabulary(model_type: str, grid: RankGrid) -> bool:
    """Whether tensor ranks split the embedding, as the engine does for Gemma only."""
    return model_type.startswith("gemma") and grid.tp > 1


def notes_on(description: Mapping[str, Any]) -> list[str]:
    """Return settings that the format cannot hold and the user must give to the engine."""
    window = setting(description, "window_size")[0]
    if window < 0:
        return []
    pattern = setting(description, "window_attn_skip_freq")
    where = "" if pattern == "0" else f" in layers by --window-attn-skip-freq {pattern}"
    note = (
        f"the attention window is {window + 1} tokens{where}: the format has no field for it, "
        "set the engine's max_attention_window."
    )
    return [note]


def _activation(description: Mapping[str, Any], sizes: RankSizes) -> str:
    config = settings(description)
    if config.swiglu:
        return "swiglu" if sizes.num_experts else "silu"
    if config.squared_relu:
        return "squared-relu"
    return "gelu_pytorch_tanh" if config.geglu else "gelu_new"


def _gemma_fields(model_type: str, description: Mapping[str, Any]) -> dict[str, Any]:
    if model_type == "gemma":
        return {"inter_layernorms": False}
    theirs = find_family(model_type).to_theirs(dict(description))
    names: Sequence[str] = ("query_pre_attn_scalar", "final_logit_softcapping")
    fields = {name: theirs[name] for name in names} | {"inter_layernorms": True}
    if model_type == "gemma2":
        return fields | {"attn_logit_softcapping": theirs["attn_logit_softcapping"]}
    if theirs.get("attn_logit_softcapping"):
        raise ValueError(
            f"--format trtllm cannot express capped attention logits of Gemma 3. {INSTEAD}"
        )
    return fields | {
        "_sliding_window_pattern": _window_pattern(theirs["layer_types"]),
        "rope_local_base_freq": setting(description, "rotary_base_local"),
        "sliding_window": theirs["sliding_window"],
    }


def _window_pattern(layer_types: Sequence[str]) -> int:
    """Return n, where every n-th layer and no other has full attention.

    Raises:
        ValueError: if full attention has no such period.
    """
    full = [number for number, kind in enumerate(layer_types, 1) if kind == "full_attention"]
    every = full[0] if full else len(layer_types) + 1
    if full != list(range(every, len(layer_types) + 1, every)):
        raise ValueError(
            "--format trtllm needs full attention in every n-th layer, and this model has it "
            f"in layers {full}. {INSTEAD}"
        )
    return every
