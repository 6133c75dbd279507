"""Nemotron (3, 4, Minitron): LayerNorm around one, squared ReLU, part of each head rotated."""

from mcore_ckpt.families.common.decoder import ATTENTION_BIAS, Decoder

FAMILY = Decoder(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    fixed={
        "normalization": "LayerNorm",
        "apply_layernorm_1p": True,
        "swiglu": False,
        "squared_relu": True,
    },
    absent={"norm_eps": 1e-5, "initializer_range": 0.0134},
    only={"mlp_bias": False},
    parts=(ATTENTION_BIAS,),
    activation=("hidden_act", "relu2"),
    epsilon="norm_eps",
    partial=0.5,
)
