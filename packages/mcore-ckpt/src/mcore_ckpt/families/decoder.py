"""What the Llama-like families share: their config.json and their rules.

Reads the old spellings (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and the new ones
(``rope_parameters``, ``dtype``); writes both where they do not contradict, so that every
transformers since 4.40 reads a folder.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mcore_ckpt.families.fields import (
    DEFAULTS,
    Fields,
    require,
    require_family,
    setting,
    settings,
)
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_parallel.logical_tensors import ffn_size, head_dim, is_gated, num_kv_heads

NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
"""Norms before attention and before the feed-forward layer."""

ANGLES = ("*.rotary_emb.inv_freq",)
"""Tensors of old folders that are computed anew."""

_LONG = 131072


def read_common(fields: Fields, *, partial: bool = False) -> dict[str, Any]:
    """Read what all Llama-like families say alike: sizes, norms, ties, rotary positions.

    Args:
        fields: of the config.json.
        partial: whether the family can rotate a part of each head; others rotate all of it,
            whatever their config.json says, so that they must not say otherwise.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
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
        "norm_epsilon": fields.take("rms_norm_eps", fields.take("norm_eps", 1e-6)),
        "attention_dropout": fields.take("attention_dropout", 0.0),
        "init_method_std": fields.take("initializer_range", 0.02),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", False),
    }
    ours |= read_rope(fields, ours["max_position_embeddings"])
    if not partial and ours["rotary_percent"] != 1.0:
        raise ValueError(
            f"config.json has partial_rotary_factor={ours['rotary_percent']!r}, which this "
            "family does not heed: it rotates whole heads. Take the field out."
        )
    return ours


def read_rope(fields: Fields, max_positions: int) -> dict[str, Any]:
    """Read rotary positions, in the old spellings and in the new.

    Args:
        fields: of the config.json.
        max_positions: the context that YaRN stretches, where it does not say.

    Raises:
        ValueError: for a way of stretching them that we cannot represent.
    """
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
    elif kind == "yarn":
        ours |= _read_yarn(rope, max_positions)
    elif kind != "default":
        raise ValueError(
            f"config.json has rope_type={kind!r}, which mcore cannot represent: only default, "
            "linear, llama3 and yarn."
        )
    rope.finish()
    return ours


def _read_yarn(rope: Fields, max_positions: int) -> dict[str, Any]:
    rope.must_be("truncate", True)
    factor, scale = float(rope.take("factor")), float(rope.maybe("mscale") or 0.0)
    all_dim = float(rope.maybe("mscale_all_dim") or 0.0)
    if not scale and all_dim:
        raise ValueError("config.json has mscale_all_dim without mscale, which we cannot say.")
    given = rope.maybe("attention_factor")
    if given is not None and abs(given - (0.1 * math.log(factor) + 1)) > 1e-6:
        raise ValueError(
            f"config.json has attention_factor={given}, which mcore cannot represent: only "
            "that of YaRN's rule, 0.1 x ln(factor) + 1."
        )
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": rope.take(
            "original_max_position_embeddings", max_positions
        ),
        "beta_fast": float(rope.take("beta_fast", 32.0)),
        "beta_slow": float(rope.take("beta_slow", 1.0)),
        # They count together only: one alone leaves YaRN's rule as it is.
        "mscale": scale if all_dim else 1.0,
        "mscale_all_dim": all_dim,
    }


def write_common(
    description: Mapping[str, Any], architecture: str, *, partial: bool = False
) -> dict[str, Any]:
    """Write what all Llama-like families say alike.

    Args:
        description: of the model.
        architecture: their class.
        partial: whether the family can rotate a part of each head.

    Raises:
        ValueError: for fields that none of them can say.
    """
    require_family(description, "gpt")
    require(
        description,
        position_embedding_type="rope",
        rotary_interleaved=False,
        hidden_dropout=0.0,
        window_attn_skip_freq=0,
        multi_latent_attention=False,
    )
    if not partial:
        require(description, rotary_percent=1.0)
    config = settings(description)
    theirs: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": description["vocab_size"],
        "hidden_size": setting(description, "hidden_size"),
        "intermediate_size": ffn_size(config),
        "num_hidden_layers": setting(description, "num_layers"),
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": num_kv_heads(config),
        "head_dim": head_dim(config),
        "hidden_act": "silu",
        # Without a limit of ours: rotary models need none, transformers wants a number.
        "max_position_embeddings": setting(description, "max_position_embeddings") or _LONG,
        "initializer_range": setting(description, "init_method_std"),
        "rms_norm_eps": setting(description, "norm_epsilon"),
        "attention_dropout": setting(description, "attention_dropout"),
        "tie_word_embeddings": not setting(description, "untie_embeddings_and_output_weights"),
    }
    return theirs | write_rope(description)


def write_rms_silu(
    description: Mapping[str, Any], architecture: str, *, partial: bool = False
) -> dict[str, Any]:
    """Write what the families with RMSNorm and SwiGLU say alike.

    Raises:
        ValueError: for fields that none of them can say.
    """
    require(description, normalization="RMSNorm", apply_layernorm_1p=False, swiglu=True)
    return write_common(description, architecture, partial=partial)


def read_rms_silu(fields: Fields, *, partial: bool = False) -> dict[str, Any]:
    """Read what the families with RMSNorm and SwiGLU say alike; as ``read_common``."""
    fields.must_be("hidden_act", "silu")
    return read_common(fields, partial=partial)


def write_rope(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write rotary positions, in the old spellings and in the new.

    Raises:
        ValueError: if two of our ways to stretch them are on.
    """
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
    elif setting(description, "rope_type") == "yarn":
        scaling = _write_yarn(description)
    percent = setting(description, "rotary_percent")
    partial = {"partial_rotary_factor": percent} if percent != 1.0 else {}
    parameters = {"rope_type": "default", **scaling, "rope_theta": base, **partial}
    return {
        **partial,
        "rope_theta": base,
        "rope_scaling": scaling or None,
        "rope_parameters": parameters,
    }


def _write_yarn(description: Mapping[str, Any]) -> dict[str, Any]:
    scale, all_dim = (setting(description, name) for name in ("mscale", "mscale_all_dim"))
    if not all_dim and scale != 1.0:
        raise ValueError(f"it cannot say --mscale {scale} without --mscale-all-dim")
    betas = {name: setting(description, name) for name in ("beta_fast", "beta_slow")}
    name = "original_max_position_embeddings"
    return {
        "rope_type": "yarn",
        "factor": setting(description, "rotary_scaling_factor"),
        name: setting(description, name),
        **{n: value for n, value in betas.items() if value != DEFAULTS[n]},
        **({"mscale": scale, "mscale_all_dim": all_dim} if all_dim else {}),
    }


def gpt(
    config: dict[str, Any], vocab_size: int, moe: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Put a description of a GPT together."""
    return {"family": "gpt", "vocab_size": vocab_size, "config": config, "moe": moe or {}}


def attention_rules(
    description: Mapping[str, Any], norms: Mapping[str, str] | None = None
) -> list[Rule]:
    """Rules of a layer's norms and attention projections; biases as the description says.

    Args:
        description: of the model.
        norms: our norm's name and theirs; None: one before each half.
    """
    biased = setting(description, "add_bias_linear")
    has_norm_bias = setting(description, "normalization") == "LayerNorm"
    rules = [
        Rule(f"blocks.*.{ours}.{kind}", f"model.layers.*.{theirs}.{kind}")
        for ours, theirs in (NORMS if norms is None else norms).items()
        for kind in (("weight", "bias") if has_norm_bias else ("weight",))
    ]
    for kind in ("weight", "bias"):
        if kind == "weight" or biased or setting(description, "add_qkv_bias"):
            rules += [
                Rule(
                    f"blocks.*.attention.qkv.{part}.{kind}",
                    f"model.layers.*.self_attn.{part}_proj.{kind}",
                )
                for part in "qkv"
            ]
        if kind == "weight" or biased:
            there = f"model.layers.*.self_attn.o_proj.{kind}"
            rules.append(Rule(f"blocks.*.attention.proj.{kind}", there))
    return rules + (qk_norm_rules() if setting(description, "qk_layernorm") else [])


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
    description: Mapping[str, Any], layers: tuple[int, ...] | None = None
) -> list[Rule]:
    """Rules of a feed-forward layer, gated or not."""
    gated = is_gated(settings(description))
    names = {"fc1.gate": "gate_proj", "fc1.up": "up_proj"} if gated else {"fc1": "up_proj"}
    kinds = ("weight", "bias") if setting(description, "add_bias_linear") else ("weight",)
    return [
        Rule(
            f"blocks.*.mlp.{ours}.{kind}", f"model.layers.*.mlp.{theirs}.{kind}", layers=layers
        )
        for kind in kinds
        for ours, theirs in {**names, "fc2": "down_proj"}.items()
    ]


def decoder_table(
    description: Mapping[str, Any],
    mlp: Iterable[Rule] | None = None,
    norms: Mapping[str, str] | None = None,
    num_experts: int = 0,
) -> Table:
    """List the weights of a Llama-like model, as its description says.

    Args:
        description: of the model.
        mlp: rules of the feed-forward layers; None: dense ones.
        norms: our norm's name and theirs; None: one before each half.
        num_experts: range of the second ``*``.
    """
    halves = mlp_rules(description) if mlp is None else mlp
    return Table(
        around(description, [*attention_rules(description, norms), *halves]),
        setting(description, "num_layers"),
        num_experts,
        droppable=ANGLES,
        copies=tied_copies(description),
    )


def around(description: Mapping[str, Any], layer_rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Put embedding, final norm and head around the rules of the layers."""
    head = [Rule("head.weight", "lm_head.weight")]
    has_norm_bias = setting(description, "normalization") == "LayerNorm"
    kinds = ("weight", "bias") if has_norm_bias else ("weight",)
    return (
        Rule("embedding.weight", "model.embed_tokens.weight"),
        *layer_rules,
        *(Rule(f"final_norm.{kind}", f"model.norm.{kind}") for kind in kinds),
        *(head if setting(description, "untie_embeddings_and_output_weights") else []),
    )


def tied_copies(description: Mapping[str, Any]) -> dict[str, str]:
    """Name the head as a copy of the embedding where the two are tied."""
    if setting(description, "untie_embeddings_and_output_weights"):
        return {}
    return {"lm_head.weight": "model.embed_tokens.weight"}
