"""Tables of weights for state dicts whose names differ from those of Hugging Face folders.

transformers 5 holds the experts of a layer as two stacked tensors, but writes folders expert by
expert; a state dict that was saved directly has the stacked tensors. torchtitan uses Meta's
names and Meta's order of rows in heads.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt.families.common.fields import refuse_variants, require, setting, settings
from mcore_ckpt.formats.recognition import TITAN_EMBEDDING
from mcore_ckpt.mapping.rules import Rule, Table, interleaved_rows
from mcore_models.logical_tensors import head_dim

_EXPERT = re.compile(
    r"(.*\.experts)\.\*\.(?:(gate_proj|w1)|(up_proj|w3)|(down_proj|w2))\.weight"
)


def with_fused_experts(table: Table) -> Table:
    """Return a table with two stacked tensors for the experts of a layer, gates before ups."""
    firsts: dict[str, list[str]] = {}
    rules = []
    for rule in table.rules:
        match = _EXPERT.fullmatch(rule.theirs)
        if match is None:
            rules.append(rule)
            continue
        stem, ours = match[1], rule.ours
        assert isinstance(ours, str)
        if match[4]:
            rules.append(replace(rule, theirs=f"{stem}.down_proj[*]"))
            continue
        halves = firsts.setdefault(stem, ["", ""])
        halves[1 if match[3] else 0] = ours
        if all(halves):
            rules.append(replace(rule, ours=tuple(halves), theirs=f"{stem}.gate_up_proj[*]"))
    return replace(table, rules=tuple(rules))


_TITAN = {
    "attention_norm": "attention_norm",
    "attention.proj": "attention.wo",
    "attention.qkv.v": "attention.wv",
    "mlp_norm": "ffn_norm",
    "mlp.fc1.gate": "feed_forward.w1",
    "mlp.fc1.up": "feed_forward.w3",
    "mlp.fc2": "feed_forward.w2",
}


def titan_table(description: Mapping[str, Any]) -> Table:
    """Return the rules of a Llama's weights under torchtitan's names.

    Neighbouring rows of queries and keys rotate together.

    Raises:
        ValueError: if the model is not a Llama with an untied head and without biases.
    """
    refuse_variants(description)
    require(
        description,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        qk_layernorm=False,
        add_bias_linear=False,
        add_qkv_bias=False,
        multi_latent_attention=False,
        untie_embeddings_and_output_weights=True,
    )
    order = interleaved_rows(head_dim(settings(description)))
    layer = [
        Rule(f"blocks.*.{ours}.weight", f"layers.*.{theirs}.weight")
        for ours, theirs in _TITAN.items()
    ]
    layer += [
        Rule(
            f"blocks.*.attention.qkv.{part}.weight",
            f"layers.*.attention.w{part}.weight",
            head_rows=order,
        )
        for part in "qk"
    ]
    return Table(
        (
            Rule("embedding.weight", TITAN_EMBEDDING),
            *layer,
            Rule("final_norm.weight", "norm.weight"),
            Rule("head.weight", "output.weight"),
        ),
        setting(description, "num_layers"),
        droppable=("freqs_cis", "rope.cache"),
    )
