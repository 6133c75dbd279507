"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from mcore_ckpt.families.common.decoder import Decoder
from mcore_ckpt.families.common.layer_types import UPPER_WINDOWS

FAMILY = Decoder(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed={"add_qkv_bias": True},
    absent={"num_key_value_heads": 32},
    parts=(UPPER_WINDOWS,),
)
