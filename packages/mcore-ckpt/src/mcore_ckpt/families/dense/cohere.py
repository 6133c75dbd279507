"""Command-R: one LayerNorm without a bias feeds attention and feed-forward layer together."""

from functools import partial

from mcore_ckpt.families.common.decoder import ATTENTION_BIAS, Decoder, pair
from mcore_ckpt.families.common.decoder_rules import decoder_table

FAMILY = Decoder(
    model_type="cohere",
    architecture="CohereForCausalLM",
    fixed={
        "normalization": "LayerNorm",
        "norm_bias": False,
        "parallel_residual": "one_norm",
        "rotary_interleaved": True,
    },
    absent={"logit_scale": 0.0625, "tie_word_embeddings": True, "layer_norm_eps": 1e-5},
    # Norms on heads have a weight for each of them, which we do not have.
    only={"use_qk_norm": False},
    parts=(pair("logits_multiplier", "logit_scale", kind=float), ATTENTION_BIAS),
    epsilon="layer_norm_eps",
    theta=5e5,
    weights=partial(decoder_table, norms={"attention_norm": "input_layernorm"}),
)
