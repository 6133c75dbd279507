"""Qwen3: Llama with a norm on each head's queries and keys."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.decoder import ATTENTION_BIAS, Decoder
from mcore_ckpt.families.common.layer_types import UPPER_WINDOWS


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # Qwen3's default is 128, regardless of the hidden size.
    return {**config, "head_dim": 128} if config.get("head_dim") in (None, 0) else config


FAMILY = Decoder(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={"qk_layernorm": True},
    absent={"num_key_value_heads": 32},
    parts=(ATTENTION_BIAS, UPPER_WINDOWS),
    normalize=_normalize,
)
