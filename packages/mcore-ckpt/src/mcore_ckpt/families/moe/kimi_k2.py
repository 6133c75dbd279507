"""Kimi-K2: DeepSeek-V3 under another name, with more experts, fewer heads and no groups."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.moe import deepseek_v3

ARCHITECTURE = "DeepseekV3ForCausalLM"
"""The class in its config.json."""

to_ours = deepseek_v3.to_ours
table = deepseek_v3.table
as_stored = deepseek_v3.as_stored


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json; see ``families``."""
    return deepseek_v3.to_theirs(description) | {"model_type": "kimi_k2"}
