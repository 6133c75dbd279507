"""Removes and restores classification heads of Hugging Face models.

The model below the head belongs to a known family. The few tensors of the head are stored
unchanged in a checkpoint's ``hf`` entry and written again on export; nothing here runs them. A
model without a head is read with its embedding as a tied head.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mcore_ckpt.formats.recognition import other_head
from mcore_ckpt.mapping.row_streams import Rows
from mcore_ckpt.storage.files import Item, memory
from mcore_ckpt.storage.index import TensorEntry

_PREFIXES = {
    "gpt2": "transformer.",
    **dict.fromkeys(("mamba2", "nemotron_h"), "backbone."),
    "gpt_neox": "gpt_neox.",
}
"""Prefix of the model's weights in a folder with a head, if it is not ``model.``."""
_TENSOR = re.compile(r"(score|classifier)\.(weight|bias)")
_LABELS = ("id2label", "label2id", "problem_type", "num_labels", "classifier_dropout")
_MAX_BYTES = 1 << 24
_BERTS = ("bert", "megatron-bert")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class BareModel:
    """A folder's model without its head."""

    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    """Tensors of the model, named as below a head that predicts tokens."""
    head: dict[str, TensorEntry]
    """Tensors of the head."""
    record: dict[str, Any]
    """Facts needed to write the head again; empty: nothing was removed."""


def take_head_off(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> BareModel:
    """Return a model without its classification head, with names as below a head for tokens."""
    whole = BareModel(dict(config), dict(tensors), {}, {})
    architecture = other_head(config)
    model_type = config.get("model_type", "")
    if architecture is None or model_type == "t5" or "lm_head.weight" in tensors:
        return whole
    stem, has_classes = architecture["stem"], architecture["kind"] != "Model"
    if model_type in _BERTS and not has_classes:
        return whole
    head = {name: entry for name, entry in tensors.items() if _TENSOR.fullmatch(name)}
    body = {name: entry for name, entry in tensors.items() if name not in head}
    head_fields = {name: config[name] for name in _LABELS if name in config}
    record: dict[str, Any] = {"architecture": architecture.group(), "config": head_fields}
    bare = {name: value for name, value in config.items() if name not in head_fields}
    if model_type in _BERTS:
        body = {name.removeprefix("bert."): entry for name, entry in body.items()}
        return BareModel({**bare, "architectures": [f"{stem}Model"]}, body, head, record)
    if not has_classes:
        prefix = _PREFIXES.get(model_type, "model.")
        if any(name.startswith(prefix) for name in body):
            return whole
        body = {f"{prefix}{name}": entry for name, entry in body.items()}
        record["prefix"] = prefix
    record["config"]["tie_word_embeddings"] = config.get("tie_word_embeddings")
    bare |= {"architectures": [f"{stem}ForCausalLM"], "tie_word_embeddings": True}
    return BareModel(bare, body, head, record)


def with_tensors(record: Mapping[str, Any], head: Rows) -> dict[str, Any]:
    """Return the record of a head with its tensors added, encoded as text.

    Raises:
        ValueError: if a tensor is too large to be stored as text, or has another dtype.
    """
    tensors = {}
    for name, entry in head.entries.items():
        if entry.num_bytes > _MAX_BYTES or entry.dtype not in _DTYPES:
            raise ValueError(
                f"{record['architecture']} has {name} of {entry.num_bytes} bytes in "
                f"{entry.dtype}, which cannot be kept: heads must be in {', '.join(_DTYPES)} "
                f"and have up to {_MAX_BYTES} bytes."
            )
        rows = head.rows(name, 0, entry.shape[0])
        data = base64.b64encode(memory(rows.contiguous())).decode()
        tensors[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data": data}
    return {**record, "tensors": tensors}


def put_head_on(
    record: Mapping[str, Any], config: dict[str, Any], items: list[Item]
) -> tuple[dict[str, Any], list[Item]]:
    """Return the config.json and tensors of a model with its head; inverse of removal."""
    config = {**config, "architectures": [record["architecture"]], **record["config"]}
    for name, value in record["config"].items():
        if value is None:
            del config[name]
    if config["model_type"] in _BERTS:
        items = [replace(item, name=f"bert.{item.name}") for item in items]
    prefix = record.get("prefix", "")
    items = [replace(item, name=item.name.removeprefix(prefix)) for item in items]
    return config, [*items, *(_item(name, row) for name, row in record["tensors"].items())]


def _item(name: str, row: Mapping[str, Any]) -> Item:
    data = bytearray(base64.b64decode(row["data"]))
    tensor = torch.frombuffer(data, dtype=_DTYPES[row["dtype"]]).view(row["shape"])
    return Item(name, row["dtype"], tuple(row["shape"]), lambda: [tensor])
