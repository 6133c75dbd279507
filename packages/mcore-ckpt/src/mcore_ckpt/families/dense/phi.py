"""Phi-1, 1.5 and 2: attention and MLP in parallel on one norm, biases everywhere."""

from mcore_ckpt.families.common.decoder import (
    ANGLES,
    OWN_HEADS,
    Decoder,
    Description,
    activation_rule,
    both_dropouts,
    with_head,
)
from mcore_ckpt.mapping.rules import Rule, Table

_LAYER = "model.layers.*."
_NAMES = {
    **{f"attention.qkv.{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attention.proj": "self_attn.dense",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "attention_norm": "input_layernorm",
}


def _table(description: Description) -> Table:
    rules = [Rule("embedding.weight", "model.embed_tokens.weight")]
    for kind in ("weight", "bias"):
        rules += [
            Rule(f"blocks.*.{ours}.{kind}", f"{_LAYER}{theirs}.{kind}")
            for ours, theirs in _NAMES.items()
        ]
        rules.append(Rule(f"final_norm.{kind}", f"model.final_layernorm.{kind}"))
    rules.append(Rule("lm_head.bias", "lm_head.bias"))
    return with_head(description, rules, "model.embed_tokens.weight", droppable=ANGLES)


FAMILY = Decoder(
    model_type="phi",
    architecture="PhiForCausalLM",
    fixed={
        "normalization": "LayerNorm",
        "parallel_residual": "one_norm",
        "add_bias_linear": True,
        "add_output_bias": True,
    },
    absent={"layer_norm_eps": 1e-5, "max_position_embeddings": 2048},
    only={"qk_layernorm": False},
    parts=(
        OWN_HEADS,
        activation_rule("hidden_act", "gelu_new"),
        both_dropouts("resid_pdrop", "embd_pdrop", 0.0),
    ),
    activation=("", ""),
    epsilon="layer_norm_eps",
    partial=0.5,
    weights=_table,
)
