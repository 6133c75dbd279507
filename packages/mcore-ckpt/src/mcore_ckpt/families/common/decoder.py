"""What the Llama-like families share: their config.json and their rules.

Reads the old spellings (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and the new ones
(``rope_parameters``, ``dtype``); writes both where they do not contradict, so that every
transformers since 4.40 reads a folder.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from mcore_ckpt.families.common.defaults import ROPE_VARIANTS
from mcore_ckpt.families.common.fields import (
    Fields,
    refuse_variants,
    require,
    require_family,
    setting,
    settings,
)
from mcore_ckpt.families.common.rope import read_rope, write_rope
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_parallel.logical_tensors import (
    ffn_size,
    has_attention_bias,
    has_qkv_bias,
    head_dim,
    is_gated,
    norm_has_bias,
    num_kv_heads,
)

NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
"""Norms before attention and before the feed-forward layer."""

ANGLES = ("*.rotary_emb.inv_freq",)
"""Tensors of old folders that are computed anew."""

_LONG = 131072


def read_common(
    fields: Fields, *, partial: bool = False, epsilon: str = "", theta: float = 10000.0
) -> dict[str, Any]:
    """Read what all Llama-like families say alike: sizes, norms, ties, rotary positions.

    Args:
        fields: of the config.json.
        epsilon: its name for what norms add; empty: ``rms_norm_eps``.
        theta: rotary base where none is said.
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
        "norm_epsilon": fields.take(epsilon)
        if epsilon
        else fields.take("rms_norm_eps", fields.take("norm_eps", 1e-6)),
        "attention_dropout": fields.take("attention_dropout", 0.0),
        "init_method_std": fields.take("initializer_range", 0.02),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", False),
    }
    ours |= read_rope(fields, ours["max_position_embeddings"], theta=theta)
    if not partial and ours["rotary_percent"] != 1.0:
        raise ValueError(
            f"config.json has partial_rotary_factor={ours['rotary_percent']!r}, which this "
            "family does not heed: it rotates whole heads. Take the field out."
        )
    return ours


def write_common(
    description: Mapping[str, Any],
    architecture: str,
    *,
    partial: bool = False,
    says: Iterable[str] = (),
) -> dict[str, Any]:
    """Write what all Llama-like families say alike.

    Args:
        description: of the model.
        architecture: their class.
        partial: whether the family can rotate a part of each head.
        says: fields that it has beside these: some of ``VARIANTS``, or
            ``window_attn_skip_freq`` and ``rotary_interleaved``.

    Raises:
        ValueError: for fields that none of them can say.
    """
    require_family(description, "gpt")
    says = set(says)
    refuse_variants(description, *ROPE_VARIANTS, *says)
    require(description, position_embedding_type="rope", hidden_dropout=0.0)
    require(description, multi_latent_attention=False)
    for name, value in (("rotary_interleaved", False), ("window_attn_skip_freq", "0")):
        if name not in says:
            require(description, **{name: value})
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
    description: Mapping[str, Any],
    architecture: str,
    *,
    partial: bool = False,
    says: Iterable[str] = (),
) -> dict[str, Any]:
    """Write what the families with RMSNorm and SwiGLU say alike; as ``write_common``.

    Raises:
        ValueError: for fields that none of them can say.
    """
    require(description, normalization="RMSNorm", apply_layernorm_1p=False, swiglu=True)
    return write_common(description, architecture, partial=partial, says=says)


def read_rms_silu(
    fields: Fields, *, partial: bool = False, theta: float = 10000.0
) -> dict[str, Any]:
    """Read what the families with RMSNorm and SwiGLU say alike; as ``read_common``."""
    fields.must_be("hidden_act", "silu")
    return read_common(fields, partial=partial, theta=theta)


def attention_rules(
    description: Mapping[str, Any], norms: Mapping[str, str] | None = None
) -> list[Rule]:
    """Rules of a layer's norms and attention projections; biases as the description says.

    Args:
        description: of the model.
        norms: our norm's name and theirs; None: one before each half.
    """
    config = settings(description)
    rules = [
        Rule(f"blocks.*.{ours}.{kind}", f"model.layers.*.{theirs}.{kind}")
        for ours, theirs in (NORMS if norms is None else norms).items()
        for kind in (("weight", "bias") if norm_has_bias(config) else ("weight",))
    ]
    for kind in ("weight", "bias"):
        if kind == "weight" or has_qkv_bias(config):
            rules += [
                Rule(
                    f"blocks.*.attention.qkv.{part}.{kind}",
                    f"model.layers.*.self_attn.{part}_proj.{kind}",
                )
                for part in "qkv"
            ]
        if kind == "weight" or has_attention_bias(config):
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
    kinds = ("weight", "bias") if norm_has_bias(settings(description)) else ("weight",)
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
