"""Mistral: Llama with a sliding window and no biases."""

from mcore_ckpt.families.common.decoder import Decoder
from mcore_ckpt.families.common.layer_types import WINDOW

FAMILY = Decoder(
    model_type="mistral",
    architecture="MistralForCausalLM",
    absent={"sliding_window": 4096, "num_key_value_heads": 8},
    parts=(WINDOW,),
)
