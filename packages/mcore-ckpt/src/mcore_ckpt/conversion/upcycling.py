"""Upcycling: converts a checkpoint of a dense model to a mixture of experts.

Each expert starts as the dense feed-forward network, or with a granularity of g as one of its g
slices along the width. The g experts whose slices make up the dense network share one random
router row, so that a token that is routed to all of them gets the dense output. He et al. 2024,
Upcycling Large Language Models into Mixture of Experts, arXiv:2410.07524. The scale multiplies
linear factors (up-projection and second matrix), never a gate, so that the model computes the
same function if k is a multiple of g and weights sum to 1.
"""

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_base.stores import as_path
from mcore_ckpt.conversion.options import UpcycleOptions
from mcore_ckpt.conversion.resharding import write_whole
from mcore_ckpt.conversion.targets import write_small_files
from mcore_ckpt.formats.open_checkpoint import PREFIX
from mcore_ckpt.formats.recognition import folder_format
from mcore_ckpt.formats.sources import opened
from mcore_ckpt.mapping.row_streams import Progress, Rows, row_groups, slabs, with_progress
from mcore_ckpt.storage.checksums import finalize_index
from mcore_ckpt.storage.files import DTYPES, Item
from mcore_ckpt.storage.outputs import check_place, check_room, check_run_folder, fresh_step
from mcore_ckpt.storage.paths import RELEASE, commit, resolve_folder
from mcore_models.logical_tensors import moe_layers
from mcore_moe.config import MoEConfig

log = logging.getLogger(__name__)


def upcycle(
    source: str | Path,
    output: str | Path,
    options: UpcycleOptions,
    *,
    on_progress: Progress | None = None,
) -> Path:
    """Write a dense checkpoint as a ``release`` with experts, without its optimizer state.

    Streams slabs of rows: no tensor is held in memory as a whole.

    Args:
        source: run folder (its latest step) or step folder of a dense model, or a folder of
            Hugging Face or Megatron.
        output: run folder that gets the release.
        options: number, routing and layers of the experts.
        on_progress: called for each slab written.

    Returns:
        The release's folder.

    Raises:
        ValueError: if the checkpoint does not describe a dense model with feed-forward layers,
            the granularity does not divide their width, or the output lies in the source.
        CheckpointError: if files are damaged, the disk is full, or the output holds a release.
            Then the output is removed.
    """
    output, folder = as_path(output), resolve_folder(as_path(source), takes_any=True)
    format_name = folder_format(folder) or "mcore"
    check_place(output, folder)
    check_run_folder(output)
    if options.moe_router_topk % options.moe_upcycling_granularity:
        log.warning(
            "--moe-router-topk %d is not a multiple of --moe-upcycling-granularity %d: the new "
            "model does not compute the function of the dense model.",
            options.moe_router_topk,
            options.moe_upcycling_granularity,
        )
    if options.moe_router_pre_softmax and options.init_method_std:
        log.warning(
            "--moe-router-pre-softmax weighs experts by a softmax over all experts, which a "
            "random router makes unequal: the new model computes the function of the dense "
            "model only approximately. For equality use --init-method-std 0, or leave the "
            "flag out.",
        )
    with opened(format_name, folder) as dense:
        description = dense.description
        if description.get("moe", {}).get("num_experts", 0):
            raise ValueError(f"{folder} has experts already: give a dense model.")
        layers = _layers(folder, description, options)
        items = _items(dense.ours, layers, options)
        dense_width = dense.ours.entries[f"blocks.{layers[0]}.mlp.fc2.weight"].shape[1]
        moe = {
            **_fields(options),
            "moe_ffn_hidden_size": dense_width // options.moe_upcycling_granularity,
        }
        extra = {"model": {**description, "moe": moe}, "upcycled": str(folder)}
        check_room(output, sum(item.num_bytes for item in items))
        with fresh_step(output, RELEASE) as target:
            index = write_whole(target, with_progress(items, on_progress), extra)
            write_small_files(target, dense)
            return commit(target, output, RELEASE, finalize_index(index, target))


def _layers(step: Path, description: Mapping[str, Any], options: UpcycleOptions) -> list[int]:
    pattern = moe_layers(MoEConfig(**_fields(options)), description["config"]["num_layers"])
    layers = [layer for layer, has_experts in enumerate(pattern) if has_experts]
    if not layers:
        raise ValueError(
            f"--moe-layer-freq {options.moe_layer_freq} selects no layer of {step}: give a "
            "frequency or list that selects one."
        )
    return layers


def _fields(options: UpcycleOptions) -> dict[str, Any]:
    names = (
        "num_experts",
        "moe_router_topk",
        "moe_layer_freq",
        "moe_router_pre_softmax",
        "moe_aux_loss_coeff",
    )
    return {name: getattr(options, name) for name in names}


def _items(source: Rows, layers: list[int], options: UpcycleOptions) -> list[Item]:
    """List the items of the new checkpoint, in the order of the old one."""
    items = []
    layer_of_prefix = {f"blocks.{layer}.mlp.": layer for layer in layers}
    seen = set()
    for name, entry in source.entries.items():
        prefix = next((p for p in layer_of_prefix if name.startswith(p)), None)
        if prefix is None:
            items.append(
                Item(PREFIX + name, entry.dtype, entry.shape, partial(slabs, source, name))
            )
            continue
        if prefix not in seen:
            seen.add(prefix)
            items.append(_router(source, prefix, layer_of_prefix[prefix], options))
        items += _experts(source, name, prefix, options)
    missing = layer_of_prefix.keys() - seen
    if missing:
        raise ValueError(
            f"{sorted(missing)[0]}* is not in the checkpoint: only layers with a dense "
            "feed-forward network can get experts. Leave the layer out of --moe-layer-freq."
        )
    return items


def _router(source: Rows, place: str, layer: int, options: UpcycleOptions) -> Item:
    hidden_size = source.entries[f"{place}fc2.weight"].shape[0]
    dtype = source.entries[f"{place}fc2.weight"].dtype
    shape = (options.num_experts, hidden_size)
    name = f"{_moe(place)}router.weight"
    return Item(name, dtype, shape, partial(_router_rows, shape, dtype, layer, options))


def _router_rows(
    shape: tuple[int, int], dtype: str, layer: int, options: UpcycleOptions
) -> Iterator[Tensor]:
    # On the CPU torch uses 32 bits of a seed.
    drawn = sha256(f"router of layer {layer} from {options.seed}".encode()).digest()[:4]
    generator = torch.Generator().manual_seed(int.from_bytes(drawn, "little"))
    groups = options.num_experts // options.moe_upcycling_granularity
    rows = torch.randn(groups, shape[1], generator=generator) * options.init_method_std
    yield rows.repeat_interleave(options.moe_upcycling_granularity, 0).to(DTYPES[dtype])


def _moe(place: str) -> str:
    return PREFIX + place.removesuffix("mlp.") + "moe."


def _experts(source: Rows, name: str, place: str, options: UpcycleOptions) -> list[Item]:
    """Return the items of one dense tensor's slices, one for each expert."""
    entry, part, slices = (
        source.entries[name],
        name.removeprefix(place),
        options.moe_upcycling_granularity,
    )
    # The width is the columns of the second matrix, the rows of the others, and no dimension of
    # the second bias.
    cut = {"fc2.weight": 1, "fc2.bias": None}.get(part, 0)
    if cut is not None and entry.shape[cut] % slices:
        raise ValueError(
            f"--moe-upcycling-granularity {slices} must divide the dense width "
            f"{entry.shape[cut]}."
        )
    shape = tuple(n // slices if d == cut else n for d, n in enumerate(entry.shape))
    is_gated = f"{place}fc1.gate.weight" in source.entries
    factor = _factor(part, is_gated, options)
    return [
        Item(
            f"{_moe(place)}experts.{expert}.{part}",
            entry.dtype,
            shape,
            partial(_slice, source, name, shape, cut, expert % slices, factor),
        )
        for expert in range(options.num_experts)
    ]


def _factor(part: str, is_gated: bool, options: UpcycleOptions) -> float:
    if part == "fc2.bias":
        return (
            options.scale / options.moe_upcycling_granularity
        )  # each of the g slices adds the whole bias
    if is_gated:
        return options.scale**0.5 if part.startswith(("fc1.up", "fc2")) else 1.0
    return options.scale if part.startswith("fc2") else 1.0


def _slice(
    source: Rows,
    name: str,
    shape: tuple[int, ...],
    cut: int | None,
    number: int,
    factor: float,
) -> Iterator[Tensor]:
    """Yield one expert's slice by groups of rows, times a factor in float32."""
    first = number * shape[0] if cut == 0 else 0
    for begin, stop in row_groups((shape[0], *source.entries[name].shape[1:])):
        rows = source.rows(name, first + begin, first + stop)
        if cut == 1:
            rows = rows[:, number * shape[1] : (number + 1) * shape[1]].contiguous()
        if factor != 1.0:
            wide = torch.promote_types(rows.dtype, torch.float32)
            rows = (rows.to(wide) * factor).to(rows.dtype)
        yield rows
