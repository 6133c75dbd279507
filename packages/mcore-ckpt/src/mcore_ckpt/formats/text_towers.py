"""The text towers of vision-language models: Hugging Face folders without what sees images.

A tower is a model of a family that is known: its config stands in ``text_config``, or flat
beside the other one, its weights below ``language_model``. Positions in three dimensions are
those of one for text. Images are out of scope: their weights are left where they are.
"""

import logging
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.formats.recognition import TOWERS, has_text_tower
from mcore_ckpt.storage.index import TensorEntry

log = logging.getLogger(__name__)

_SEEING = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.")
_ELSEWHERE = ("image", "video", "vision", "boi_token", "eoi_token", "text_config", "mm_tokens")
_TOP = ("torch_dtype", "dtype", "eos_token_id", "bos_token_id")


def text_tower(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Return the config and the tensors of a folder's text model; of others, as they are.

    Logs how many tensors are left out.
    """
    if not has_text_tower(config):
        return dict(config), dict(tensors)
    model_type = config["model_type"]
    top = {name: config[name] for name in _TOP if name in config}
    text = config.get("text_config") or config
    stated = {**top, **text, "tie_word_embeddings": _ties(config, text)}
    own = {name: v for name, v in stated.items() if not name.startswith(_ELSEWHERE)}
    for name in ("rope_scaling", "rope_parameters"):
        if own.get(name):
            own[name] = _of_text(own[name])
    own.pop("architectures", None)
    named = {
        name.replace("language_model.", "", 1): entry
        for name, entry in tensors.items()
        if not name.removeprefix("model.").startswith(_SEEING)
    }
    left = len(tensors) - len(named)
    log.warning(
        "model_type %s: its text model is read, as %s; %d tensors that see are left out.",
        model_type,
        TOWERS[model_type],
        left,
    )
    return own | {"model_type": TOWERS[model_type]}, named


def _ties(config: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    """Return ``tie_word_embeddings`` of the part that has the head."""
    name, model_type = "tie_word_embeddings", config["model_type"]
    if model_type == "llama4":  # its text model has a head of its own
        return text.get(name, False)
    tied = config.get(name, model_type == "gemma3")
    # Older folders of this type have the field inside.
    return tied or (model_type == "qwen2_5_vl" and text.get(name, False))


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out which channels rotate by which of three positions: those of text are alike."""
    own = {name: value for name, value in rope.items() if not name.startswith("mrope")}
    return {name: "default" if value == "mrope" else value for name, value in own.items()}
