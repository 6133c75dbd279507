"""Extracts the text model from Hugging Face folders of models for images or audio.

The text model belongs to a known family: its config is ``text_config``, or fields at the top
level, and its weights are below ``language_model``. Its three-dimensional positions reduce to
one dimension for text. Weights of other parts are omitted.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from mcore_ckpt.formats.recognition import TOWERS, has_text_tower
from mcore_ckpt.storage.index import TensorEntry

log = logging.getLogger(__name__)

_SEEING = (
    *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector."),
    *("audio_tower.", "embed_vision.", "embed_audio."),
)
_ELSEWHERE = ("image", "video", "vision", "boi_token", "eoi_token", "text_config", "mm_tokens")
_TOP = ("torch_dtype", "dtype", "eos_token_id", "bos_token_id")


def text_tower(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Return config and tensors of a folder's text model; other folders are unchanged.

    Logs the number of tensors that are omitted.
    """
    if not has_text_tower(config):
        return dict(config), dict(tensors)
    model_type = config["model_type"]
    tower = _tower_of(config)
    top = {name: config[name] for name in _TOP if name in config}
    text = config.get("text_config") or config
    merged = {**top, **text, "tie_word_embeddings": _ties(config, text, tensors)}
    text_fields = {name: v for name, v in merged.items() if not name.startswith(_ELSEWHERE)}
    for name in ("rope_scaling", "rope_parameters"):
        if text_fields.get(name):
            text_fields[name] = _of_text(text_fields[name])
    text_fields.pop("architectures", None)
    named = {
        name.replace("language_model.", "", 1): entry
        for name, entry in tensors.items()
        if not name.removeprefix("model.").startswith(_SEEING)
    }
    num_omitted = len(tensors) - len(named)
    log.warning(
        "model_type %s: only the text model is read, as %s; %d other tensors are omitted.",
        model_type,
        tower,
        num_omitted,
    )
    return text_fields | {"model_type": tower}, named


def _tower_of(config: Mapping[str, Any]) -> str:
    """Return the family of the text model, which some types name in ``text_config``."""
    towers = TOWERS[config["model_type"]]
    named = (config.get("text_config") or {}).get("model_type", towers[0])
    if len(towers) == 1:
        return towers[0]
    if named not in towers:
        raise ValueError(
            f"config.json has text_config.model_type={named!r}: for {config['model_type']} "
            f"only {' and '.join(towers)} are supported."
        )
    return named


def _ties(config: Mapping[str, Any], text: Mapping[str, Any], names: Collection[str]) -> Any:
    """Return ``tie_word_embeddings`` of the part that has the head."""
    name, model_type = "tie_word_embeddings", config["model_type"]
    if model_type == "mistral3":  # true by default, but a folder with a head is untied
        has_head = any(one.endswith("lm_head.weight") for one in names)
        return config.get(name, True) and not has_head
    if model_type == "llama4":  # the head belongs to the text model
        return text.get(name, False)
    tied = config.get(name, model_type in ("gemma3", "gemma3n", "gemma4"))
    # Older folders of this type have the field in text_config.
    return tied or (model_type == "qwen2_5_vl" and text.get(name, False))


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the split of channels over three positions, which are equal for text."""
    text_rope = {name: value for name, value in rope.items() if not name.startswith("mrope")}
    return {name: "default" if value == "mrope" else value for name, value in text_rope.items()}
