"""GPT-2: learned positions, LayerNorm, biases, and linears stored [in, out]."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import (
    OWN_GROUPS,
    Decoder,
    Description,
    activation_rule,
    below_transformer,
    both_dropouts,
    with_head,
)
from mcore_ckpt.mapping.rules import Rule, Table

_LAYER = "transformer.h.*."
_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
_LINEARS = {"attention.proj": "attn.c_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    width = config.get("intermediate_size") or 4 * config.get("hidden_size", 0)
    return {**config, "intermediate_size": width}


def _table(description: Description) -> Table:
    rules = [
        Rule("embedding.weight", "transformer.wte.weight"),
        Rule("position_embedding.weight", "transformer.wpe.weight"),
    ]
    for kind in ("weight", "bias"):
        is_transposed = kind == "weight"
        qkv = tuple(f"blocks.*.attention.qkv.{part}.{kind}" for part in "qkv")
        rules += [
            Rule(qkv, f"{_LAYER}attn.c_attn.{kind}", is_transposed),
            *(
                Rule(f"blocks.*.{ours}.{kind}", f"{_LAYER}{theirs}.{kind}", is_transposed)
                for ours, theirs in _LINEARS.items()
            ),
            *(
                Rule(f"blocks.*.{ours}.{kind}", f"{_LAYER}{theirs}.{kind}")
                for ours, theirs in _NORMS.items()
            ),
            Rule(f"final_norm.{kind}", f"transformer.ln_f.{kind}"),
        ]
    # Causal masks in old folders.
    masks = (f"{_LAYER}attn.bias", f"{_LAYER}attn.masked_bias")
    return with_head(description, rules, "transformer.wte.weight", droppable=masks)


FAMILY = Decoder(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fixed={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    field_names={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "attention_dropout": "attn_pdrop",
    },
    rotates=False,
    absent={
        "max_position_embeddings": 1024,
        "layer_norm_epsilon": 1e-5,
        "attention_dropout": 0.1,
        "tie_word_embeddings": True,
    },
    refused={"scale_attn_weights": True},
    unread=(
        *("summary_type", "summary_use_proj", "summary_activation", "n_ctx"),
        *("summary_proj_to_labels", "summary_first_dropout"),
    ),
    parts=(
        activation_rule("activation_function", "gelu_new"),
        OWN_GROUPS,
        both_dropouts("resid_pdrop", "embd_pdrop", 0.1),
    ),
    activation=("", ""),
    epsilon="layer_norm_epsilon",
    normalize=_normalize,
    weights=_table,
    renames=below_transformer,
)
