"""Gemma 3, its text model: Gemma 2 with norms on queries and keys, and two rotary bases.

No model here runs it yet: the fields that have no flag keep the family's own names.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families import gemma2
from mcore_ckpt.families.decoder import decoder_table
from mcore_ckpt.families.fields import Nullable
from mcore_ckpt.families.gemma2 import NORMS, PAIRS, read, write
from mcore_ckpt.mapping.rules import Table

_ABSENT = {
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": Nullable(None),
    "final_logit_softcapping": Nullable(None),
}
_PAIRS = (
    *((mine, there, _ABSENT.get(there, default)) for mine, there, default in PAIRS),
    ("sliding_window_pattern", "sliding_window_pattern", None),
    ("_sliding_window_pattern", "_sliding_window_pattern", None),
    ("rope_local_base_freq", "rope_local_base_freq", None),
)

shapes = gemma2.shapes


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    ours = read(config, "gemma3_text", _PAIRS)
    return ours | {"config": {**ours["config"], "qk_layernorm": True}}


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: if it is of another family.
    """
    return write(description, "gemma3_text", "Gemma3ForCausalLM", _PAIRS)


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    return decoder_table(description, norms=NORMS)
