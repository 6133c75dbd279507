"""SmolLM3: Llama whose every fourth layer has no rotary positions."""

from mcore_ckpt.families.common.decoder import ATTENTION_BIAS, Decoder
from mcore_ckpt.families.common.layer_types import NO_WINDOW, ROTATED_LAYERS

FAMILY = Decoder(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    absent={"num_key_value_heads": 4, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
    only={"mlp_bias": False},
    parts=(NO_WINDOW, ATTENTION_BIAS, ROTATED_LAYERS),
    theta=2e6,
)
