"""Families of Hugging Face models: one short file each, weights and config.json together.

A file has a ``FAMILY`` (a ``common.decoder.Decoder``), several by type in ``FAMILIES``, or is
one: ``to_ours(config) -> description``, ``to_theirs(description) -> config`` and
``table(description) -> Table``; where config.json may promise more than a folder has, or less,
also ``as_stored(description, names) -> description``; where published folders spell names in
another way, ``renames(names) -> {name there: name in the table}``; where the model is no GPT of
ours, ``shapes(description)``; where the class is not named like the type, ``ARCHITECTURE``. A
description is what our checkpoints keep: ``{"family": "gpt", "vocab_size": int, "config":
{...}, "moe": {...}}`` with the fields of mcore-models' TransformerConfig and mcore-moe's
MoEConfig; fields left out have their defaults. Families whose model does not run here yet have
a name of their own in ``family``, and weights and config survive the way there and back all the
same. Each direction refuses, by name, what the other side cannot express.
"""

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mcore_ckpt.families.common.fields import UnknownFieldsError
from mcore_ckpt.mapping.rules import Table
from mcore_ckpt.storage.index import TensorEntry

_FLOORS = {
    "llama": "dense",
    "mistral": "dense",
    "qwen2": "dense",
    "qwen3": "dense",
    "mixtral": "moe",
    "qwen3_moe": "moe",
    "gpt2": "dense",
    "nemotron": "dense",
    "phi3": "dense",
    "olmo2": "dense",
    "olmo3": "dense",
    "gemma2": "dense",
    "gemma3_text": "dense",
    "granite": "dense",
    "cohere": "dense",
    "cohere2": "dense",
    "starcoder2": "dense",
    "gpt_neox": "dense",
    "smollm3": "dense",
    **dict.fromkeys(
        (
            *("arcee", "cwm", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "helium"),
            *("internlm3", "ministral", "ministral3", "seed_oss"),
        ),
        "dense.variants",
    ),
    "gpt_oss": "moe",
    "glm4_moe": "moe",
    **dict.fromkeys(("dots1", "olmoe", "qwen2_moe"), "moe.variants"),
    "ernie4_5_moe": "moe",
    **dict.fromkeys(("granitemoe", "granitemoeshared"), "moe.granitemoe"),
    "llama4_text": "moe",
    "deepseek_v2": "moe",
    "deepseek_v3": "moe",
    "kimi_k2": "moe.variants",
    "mamba2": "recurrent",
    "t5": "encoders",
    "bert": "encoders",
    "megatron-bert": "encoders",
    "nemotron_h": "recurrent",
    "qwen3_next": "recurrent",
    "bamba": "recurrent",
    "granitemoehybrid": "recurrent",
}
"""``model_type`` of each family and the folder of its module, named alike with ``_``; or the
module whose table has it."""

MODEL_TYPES = tuple(_FLOORS)
"""All of them; the first that can say a model is the one it is exported as."""


def find_family(model_type: str) -> Any:
    """Return a family."""
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type {model_type!r} is not known; known are {', '.join(MODEL_TYPES)}."
        )
    floor = _FLOORS[model_type]
    room = floor if "." in floor else f"{floor}.{model_type.replace('-', '_')}"
    path = f"families/{room.replace('.', '/')}.py"
    if find_spec(f"{__name__}.{room}") is None:
        raise LookupError(
            f"families/__init__.py lists model_type {model_type!r}, and there is no {path}: "
            "add it, with a FAMILY."
        )
    module = import_module(f"{__name__}.{room}")
    if "." not in floor:
        return getattr(module, "FAMILY", module)
    if model_type not in module.FAMILIES:
        raise LookupError(
            f"families/__init__.py lists model_type {model_type!r} as one of {path}, whose "
            "FAMILIES lacks it: add it there."
        )
    return module.FAMILIES[model_type]


def own_fields(family: Any) -> tuple[str, ...]:
    """Return a family's fields of config.json that only go along: engines may read them."""
    return (*getattr(family, "carries", ()), *getattr(family, "unread", ()))


def shapes_of(description: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """List the shapes of a model's weights by their names within a layer.

    Returns:
        As ``families.common.shapes`` names them; nothing for a family that is not known.
    """
    name = description.get("family", "")
    if name == "gpt":
        return import_module(f"{__name__}.common.shapes").gpt_shapes(description)
    model_types = {model_type.replace("-", "_"): model_type for model_type in MODEL_TYPES}
    if name not in model_types:
        return {}
    return find_family(model_types[name]).shapes(description)


def stored_model(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Read which model a folder holds, and its tensors under the names of its table."""
    family = find_family(config.get("model_type", ""))
    check_architectures(config)
    renames = getattr(family, "renames", None)
    news = renames(tensors.keys()) if renames else {}
    if twice := sorted(name for name, new in news.items() if new in tensors):
        raise ValueError(f"{twice[0]} and {news[twice[0]]} are names of one tensor.")
    description = family.to_ours(config)
    named = {news.get(name, name): entry for name, entry in tensors.items()}
    if as_stored := getattr(family, "as_stored", None):
        description = as_stored(description, named.keys())
    return description, named


def unknown_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that its family does not read.

    Raises:
        ValueError: if the family cannot express the model for another reason.
    """
    try:
        find_family(config.get("model_type", "")).to_ours(config)
    except UnknownFieldsError as error:
        return {name: config[name] for name in error.names if name in config}
    return {}


def check_architectures(config: Mapping[str, Any]) -> None:
    """Compare the class that a config.json names with its ``model_type``."""
    model_type, named = config.get("model_type", ""), config.get("architectures") or []
    known = find_family(model_type) if model_type in MODEL_TYPES else None
    built = str(getattr(known, "architecture", "")).lower()
    stem = getattr(known, "ARCHITECTURE", re.sub(r"[_-]|text$", "", model_type)).lower()
    is_one = isinstance(named, list) and len(named) <= 1
    plain = [str(one).lower().replace("_", "") for one in named] if is_one else []
    if not is_one or any(not one.startswith(stem) and one != built for one in plain):
        raise ValueError(
            f"config.json says model_type {model_type!r} and architectures {named}: it must "
            "name one class, of that type."
        )


def family_for(description: dict[str, Any]) -> str:
    """Find the first family that can say what a model of ours is."""
    reasons = []
    for model_type in MODEL_TYPES:
        try:
            find_family(model_type).to_theirs(description)
        except ValueError as error:
            reasons.append(f"\n  {model_type}: {error}")
        else:
            return model_type
    raise ValueError(f"no Hugging Face family can say this model: {''.join(reasons)}")


def table_for(description: dict[str, Any]) -> Table:
    """List the weights of a model of ours as the first family names them that can say it."""
    return find_family(family_for(description)).table(description)
