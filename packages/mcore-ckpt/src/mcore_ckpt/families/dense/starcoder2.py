"""StarCoder-2: LayerNorm and biases everywhere, GELU without a gate, grouped heads."""

from mcore_ckpt.families.common.decoder import (
    Decoder,
    Description,
    both_dropouts,
    decoder_table,
    pair,
)
from mcore_ckpt.families.common.fields import setting
from mcore_ckpt.families.common.layer_types import WINDOW
from mcore_ckpt.mapping.rules import Rule, Table

_MLP = {"fc1": "c_fc", "fc2": "c_proj"}


def _table(description: Description) -> Table:
    kinds = ("weight", "bias") if setting(description, "add_bias_linear") else ("weight",)
    mlp = [
        Rule(f"blocks.*.mlp.{ours}.{kind}", f"model.layers.*.mlp.{theirs}.{kind}")
        for kind in kinds
        for ours, theirs in _MLP.items()
    ]
    return decoder_table(description, mlp)


FAMILY = Decoder(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    fixed={"normalization": "LayerNorm", "swiglu": False, "openai_gelu": True},
    absent={"norm_epsilon": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.018042},
    unread=("mlp_type", "norm_type"),
    parts=(
        both_dropouts("residual_dropout", "embedding_dropout", 0.0),
        pair("add_bias_linear", "use_bias", True),
        WINDOW,
    ),
    activation=("hidden_act", "gelu_pytorch_tanh"),
    epsilon="norm_epsilon",
    weights=_table,
)
