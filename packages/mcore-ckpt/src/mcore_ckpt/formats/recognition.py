"""Recognizes the format of a folder, and special features of Hugging Face folders.

Formats and features are recognized by file names and config.json only. No module that reads a
format is imported, so that opening a plain folder loads only the modules that it needs.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt.storage.paths import HF_CONFIG, is_complete, is_peft_folder

DCP_METADATA = ".metadata"
"""File that makes a folder a directory of torch.distributed.checkpoint."""

QUANT_CONFIG = "hf_quant_config.json"
"""File with the quantization of a folder of the unified layout."""

TOWERS = {
    "gemma3": ("gemma3_text",),
    "gemma3n": ("gemma3n_text",),
    "gemma4": ("gemma4_text",),
    "llama4": ("llama4_text",),
    "mistral3": ("mistral", "ministral3"),
    "qwen2_5_vl": ("qwen2",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_vl": ("qwen3",),
    "qwen3_vl_moe": ("qwen3_moe",),
}
"""Families of the text tower, by ``model_type`` of the vision-language model."""

FUSED_EXPERTS = "experts.gate_up_proj"
"""Suffix of the stacked experts of a layer in a state dict of transformers 5."""

TITAN_EMBEDDING = "tok_embeddings.weight"
"""Suffix of the embedding's name in a state dict of torchtitan."""

_OTHER_HEAD = re.compile(
    r"(?P<stem>\w+?)(?P<kind>(?<!Head)Model|For(Sequence|Token)Classification)"
)


def folder_format(folder: Path) -> str:
    """Return the format of a folder of tensors: mcore, megatron, dcp, hf, or '' if unknown."""
    if is_complete(folder):
        return "mcore"
    if (folder / "metadata.json").is_file() or is_legacy(folder):
        return "megatron"
    if (folder / DCP_METADATA).is_file():
        return "dcp"
    return "hf" if (folder / HF_CONFIG).is_file() or is_peft_folder(folder) else ""


def is_legacy(folder: Path) -> bool:
    """Whether a folder is a checkpoint of Megatron's old form, one folder a rank."""
    return any(folder.glob("mp_rank_00*/*.pt"))


def has_text_tower(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a vision-language model whose text model is read."""
    return config.get("model_type", "") in TOWERS


def is_state_spaces_release(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of state-spaces' Mamba-2 releases, older than transformers'."""
    return "ssm_cfg" in config and "model_type" not in config


def other_head(config: Mapping[str, Any]) -> re.Match[str] | None:
    """Match the class of a model without a head, or with one that classifies.

    Returns:
        ``stem`` and ``kind`` of the class, ``Llama`` and ``ForSequenceClassification``; None if
        the class predicts tokens or is not stated.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        return None
    return _OTHER_HEAD.fullmatch(str(architectures[0]))


def is_quantized(config: Mapping[str, Any], folder: Path) -> bool:
    """Whether the folder is quantized, by config.json or hf_quant_config.json."""
    return bool(config.get("quantization_config")) or (folder / QUANT_CONFIG).is_file()
