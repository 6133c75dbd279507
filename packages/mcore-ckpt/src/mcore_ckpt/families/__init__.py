"""Families of Hugging Face models: each maps a config.json and the names of weights.

mcore checkpoints store a description of their model: ``{"family": "gpt", "vocab_size": int,
"config": {...}, "moe": {...}}`` with fields of TransformerConfig and MoEConfig ("our fields");
absent fields have their defaults. A family converts between a config.json ("their fields") and
a description, and lists the weights:

- ``to_ours(config) -> description`` and ``to_theirs(description) -> config``; each raises
  ValueError with the field that the other side cannot express;
- ``table(description) -> Table``;
- optional: ``as_stored(description, names)`` corrects a description by the tensors in the
  folder; ``renames(names)`` maps names of published folders to those of the table;
  ``shapes(description)`` for models other than GPT; ``ARCHITECTURE`` if the class is not named
  like the type.

A module is a family itself, or has a family in ``FAMILY`` (mostly a
``common.decoder.Decoder``), or several in ``FAMILIES``. Families without a running model in
mcore-models are converted too; their descriptions have the family's name in ``family``.
"""

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mcore_ckpt.families.common.fields import UnknownFieldsError
from mcore_ckpt.mapping.rules import Table
from mcore_ckpt.storage.index import TensorEntry

_MODULES = {
    "llama": "dense.llama",
    "mistral": "dense.mistral",
    "qwen2": "dense.qwen2",
    "qwen3": "dense.qwen3",
    "mixtral": "moe.mixtral",
    "qwen3_moe": "moe.qwen3_moe",
    "gpt2": "dense.gpt2",
    "nemotron": "dense.nemotron",
    "phi3": "dense.phi3",
    "olmo2": "dense.olmo2",
    "olmo3": "dense.olmo3",
    "gemma2": "dense.gemma2",
    "gemma3_text": "dense.gemma3_text",
    "gemma3n_text": "dense.gemma3n_text",
    "gemma4_text": "dense.gemma4_text",
    "granite": "dense.granite",
    "cohere": "dense.cohere",
    "cohere2": "dense.cohere2",
    "starcoder2": "dense.starcoder2",
    "gpt_neox": "dense.gpt_neox",
    "smollm3": "dense.smollm3",
    "apertus": "dense.apertus",
    "arcee": "dense.variants",
    "cwm": "dense.variants",
    "ernie4_5": "dense.variants",
    "exaone4": "dense.variants",
    "gemma": "dense.variants",
    "glm": "dense.variants",
    "glm4": "dense.variants",
    "helium": "dense.variants",
    "internlm3": "dense.variants",
    "ministral": "dense.variants",
    "ministral3": "dense.variants",
    "nanochat": "dense.variants",
    "olmo": "dense.variants",
    "seed_oss": "dense.variants",
    "falcon": "dense.falcon",
    "opt": "dense.opt",
    "phi": "dense.phi",
    "vaultgemma": "dense.variants",
    "hunyuan_v1_dense": "moe.hunyuan",
    "hunyuan_v1_moe": "moe.hunyuan",
    "gpt_oss": "moe.gpt_oss",
    "glm4_moe": "moe.glm4_moe",
    "dots1": "moe.variants",
    "olmoe": "moe.variants",
    "qwen2_moe": "moe.variants",
    "ernie4_5_moe": "moe.ernie4_5_moe",
    "granitemoe": "moe.granitemoe",
    "granitemoeshared": "moe.granitemoe",
    "llama4_text": "moe.llama4_text",
    "deepseek_v2": "moe.deepseek_v2",
    "deepseek_v3": "moe.deepseek_v3",
    "deepseek_v32": "moe.deepseek_v32",
    "kimi_k2": "moe.variants",
    "glm4_moe_lite": "moe.glm4_moe_lite",
    "minimax_m2": "moe.minimax_m2",
    "phimoe": "moe.phimoe",
    "mamba2": "recurrent.mamba2",
    "t5": "encoders.t5",
    "bert": "encoders.bert",
    "megatron-bert": "encoders.megatron_bert",
    "roberta": "encoders.roberta",
    "xlm-roberta": "encoders.roberta",
    "modernbert": "encoders.modernbert",
    "nemotron_h": "recurrent.nemotron_h",
    "qwen3_next": "recurrent.qwen3_next",
    "qwen3_5_text": "recurrent.qwen3_5",
    "qwen3_5_moe_text": "recurrent.qwen3_5",
    "minimax": "recurrent.minimax",
    "kimi_linear": "recurrent.kimi_linear",
    "lfm2": "recurrent.lfm2",
    "lfm2_moe": "recurrent.lfm2",
    "bamba": "recurrent.bamba",
    "granitemoehybrid": "recurrent.granitemoehybrid",
}
"""Module of each ``model_type``; modules of several families list them in ``FAMILIES``."""

MODEL_TYPES = tuple(_MODULES)
"""Values of ``model_type``, in the order in which an export tries them for a model."""


def find_family(model_type: str) -> Any:
    """Import and return the family of a ``model_type``.

    Raises:
        ValueError: if no family has this type.
        LookupError: if a row of ``_MODULES`` has a module or a family that does not exist.
    """
    if model_type not in _MODULES:
        raise ValueError(f"model_type {model_type!r} is not known: use {', '.join(_MODULES)}.")
    name = _MODULES[model_type]
    path = f"families/{name.replace('.', '/')}.py"
    if find_spec(f"{__name__}.{name}") is None:
        raise LookupError(
            f"families/__init__.py lists model_type {model_type!r}, but {path} is missing: "
            "add it, with a FAMILY."
        )
    module = import_module(f"{__name__}.{name}")
    families = getattr(module, "FAMILIES", None)
    if families is None:
        return getattr(module, "FAMILY", module)
    if model_type not in families:
        raise LookupError(
            f"families/__init__.py lists model_type {model_type!r} as one of {path}, whose "
            "FAMILIES lacks it: add it there."
        )
    return families[model_type]


def inference_fields(family: Any) -> tuple[str, ...]:
    """Return the config.json fields that a family copies unread, for inference engines."""
    return (*getattr(family, "carries", ()), *getattr(family, "unread", ()))


def stored_model(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Return a folder's model description, and its tensors under the table's names.

    Raises:
        ValueError: if the family cannot express the model, or a tensor has two names.
    """
    family = find_family(config.get("model_type", ""))
    check_architectures(config)
    renames = getattr(family, "renames", None)
    new_names = renames(tensors.keys()) if renames else {}
    if twice := sorted(name for name, new in new_names.items() if new in tensors):
        raise ValueError(f"{twice[0]} and {new_names[twice[0]]} are names of one tensor.")
    description = family.to_ours(config)
    named = {new_names.get(name, name): entry for name, entry in tensors.items()}
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
    """Raise ValueError if the class in a config.json does not belong to its ``model_type``."""
    model_type, named = config.get("model_type", ""), config.get("architectures") or []
    family = find_family(model_type) if model_type in MODEL_TYPES else None
    own_class = str(getattr(family, "architecture", "")).lower()
    stem = getattr(family, "ARCHITECTURE", re.sub(r"[_-]|text$", "", model_type)).lower()
    has_one_class = isinstance(named, list) and len(named) <= 1
    class_names = [str(one).lower().replace("_", "") for one in named] if has_one_class else []
    if not has_one_class or any(
        not one.startswith(stem) and one != own_class for one in class_names
    ):
        raise ValueError(
            f"config.json has model_type {model_type!r} and architectures {named}: "
            "architectures must name one class of that type."
        )


def family_for(description: dict[str, Any]) -> str:
    """Return the first ``model_type`` whose family can express a description.

    Raises:
        ValueError: with the reason of each family, if no family can.
    """
    reasons = []
    for model_type in MODEL_TYPES:
        try:
            find_family(model_type).to_theirs(description)
        except ValueError as error:
            reasons.append(f"\n  {model_type}: {error}")
        else:
            return model_type
    raise ValueError(f"no Hugging Face family can express this model: {''.join(reasons)}")


def table_for(description: dict[str, Any]) -> Table:
    """Return the rules of a description's weights for the family that ``family_for`` finds."""
    return find_family(family_for(description)).table(description)
