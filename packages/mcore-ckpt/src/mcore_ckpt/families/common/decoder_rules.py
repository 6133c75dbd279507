"""Rules of the Llama-like families: attention, feed-forward layers, and what is around them."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mcore_ckpt.families.common.experts import expert_setting
from mcore_ckpt.families.common.fields import setting, settings
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.logical_tensors import (
    has_attention_bias,
    has_qkv_bias,
    is_gated,
    norm_has_bias,
)

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Norms before attention and before the feed-forward layer."""

ANGLES = ("*.rotary_emb.inv_freq",)
"""Tensors of old folders that are computed anew."""


def decoder_table(
    description: Mapping[str, Any],
    mlp: Iterable[Rule] | None = None,
    norms: Mapping[str, str] | None = None,
    extra: Iterable[Rule] = (),
) -> Table:
    """List the weights of a Llama-like model, as its description says.

    Args:
        description: of the model.
        mlp: rules of the feed-forward layers; None: dense ones.
        norms: our norm's name and theirs; None: one before each half.
        extra: rules that come last.
    """
    halves = mlp_rules(description) if mlp is None else mlp
    rules = around(description, [*attention_rules(description, norms), *halves])
    return Table(
        (*rules, *extra),
        setting(description, "num_layers"),
        expert_setting(description, "num_experts"),
        droppable=ANGLES,
        copies=tied_copies(description),
    )


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


def gated_rules(
    ours: str,
    theirs: str,
    layers: tuple[int, ...] | None = None,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Rule]:
    """Rules of a gated network without biases.

    Args:
        ours: its place in a layer, up to the dot.
        theirs: likewise.
        layers: that have it; None: all.
        names: of gate, up- and down-projection there.
    """
    return [
        Rule(
            f"blocks.*.{ours}{mine}.weight",
            f"model.layers.*.{theirs}{name}.weight",
            layers=layers,
        )
        for mine, name in zip(("fc1.gate", "fc1.up", "fc2"), names, strict=True)
    ]


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


def with_head(
    description: Mapping[str, Any],
    rules: Iterable[Rule],
    embedding: str,
    head: str = "lm_head.weight",
    droppable: tuple[str, ...] = (),
) -> Table:
    """List weights whose names are the family's own, and the head: a copy where it is tied."""
    is_untied = setting(description, "untie_embeddings_and_output_weights")
    last = [Rule("head.weight", head)] if is_untied else []
    return Table(
        (*rules, *last),
        setting(description, "num_layers"),
        expert_setting(description, "num_experts"),
        droppable=droppable,
        copies={} if is_untied else {head: embedding},
    )


def below_transformer(names: Collection[str]) -> dict[str, str]:
    """Name the tensors of a folder of the bare model, as published ones are."""
    if any(name.startswith("transformer.") for name in names):
        return {}
    return {name: f"transformer.{name}" for name in names if name != "lm_head.weight"}
