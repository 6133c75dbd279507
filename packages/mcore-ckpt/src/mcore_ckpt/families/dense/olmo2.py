"""OLMo-2: norms after each half instead of before, and on whole queries and keys."""

from functools import partial

from mcore_ckpt.families.common.decoder import ATTENTION_BIAS, OWN_HEADS, Decoder, decoder_table

_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

FAMILY = Decoder(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fixed={"norm_placement": "output", "qk_layernorm": True, "qk_norm_width": "layer"},
    absent={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    parts=(ATTENTION_BIAS, OWN_HEADS),
    weights=partial(decoder_table, norms=_NORMS),
)
