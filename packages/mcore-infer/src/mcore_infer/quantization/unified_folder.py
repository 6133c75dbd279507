"""Writes quantized weights as a Hugging Face folder in the unified layout."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mcore_base.atomic_files import write_durably
from mcore_base.lazy_front import package_version
from mcore_ckpt.conversion.targets import Watch, hf_small_files, target_model_type
from mcore_ckpt.families import find_family
from mcore_ckpt.formats.hf_folder import write_hf_folder
from mcore_ckpt.formats.open_checkpoint import OpenCheckpoint
from mcore_ckpt.formats.quantization import WidenedRows
from mcore_ckpt.formats.quantized_layouts import (
    INPUT_SCALE,
    PRE_QUANT_SCALE,
    WEIGHT_SCALE,
    WEIGHT_SCALE_2,
    Scales,
)
from mcore_ckpt.formats.quantized_plans import QuantPlan
from mcore_ckpt.formats.recognition import QUANT_CONFIG
from mcore_ckpt.mapping.row_streams import HeldRows, slabs
from mcore_ckpt.mapping.rules import Link, expand
from mcore_ckpt.mapping.views import Cast, stacked_items, their_items
from mcore_ckpt.storage.files import DTYPE_NAMES, Item
from mcore_parallel.sharding import named_shards

_LEFT_DTYPE = "BF16"
_WEIGHT = ".weight"
MAX_FILE_BYTES = 5_000_000_000
"""Limit of the bytes of tensors in one file."""


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes of one tensor of the folder, and their scales."""

    packed: Tensor
    scales: Scales
    input_scale: Tensor | None
    pre_quant_scale: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to write, by the last part of their names."""
        tensors = {
            "weight": self.packed,
            WEIGHT_SCALE: self.scales.weight_scale,
            WEIGHT_SCALE_2: self.scales.weight_scale_2,
            INPUT_SCALE: self.input_scale,
            PRE_QUANT_SCALE: self.pre_quant_scale,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def find_links(source: OpenCheckpoint) -> list[Link]:
    """Return the links between the tensors of a Hugging Face folder and of a checkpoint.

    Raises:
        ValueError: if the model belongs to no known family.
    """
    return expand(find_family(target_model_type(source)).table(source.description))


def write_folder(
    folder: Path,
    source: OpenCheckpoint,
    model: nn.Module,
    plan: QuantPlan,
    done: Mapping[str, QuantizedTensor],
    cache_tops: Mapping[int, Mapping[str, Tensor]],
) -> int:
    """Write quantized tensors, the other tensors of the model, both configs and the tokenizer.

    Args:
        folder: empty folder.
        source: checkpoint of the model: its description, tokenizer and small files.
        model: model with the weights that are not quantized.
        plan: layouts, written to the configs.
        done: quantized tensors, by module of the folder.
        cache_tops: largest keys (``k``) and values (``v``) by layer; empty: no scales of the
            cache are written.

    Returns:
        Bytes of all tensors.

    Raises:
        ValueError: if the family has no names for scales of the cache.
    """
    family = find_family(target_model_type(source))
    links = find_links(source)
    items: list[Item] = []
    # One process holds complete tensors.
    held = {name: shard.pieces[0].data for name, shard in named_shards(model).items()}
    rest = Cast(HeldRows(held), _LEFT_DTYPE)
    for link in links:
        module = link.theirs.removesuffix(_WEIGHT)
        if module == link.theirs or module not in done:
            items += their_items([link], rest)
            continue
        items += [
            _item(f"{module}.{kind}", tensor) for kind, tensor in done[module].tensors().items()
        ]
    items = stacked_items(items)
    items += _cache_items(links, cache_tops)
    config = {**source.hf.get("config", {}), **family.to_theirs(source.description)}
    config |= {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    write_unified(folder, source, plan, config, items, MAX_FILE_BYTES)
    return sum(item.num_bytes for item in items)


def write_unified(
    folder: Path,
    source: OpenCheckpoint,
    plan: QuantPlan,
    config: dict[str, Any],
    items: Sequence[Item],
    max_shard_bytes: int,
) -> None:
    """Write a folder of the unified layout: tensors, both configs and the tokenizer."""
    producer = {"name": "mcore-infer", "version": package_version("mcore-infer")}
    config = {**config, "quantization_config": plan.quantization_config(producer)}
    write_hf_folder(folder, config, items, max_shard_bytes)
    quant_config = json.dumps(plan.hf_quant_config(producer), indent=2).encode() + b"\n"
    write_durably(folder / QUANT_CONFIG, quant_config)
    write_tokenizer(folder, source)


def write_tokenizer(folder: Path, source: OpenCheckpoint) -> None:
    """Write the files of the tokenizer and the generation config."""
    for name, content in hf_small_files(source).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_durably(folder / name, content)


def _item(name: str, tensor: Tensor) -> Item:
    return Item(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), partial(_on_host, tensor))


def _on_host(tensor: Tensor) -> Iterable[Tensor]:
    return [tensor.detach().cpu().contiguous()]


def _cache_items(links: Sequence[Link], tops: Mapping[int, Mapping[str, Tensor]]) -> list[Item]:
    modules = {name: link.theirs.removesuffix(_WEIGHT) for link in links for name in link.ours}
    items = []
    for layer, both in sorted(tops.items()):
        for kind, top in both.items():
            module = modules.get(f"blocks.{layer}.attention.qkv.{kind}{_WEIGHT}", "")
            if not module.endswith(f".{kind}_proj"):
                raise ValueError(
                    "--kv-cache-dtype fp8: this family has no k_proj and v_proj, after which "
                    "scales of the cache are named. Leave the option out."
                )
            scale = (top / torch.finfo(torch.float8_e4m3fn).max).clamp(min=2.0**-100)
            items.append(_item(f"{module}.{kind}_scale", scale.float()))
    return items


def excluded(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that a config must exclude: always the head, never an embedding."""
    return tuple(dict.fromkeys(("lm_head", *(m for m in modules if "embed" not in m))))


_DTYPE_WORDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def quantized(source: OpenCheckpoint, form: str) -> WidenedRows:
    """Return the tensors of a quantized source; raise ValueError for other sources."""
    if not isinstance(source.theirs, WidenedRows):
        raise ValueError(
            f"--format {form} needs weights that mcore-infer quantize has quantized. For other "
            "weights use mcore-ckpt convert mcore-to-hf."
        )
    return source.theirs


def write_hf_quant(
    folder: Path, source: OpenCheckpoint, max_shard_bytes: int, watch: Watch
) -> str:
    """Write a quantized source as a unified folder; return the folder's algorithm.

    Args:
        folder: an empty folder.
        source: opened quantized folder.
        max_shard_bytes: limit of the bytes of tensors in one file.
        watch: called once with all tensors.

    Raises:
        ValueError: if the source is not quantized.
    """
    widened = quantized(source, "hf-quant")
    stored, plan = widened.stored, widened.plan
    items = [
        Item(name, stored.entries[name].dtype, entry.shape, partial(slabs, stored, name))
        for name, entry in stored.entries.items()
    ]
    write_unified(folder, source, plan, hf_config(source), watch(items), max_shard_bytes)
    return plan.algo


def hf_config(source: OpenCheckpoint) -> dict[str, Any]:
    """Return the config.json of a model, without its quantization."""
    family = find_family(target_model_type(source))
    source_config: Mapping[str, Any] = source.hf.get("config", {})
    word = _DTYPE_WORDS.get(source.ours.entries["embedding.weight"].dtype, "float32")
    return {
        **source_config,
        **family.to_theirs(source.description),
        "dtype": word,
        "torch_dtype": word,
    }
